"""``Policy(fuel=n)`` makes the first n rewrites; `bisect` finds the one that breaks a comparison."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import aicf_jax
from aicf_jax import FuseError, Kernel, Policy
from tests.support import EVERY_GEMM_EPILOGUE, normal

X = normal(1, 4, 8)
WS = [normal(2 + k, 8, 8) for k in range(5)]
ACTS = (jax.nn.relu, jnp.tanh, jax.nn.silu, jax.nn.sigmoid, jax.nn.gelu)


def chain(x, ws):
    for act, w in zip(ACTS, ws, strict=True):
        x = act(x @ w)
    return x


def explained(fuel, f=chain, *args):
    return aicf_jax.explain(f, *(args or (X, WS)), policy=Policy(fuel=fuel))


class TestFuel:
    @pytest.mark.parametrize("fuel", range(6))
    def test_the_first_n_rewrites_are_made_and_the_others_refused(self, fuel):
        report, whole = explained(fuel), explained(None)
        assert report.fusions == whole.fusions[:fuel]
        assert [f.rewrite for f in report.fusions] == list(range(1, fuel + 1))
        left = [r for r in report.refusals if r.code == "fuel"]
        assert [r.site for r in left] == [f.site for f in whole.fusions[fuel:]]
        assert all(r.stage == "legality" and r.expected == f"one of the first {fuel} rewrites" for r in left)

    def test_more_than_there_are_is_all(self):
        assert explained(100) == explained(None)

    def test_every_fuel_computes_the_same(self):
        for fuel in range(6):
            got = aicf_jax.fuse(chain, policy=Policy(fuel=fuel))(X, WS)
            # five products of 8 terms: 2 * 40 * 2**-24 of values of order 1, and the activations' own roundings
            np.testing.assert_allclose(got, chain(X, WS), rtol=1e-4, atol=1e-5)

    def test_a_region_is_refused_once(self):
        """A chain that two patterns fit, with and without its activation, is one rewrite."""
        report = explained(0, lambda x, w, b: jax.nn.relu(x @ w + b), X, WS[0], X[0])
        assert [(r.pattern, r.code) for r in report.refusals] == [("gemm_epilogue", "fuel")]

    def test_inner_programs_come_first_and_count_once(self):
        def f(x, ws):
            x = jax.nn.silu(x @ ws[0])
            return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, jnp.stack(ws))[0]

        whole = explained(None, f, X, WS)
        assert sorted((f.rewrite, "tanh" in f.attrs) for f in whole.fusions) == [(1, True), (2, False)]
        (only,) = explained(1, f, X, WS).fusions
        assert "activation=tanh" in only.attrs

    def test_a_rewrite_brings_its_whole_backward(self):
        dense, args = (lambda x, w, b: jax.nn.relu(x @ w + b)), (X, WS[0], X[0])
        one, whole = (explained(fuel, dense, *args).fusions[0] for fuel in (1, None))
        assert one.backward == whole.backward and "gemm_epilogue_grad" in one.backward

    def test_derivatives_under_every_fuel(self):
        want = jax.grad(lambda x: chain(x, WS).sum())(X)
        for fuel in (0, 2, 5):
            f = aicf_jax.fuse(chain, policy=Policy(fuel=fuel))
            np.testing.assert_allclose(jax.grad(lambda x, f=f: f(x, WS).sum())(X), want, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("bad", [-1, 1.5, "all", True])
    def test_it_is_a_number_of_rewrites(self, bad):
        with pytest.raises(ValueError, match=r"Policy\(fuel=...\): expected None or a number of rewrites, found"):
            Policy(fuel=bad)


def wrong_for(*activations):
    """Kernels that are wrong by one percent for these activations."""
    capabilities = {**EVERY_GEMM_EPILOGUE, "activation": set(activations)}
    run = lambda op, *xs: tuple(1.01 * y for y in op.reference(*xs))  # noqa: E731
    return aicf_jax.KERNELS + (Kernel("off", "gemm_epilogue", ("cpu",), capabilities, run),)


def close(fused):
    np.testing.assert_allclose(fused(X, WS), chain(X, WS), rtol=1e-4, atol=1e-5)


class TestBisect:
    @pytest.mark.parametrize(("name", "number"), [("relu", 1), ("silu", 3), ("gelu_tanh", 5)])
    def test_finds_the_rewrite(self, name, number):
        found = aicf_jax.bisect(chain, close, X, WS, kernels=wrong_for(name))
        assert found.fuel == number and found.rewrites == 5
        assert found.fusion.op == "gemm_epilogue" and found.fusion.kernel == "off" and f"={name}" in found.fusion.attrs
        assert found.runs <= 2 + 3  # both ends, and the logarithm of five
        assert "Mismatched elements" in found.failure

    def test_says_what_it_found(self):
        text = str(aicf_jax.bisect(chain, close, X, WS, kernels=wrong_for("silu")))
        assert re.match(
            r"rewrite 3 of 5 breaks the check: gemm_epilogue at .*test_fuel_and_bisect.py:\d+ \(chain\)", text
        )
        assert "passes with the first 2, fails with the first 3" in text

    def test_of_several_one_with_a_passing_predecessor_is_found(self):
        """Failing at 2 and at 4, the check passes again in between: any such edge is right."""
        calls = []

        def check(fused):
            fuel = fused.context.policy.fuel
            calls.append(fuel)
            return fuel not in (2, 4, 5)

        found = aicf_jax.bisect(chain, check, X, WS)
        assert found.fuel in (2, 4) and found.runs == len(calls)
        assert found.failure == "the check returned False"

    def test_a_check_that_passes(self):
        found = aicf_jax.bisect(chain, close, X, WS)
        assert found.fuel is None and found.fusion is None and found.runs == 1
        assert str(found) == "the check passes with all 5 rewrites (1 run)"

    def test_a_check_that_fails_without_any_rewrite_is_not_about_fusing(self):
        with pytest.raises(FuseError, match="expected a check that passes with nothing fused, found: the check"):
            aicf_jax.bisect(chain, lambda fused: False, X, WS)
        with pytest.raises(FuseError, match="ZeroDivisionError") as caught:
            aicf_jax.bisect(lambda x: x, lambda fused: 1 / 0, X)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def test_what_a_check_returns_must_be_true_or_false(self):
        with pytest.raises(TypeError, match=r"bisect\(check=...\): expected it to return True, False or None"):
            aicf_jax.bisect(chain, lambda fused: fused(X, WS), X, WS)

    def test_shapes_are_enough_and_a_verification_error_is_a_failure(self):
        shapes = jax.eval_shape(lambda: (X, WS))
        policy = Policy(verify=True)
        found = aicf_jax.bisect(
            chain, lambda f: f(X, WS) is not None, *shapes, kernels=wrong_for("tanh"), policy=policy
        )
        assert found.fuel == 2 and found.failure.startswith("VerificationError: gemm_epilogue")

    def test_a_fused_target_keeps_its_own_kernels(self):
        fused = aicf_jax.fuse(chain, kernels=wrong_for("sigmoid"))
        assert aicf_jax.bisect(fused, close, X, WS).fuel == 4

    def test_a_module(self):
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(3)(nn.tanh(nn.Dense(8)(x)))

        net = Net()
        variables = net.init(jax.random.key(0), X)

        def check(fused):
            np.testing.assert_allclose(fused.apply(variables, X), net.apply(variables, X), rtol=1e-4, atol=1e-5)

        found = aicf_jax.bisect(net, check, variables, X, kernels=wrong_for("none"))
        assert "activation=none" in found.fusion.attrs and found.rewrites == 2
