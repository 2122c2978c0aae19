"""One pattern, one kernel, one operation tag from outside of the package, under everything that a family must bear."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import aicf_jax
from aicf_jax import OpFlags, Pattern, Policy, pattern
from aicf_jax.normalize import Rule
from aicf_jax.pattern import GEMM
from tests.extension.squared_relu import KERNELS, OP, PATTERN, PATTERNS, RULE
from tests.support import assert_same, dyadic, normal, quick_jit

X, W, B = dyadic(1, 5, 8), dyadic(2, 8, 4), dyadic(3, 4)
# One product of 8 terms, squared (its relative error doubles), and the same again for each derivative.
ROUNDINGS = 4 * (2 * 8 + 4)

SPELLINGS = {
    "power": lambda x, w, b: jax.nn.relu(x @ w + b) ** 2,
    "square": lambda x, w, b: jnp.square(jax.nn.relu(x @ w + b)),
    "product": lambda x, w, b: (lambda r: r * r)(jax.nn.relu(x @ w + b)),
    "no_bias": lambda x, w, b: jnp.square(jax.nn.relu(x @ w)),
    "einsum": lambda x, w, b: jnp.square(jax.nn.relu(jnp.einsum("mk,kn->mn", x, w) + b)),
}
NEAR_MISSES = {
    "cube": (lambda x, w, b: jax.nn.relu(x @ w + b) ** 3, "cubed"),
    "other_activation": (lambda x, w, b: jnp.tanh(x @ w + b) ** 2, "cubed"),
    "relu_returned": (lambda x, w, b: (lambda r: (r * r, r))(jax.nn.relu(x @ w + b)), None),
    "two_different": (lambda x, w, b: jax.nn.relu(x @ w + b) * jax.nn.relu(x @ w - b), None),
}


def fused(f, **options):
    return aicf_jax.fuse(f, patterns=PATTERNS, kernels=KERNELS, **options)


def explained(f, **options):
    return aicf_jax.explain(f, X, W, B, patterns=PATTERNS, kernels=KERNELS, **options)


@pytest.mark.parametrize("f", SPELLINGS.values(), ids=SPELLINGS)
class TestEverySpelling:
    def test_is_one_operation_with_the_kernel(self, f):
        report = explained(f)
        (fusion,) = report.fusions
        assert (fusion.op, fusion.pattern, fusion.kernel) == ("gemm_squared_relu", PATTERN.name, "squared_relu_gemm")
        assert fusion.launches_after == 1 < fusion.launches_before
        assert "test_squared_relu.py" in fusion.site

    def test_keeps_values_and_derivatives(self, f):
        cotangent, tangents = normal(7, 5, 4), (normal(4, 5, 8), normal(5, 8, 4), normal(6, 4))

        def every(h):
            def loss(w):
                return (h(X, w, B) * cotangent).sum()

            @quick_jit
            def results(x, w, b):
                second = jax.grad(lambda w: (jax.grad(loss)(w) ** 2).sum())(w)
                return h(x, w, b), jax.vjp(h, x, w, b)[1](cotangent), jax.jvp(h, (x, w, b), tangents), second

            return results(X, W, B)

        assert_same(every(fused(f)), every(f), roundings=ROUNDINGS)

    def test_under_other_transformations(self, f):
        xs = jnp.stack([X, -X, 2 * X])

        def every(h):
            mapped = jax.vmap(h, (0, None, None))
            kept = jax.checkpoint(h)
            return quick_jit(lambda xs: (mapped(xs, W, B), jax.grad(lambda w: kept(X, w, B).sum())(W)))(xs)

        assert_same(every(fused(f)), every(f), roundings=ROUNDINGS)


@pytest.mark.slow
def test_derivatives_against_finite_differences():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        args = tuple(jnp.asarray(np.asarray(a), jnp.float64) + 0.03 for a in (X, W, B))
        check_grads(fused(SPELLINGS["power"]), args, order=2)


@pytest.mark.parametrize(("f", "code"), NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_misses_are_left_alone(f, code):
    report = explained(f)
    assert report.count(OP.name) == 0
    if code is not None:
        (refusal,) = (r for r in report.refusals if r.pattern == PATTERN.name)
        assert (refusal.code, refusal.stage) == (code, "match")
        assert refusal.expected == "the square of a relu"
    assert_same(fused(f)(X, W, B), f(X, W, B), roundings=ROUNDINGS)


def test_verification_and_bitwise_hold_for_it_too():
    f = SPELLINGS["power"]
    fused(f, policy=Policy(verify=True))(X, W, B)
    report = aicf_jax.compare(f, X, W, B, patterns=PATTERNS, kernels=KERNELS)
    assert report.fusions[0].error <= report.fusions[0].bound
    (refusal,) = (r for r in explained(f, policy=Policy(numerics="bitwise")).refusals if r.pattern == PATTERN.name)
    assert refusal.code == "numerics"


def test_without_the_kernel_it_is_left_to_xla():
    f = SPELLINGS["power"]
    assert aicf_jax.explain(f, X, W, B, patterns=PATTERNS).fusions[0].kernel == "xla"
    g = aicf_jax.fuse(f, patterns=PATTERNS)
    assert_same(jax.grad(lambda w: g(X, w, B).sum())(W), jax.grad(lambda w: f(X, w, B).sum())(W), roundings=ROUNDINGS)


class TestRules:
    def test_they_are_seen_by_programs_inside(self):
        def f(x, ws):
            return jax.lax.scan(lambda c, w: (jax.nn.relu(c @ w) ** 2, None), x, ws)[0]

        assert aicf_jax.explain(f, X, jnp.zeros((3, 8, 8)), patterns=PATTERNS).count(OP.name) == 1

    def test_other_patterns_are_as_they_were(self):
        f = lambda x, w, b: jax.nn.gelu(x @ w + b)  # noqa: E731
        plain, more = aicf_jax.explain(f, X, W, B), explained(f)
        assert [x.op for x in more.fusions] == [x.op for x in plain.fusions] == ["gemm_epilogue"]

    def test_they_change_nothing_for_those_who_do_not_ask(self):
        explained(SPELLINGS["power"])
        assert aicf_jax.explain(SPELLINGS["power"], X, W, B).count(OP.name) == 0

    def test_a_rule_may_come_with_several_patterns(self):
        shorter = Pattern("bare", (GEMM, pattern.test(OpFlags.USER_0)), rewrite=OP, rules=(RULE,))
        report = aicf_jax.explain(SPELLINGS["no_bias"], X, W, B, patterns=(shorter, *PATTERNS))
        assert report.fusions[0].pattern == "bare"

    def test_two_rules_of_one_name_are_refused(self):
        other = Pattern("other", (GEMM,), rewrite=OP, rules=(Rule("squared_relu", 60, lambda graph: {}),))
        with pytest.raises(ValueError, match=r"fuse\(patterns=...\): expected normalization rules of distinct names"):
            aicf_jax.fuse(SPELLINGS["power"], patterns=(*PATTERNS, other))

    def test_something_else_than_a_rule_is_named(self):
        with pytest.raises(TypeError, match=r"Pattern\('p', rules=...\): expected Rule objects, found 'squared_relu'"):
            Pattern("p", (GEMM,), rewrite=OP, rules=("squared_relu",))

    def test_a_rule_that_breaks_the_graph_is_found(self):
        def broken(graph):
            last = max(i for i, n in enumerate(graph.nodes) if n.outputs)
            return {last: graph.nodes[0]}

        wrong = Pattern("broken", (GEMM,), rewrite=OP, rules=(Rule("broken", 90, broken),))
        f = SPELLINGS["power"]
        with pytest.raises(aicf_jax.GraphError, match="is not computed by any node"):
            aicf_jax.fuse(f, patterns=(wrong,), policy=Policy(on_failure="raise"))(X, W, B)
        assert_same(aicf_jax.fuse(f, patterns=(wrong,))(X, W, B), f(X, W, B), roundings=ROUNDINGS)
