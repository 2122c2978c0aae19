"""`Policy`, verification against the unfused program, failure handling."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aicf_jax
from aicf_jax import FuseError, Kernel, Pattern, Policy, VerificationError
from aicf_jax.kernels import ANY
from aicf_jax.pattern import GEMM, opt, star
from aicf_jax.verify import bound, difference
from tests.support import EVERY_GEMM_EPILOGUE

X, W, B = jnp.linspace(-1, 1, 20).reshape(5, 4), jnp.linspace(-2, 1, 12).reshape(4, 3), jnp.arange(3.0)
ALL = EVERY_GEMM_EPILOGUE


def dense(x, w, b):
    return jax.nn.silu(x @ w + b)


@pytest.mark.parametrize(
    "bad",
    [
        {"numerics": "fast"},
        {"target": "tpu9"},
        {"on_failure": "ignore"},
        {"ad": "none"},
        {"verify": 1},
        {"deterministic": "yes"},
    ],
)
def test_bad_options_are_named(bad):
    ((name, value),) = bad.items()
    with pytest.raises(ValueError, match=rf"Policy\({name}=.*expected.*found {value!r}"):
        Policy(**bad)


def test_policy_is_hashable_and_comparable():
    assert len({Policy(), Policy(numerics="reassociated"), Policy(numerics="bitwise")}) == 2


def test_targets_choose_platforms():
    assert Policy().platforms() == ("cpu", "cuda")
    assert Policy(target="h200").platforms() == ("cuda",)
    assert Policy(target="cpu").platforms() == ("cpu",)


@pytest.mark.parametrize("target", [3, "text", None, [1], jnp.ones(3)])
def test_fuse_takes_callables_and_modules_only(target):
    with pytest.raises(TypeError, match=r"fuse\(target=...\): expected a function, a flax linen module"):
        aicf_jax.fuse(target)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"policy": "bitwise"}, r"fuse\(policy=...\): expected a Policy"),
        ({"patterns": ("gemm",)}, r"fuse\(patterns=...\): expected Pattern objects, found 'gemm'"),
        ({"kernels": (3,)}, r"fuse\(kernels=...\): expected Kernel objects, found 3"),
    ],
)
def test_bad_arguments_are_named(kwargs, message):
    with pytest.raises(TypeError, match=message):
        aicf_jax.fuse(dense, **kwargs)


def test_two_patterns_of_one_name_are_refused():
    with pytest.raises(ValueError, match="'attention_late' twice"):
        aicf_jax.fuse(dense, patterns=aicf_jax.FUSION_PATTERNS + aicf_jax.FUSION_PATTERNS[1:2])


def test_invalid_patterns_cannot_be_built():
    with pytest.raises(ValueError, match="non-empty string"):
        Pattern("", (GEMM,), aicf_jax.ops.gemm_epilogue)
    with pytest.raises(TypeError, match="expected Test objects"):
        Pattern("p", ("gemm",), aicf_jax.ops.gemm_epilogue)
    with pytest.raises(ValueError, match="cannot be optional"):
        Pattern("p", (opt(GEMM), star(GEMM)), aicf_jax.ops.gemm_epilogue)
    with pytest.raises(TypeError, match="expected a SemanticOp"):
        Pattern("p", (GEMM,), None)


class TestVerify:
    def wrong(self, op, x, w, b):
        return (dense(x, w, b) * 1.01,)

    def fused(self, run):
        kernel = Kernel("wrong", "gemm_epilogue", ("cpu",), ALL, run)
        return aicf_jax.fuse(dense, kernels=aicf_jax.KERNELS + (kernel,), policy=Policy(verify=True))

    def test_passes_on_a_right_program(self):
        f = aicf_jax.fuse(dense, policy=Policy(verify=True))
        np.testing.assert_allclose(f(X, W, B), dense(X, W, B), rtol=1e-6)
        jax.grad(lambda w: f(X, w, B).sum())(W)

    def test_names_operation_error_bound_and_line(self):
        with pytest.raises(VerificationError) as caught:
            self.fused(self.wrong)(X, W, B)
        text = str(caught.value)
        assert "gemm_epilogue" in text and "relative error 0.01" in text and "bound" in text
        assert __file__ in text

    def test_inside_jit_the_run_fails_too(self):
        f = jax.jit(self.fused(self.wrong))
        with pytest.raises(Exception, match=r"relative error 0\.01"):
            jax.block_until_ready(f(X, W, B))
            jax.effects_barrier()

    def test_arguments_may_all_be_closed_over(self):
        f = aicf_jax.fuse(dense, policy=Policy(verify=True))
        want = dense(X, W, B)
        np.testing.assert_allclose(jax.jit(lambda: f(X, W, B))(), want, rtol=1e-6)
        _, stacked = jax.lax.scan(lambda c, _: (c, f(X, W, B)), 0.0, None, length=2)
        np.testing.assert_allclose(stacked[1], want, rtol=1e-6)

    def test_a_wrong_backward_is_found(self):
        def grad(op, residual, ct):
            dz = jax.vjp(jax.nn.silu, residual)[1](ct)[0] * 1.01
            return dz.sum(0), dz

        capabilities = {k: ANY for k in ("activation", "from_output", "summed_axes", "dtype", "rows", "formula")}
        kernel = Kernel("wrong_grad", "gemm_epilogue_grad", ("cpu",), capabilities, grad)
        f = aicf_jax.fuse(dense, kernels=aicf_jax.KERNELS + (kernel,), policy=Policy(verify=True))
        with pytest.raises(Exception, match=r"gemm_epilogue_grad.*relative error 0\.01"):
            jax.block_until_ready(jax.grad(lambda *a: f(X, *a).sum(), (0, 1))(W, B))
            jax.effects_barrier()

    def test_difference_sees_nan_infinity_dtype_and_shape(self):
        nan, inf = jnp.asarray([1.0, jnp.nan]), jnp.asarray([1.0, jnp.inf])
        assert difference(nan, nan) == difference(inf, inf) == 0
        assert difference(nan, inf) == difference(-inf, inf) == np.inf
        assert difference(jnp.ones(2), jnp.ones(3)) == difference(jnp.ones(2), jnp.ones(2, jnp.bfloat16)) == np.inf
        assert difference(jnp.asarray([1, 2]), jnp.asarray([1, 3])) == np.inf

    def test_the_bound_grows_with_length_and_roundoff(self):
        assert bound(jnp.float32, 1000) > bound(jnp.float32, 10) > 0
        assert bound(jnp.bfloat16, 10) > bound(jnp.float32, 10)


class TestFailure:
    """A fault of the framework itself (here: a pattern whose operation raises)."""

    def patterns(self):
        import dataclasses

        def attributes(match):
            raise RuntimeError("broken plug-in (test)")

        op = dataclasses.replace(aicf_jax.ops.gemm_epilogue, attributes=attributes, name="broken")
        return (Pattern("broken", (GEMM,), op),)

    def test_falls_back_to_the_unfused_program_and_is_reported(self, caplog):
        f = aicf_jax.fuse(dense, patterns=self.patterns())
        for _ in range(2):
            np.testing.assert_allclose(f(X, W, B), dense(X, W, B), rtol=1e-6)
        assert sum("broken plug-in (test)" in r.message for r in caplog.records) <= 1
        report = aicf_jax.explain(f, X, W, B)
        assert report.fusions == () and "broken plug-in" in report.failure
        assert "runs unfused" in str(report)

    def test_raises_when_asked_to(self):
        f = aicf_jax.fuse(dense, patterns=self.patterns(), policy=Policy(on_failure="raise"))
        with pytest.raises(FuseError, match="broken plug-in"):
            f(X, W, B)


def test_a_pattern_without_what_its_operation_needs_is_named():
    from aicf_jax.pattern import ACTIVATION

    f = aicf_jax.fuse(
        lambda x: jnp.tanh(x), patterns=(Pattern("odd", (ACTIVATION,), aicf_jax.ops.gemm_epilogue),),
        policy=Policy(on_failure="raise"),
    )  # fmt: skip
    with pytest.raises(FuseError, match="pattern odd matched what gemm_epilogue cannot describe"):
        f(X)


class TestReport:
    def test_text(self, golden):
        import re

        report = aicf_jax.explain(lambda x, w, b: (dense(x, w, b), jnp.maximum(x @ w, 0)), X, W, B)
        golden(re.sub(r"\S+/(test_\w+\.py):\d+", r"\1", str(report)))

    def test_json_holds_every_field(self):
        report = aicf_jax.explain(dense, X, W, B)
        data = json.loads(report.to_json())
        (fusion,) = data["fusions"]
        assert fusion["op"] == "gemm_epilogue" and fusion["kernels"] == {"cpu": "xla", "cuda": "xla"}
        assert fusion["bytes_after"] < fusion["bytes_before"]
        assert fusion["launches_after"] < fusion["launches_before"]
        assert "dZ" in fusion["backward"]

    def test_html_is_one_page_without_a_network(self):
        page = aicf_jax.explain(dense, X, W, B).to_html()
        assert page.startswith("<!doctype html>") and "gemm_epilogue" in page
        assert "http" not in page and "<script" not in page

    def test_explaining_runs_nothing_and_takes_shapes(self):
        def f(x):
            jax.debug.callback(lambda: pytest.fail("ran"))
            return jax.nn.relu(x @ W)

        struct = jax.ShapeDtypeStruct((5, 4), jnp.float32)
        assert aicf_jax.explain(f, struct).count("gemm_epilogue") == 1

    def test_a_fused_target_is_explained_under_its_own_policy(self):
        f = aicf_jax.fuse(dense, policy=Policy(numerics="bitwise"))
        assert aicf_jax.explain(f, X, W, B).fusions == ()
        assert aicf_jax.explain(f, X, W, B, policy=Policy()).count("gemm_epilogue") == 1
