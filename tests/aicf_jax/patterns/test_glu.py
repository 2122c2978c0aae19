"""Gated linear units: which spellings are one operation, and which lookalikes are refused with which code."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import aicf_jax
from tests.aicf_jax.attention_support import normal
from tests.support import key, quick_jit

X, W, V, B, C = normal(0, 6, 4), normal(1, 4, 6), normal(2, 4, 6), normal(3, 6), normal(4, 6)
H = normal(5, 4, 12)  # both projections in one
D = normal(6, 12)
ARGS = (X, W, V, B, C, H, D)


def glus(f, *args):
    report = aicf_jax.explain(f, *(args or ARGS))
    return [dict(a.split("=") for a in x.attrs.split()) for x in report.fusions if x.op == "glu"]


def halves(h):
    return h[..., : h.shape[-1] // 2], h[..., h.shape[-1] // 2 :]


ACTIVATIONS = {
    "silu": [jax.nn.silu, nnx.silu, lambda z: z * jax.nn.sigmoid(z), lambda z: z / (1 + jnp.exp(-z))],
    "gelu_tanh": [jax.nn.gelu, nn.gelu],
    "gelu_exact": [lambda z: jax.nn.gelu(z, approximate=False)],
    "relu": [jax.nn.relu],
    "sigmoid": [jax.nn.sigmoid],
    "none": [lambda z: z],
}
CASES = [(name, act) for name, functions in ACTIVATIONS.items() for act in functions]


@pytest.mark.parametrize(("name", "act"), CASES)
def test_every_activation_in_both_orders_and_both_projections(name, act):
    def separate(x, w, v, *_):
        return act(x @ w) * (x @ v)

    def turned(x, w, v, *_):
        return (x @ v) * act(x @ w)

    def fused(x, w, v, b, c, h, d):
        g, u = jnp.split(x @ h, 2, axis=-1)
        return act(g) * u

    def fused_turned(x, w, v, b, c, h, d):
        u, g = halves(x @ h)
        return u * act(g)

    found = [glus(f) for f in (separate, turned, fused, fused_turned)]
    assert [[g["activation"] for g in f] for f in found] == [[name]] * 4
    # Without an activation neither half is the gate: the first factor is taken for it.
    second = "gate_first" if name == "none" else "gate_second"
    assert [f[0]["projections"] for f in found] == ["separate", "separate", "gate_first", second]


SPELLINGS = {
    "biases": (lambda x, w, v, b, c, h, d: jax.nn.silu(x @ w + b) * (x @ v + c), "separate", 1, 1),
    "bias of the gate": (lambda x, w, v, b, c, h, d: jax.nn.silu(x @ w + b) * (x @ v), "separate", 1, 0),
    "bias of the other": (lambda x, w, v, b, c, h, d: jax.nn.silu(x @ w) * (c + x @ v), "separate", 0, 1),
    "one bias for both halves": (lambda x, w, v, b, c, h, d: jax.nn.glu(x @ h + d), "gate_second", 1, 1),
    "jax.nn.glu": (lambda x, w, v, b, c, h, d: jax.nn.glu(x @ h), "gate_second", 0, 0),
    "jax.nn.glu along a transposed axis": (
        lambda x, w, v, b, c, h, d: jax.nn.glu((h.T @ x.T).T, axis=1),
        "gate_second",
        0,
        0,
    ),
    "biases of the halves": (
        lambda x, w, v, b, c, h, d: (
            jax.nn.silu(halves(x @ h)[0] + b) * (halves(x @ h)[0] * 0 + halves(x @ h)[1] + c)
            if False
            else (lambda p: jax.nn.silu(p[0] + b) * (p[1] + c))(halves(x @ h))
        ),
        "gate_first",
        1,
        1,
    ),
    "a reshape and an index": (
        lambda x, w, v, b, c, h, d: (lambda p: jax.nn.silu(p[..., 0, :]) * p[..., 1, :])((x @ h).reshape(6, 2, 6)),
        "gate_first",
        0,
        0,
    ),
    "interleaved": (
        lambda x, w, v, b, c, h, d: (lambda p: jax.nn.silu(p[..., ::2]) * p[..., 1::2])(x @ h),
        "gate_even",
        0,
        0,
    ),
    "interleaved, by a reshape": (
        lambda x, w, v, b, c, h, d: (lambda p: jax.nn.silu(p[..., 1]) * p[..., 0])((x @ h).reshape(6, 6, 2)),
        "gate_second",
        0,
        0,
    ),
    "einsum": (
        lambda x, w, v, b, c, h, d: jax.nn.silu(jnp.einsum("bd,df->bf", x, w)) * jnp.einsum("bd,df->bf", x, v),
        "separate",
        0,
        0,
    ),
    "stacked weights": (
        lambda x, w, v, b, c, h, d: (lambda s: jax.nn.silu(x @ s[0]) * (x @ s[1]))(jnp.stack([w, v])),
        "separate",
        0,
        0,
    ),
    "transposed weights": (
        lambda x, w, v, b, c, h, d: jax.nn.silu(x @ w.T.T) * jnp.einsum("bd,fd->bf", x, v.T),
        "separate",
        0,
        0,
    ),
    "experts": (
        lambda x, w, v, b, c, h, d: (
            jax.nn.silu(jnp.einsum("td,edf->etf", x, jnp.stack([w, v])))
            * jnp.einsum("td,edf->etf", x, jnp.stack([v, w]))
        ),
        "separate",
        0,
        0,
    ),
    "each casts its input": (
        lambda x, w, v, b, c, h, d: (
            jax.nn.silu(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
            * (x.astype(jnp.bfloat16) @ v.astype(jnp.bfloat16))
        ),
        "separate",
        0,
        0,
    ),
    "activation in float32": (
        lambda x, w, v, b, c, h, d: jax.nn.silu((x @ w).astype(jnp.float32)).astype(x.dtype) * (x @ v),
        "separate",
        0,
        0,
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_one_glu(name):
    f, projections, gate_bias, up_bias = SPELLINGS[name]
    (found,) = glus(f)
    assert (found["projections"], found["gate_bias"], found["up_bias"]) == (projections, str(gate_bias), str(up_bias))


@pytest.mark.parametrize("name", SPELLINGS)
def test_nothing_else_is_fused_or_refused_beside_it(name):
    report = aicf_jax.explain(SPELLINGS[name][0], *ARGS)
    assert [x.op for x in report.fusions] == ["glu"]
    assert report.refusals == ()


class TestFlax:
    @pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float16])
    def test_linen(self, dtype):
        class Gated(nn.Module):
            @nn.compact
            def __call__(self, x):
                g, u = (nn.Dense(6, dtype=dtype, name=n)(x) for n in ("gate", "up"))
                return nn.silu(g) * u

        variables = Gated().init(key(0), X)
        (found,) = glus(Gated().apply, variables, X)
        assert (found["gate_bias"], found["up_bias"]) == ("1", "1")

    @pytest.mark.parametrize("use_bias", [True, False])
    def test_linen_dense_general(self, use_bias):
        class Gated(nn.Module):
            @nn.compact
            def __call__(self, x):
                h = nn.DenseGeneral((2, 6), use_bias=use_bias)(x)
                return nn.gelu(h[..., 0, :]) * h[..., 1, :]

        x = normal(0, 2, 3, 4)
        (found,) = glus(Gated().apply, Gated().init(key(0), x), x)
        assert (found["projections"], found["gate_bias"]) == ("gate_first", str(int(use_bias)))

    def test_nnx(self):
        gate, up = (nnx.Linear(4, 6, rngs=nnx.Rngs(i)) for i in (0, 1))
        assert glus(lambda x: nnx.silu(gate(x)) * up(x), X)[0]["activation"] == "silu"
        both = nnx.LinearGeneral(4, (2, 6), rngs=nnx.Rngs(0))
        assert glus(lambda x: nnx.sigmoid(both(x)[:, 1]) * both(x)[:, 0], X) == []  # two products of equal value
        assert len(glus(lambda x: (lambda h: nnx.sigmoid(h[:, 1]) * h[:, 0])(both(x)), X)) == 1


def gate_of_another_value(x, w, v, b, c, h, d):
    return jax.nn.silu(x @ w) * jnp.tanh(x @ v + x @ w.at[0].set(0.0))


def different_inputs(x, w, v, b, c, h, d):
    return jax.nn.silu(x @ w) * ((x + 1) @ v)


def different_dimensions_of_one_input(x, w, v, b, c, h, d):
    square = x[:4]
    return jax.nn.silu(square @ w) * jnp.einsum("ki,kj->ij", square, v)


def one_weight_for_two_inputs(x, w, v, b, c, h, d):
    return jax.nn.silu(x @ w) * (jnp.cos(x) @ w)


def activation_on_both_sides(x, w, v, b, c, h, d):
    return jnp.tanh(x @ w) * jax.nn.sigmoid(x @ v)


def gate_used_elsewhere(x, w, v, b, c, h, d):
    g = jax.nn.silu(x @ w)
    return g * (x @ v), g


def inner_gate_used_elsewhere(x, w, v, b, c, h, d):
    g = x @ w
    return jax.nn.silu(g) * (x @ v) + jnp.cumsum(g)[:6]


def up_used_elsewhere(x, w, v, b, c, h, d):
    u = x @ v
    return jax.nn.silu(x @ w) * u + jnp.cos(u)


def projection_used_elsewhere(x, w, v, b, c, h, d):
    p = x @ h
    g, u = halves(p)
    return jax.nn.silu(g) * u, p


def a_sum(x, w, v, b, c, h, d):
    return jax.nn.silu(x @ w) + (x @ v)


def unequal_parts(x, w, v, b, c, h, d):
    p = x @ h
    return jax.nn.silu(p[:, :1]) * p[:, 1:]


def two_of_three_parts(x, w, v, b, c, h, d):
    g, u, rest = jnp.split(x @ h, 3, axis=-1)
    return jax.nn.silu(g) * u, rest


def overlapping_parts(x, w, v, b, c, h, d):
    p = x @ h
    return jax.nn.silu(p[:, :6]) * p[:, 5:11]


def same_half_twice(x, w, v, b, c, h, d):
    g, _ = halves(x @ h)
    return jax.nn.gelu(g) * g


def same_projection_twice(x, w, v, b, c, h, d):
    p = x @ w
    return jax.nn.gelu(p) * p


def split_along_the_rows(x, w, v, b, c, h, d):
    p = x @ h
    return jax.nn.silu(p[:3]) * p[3:]


def features_first(x, w, v, b, c, h, d):
    return jax.nn.silu((x @ w).T) * (x @ v).T


def rows_and_features_in_one_dimension(x, w, v, b, c, h, d):
    return jax.nn.silu((x @ w).reshape(-1)) * (x @ v).reshape(-1)


def one_gate_for_all_features(x, w, v, b, c, h, d):
    return jax.nn.sigmoid(x @ w[:, :1]) * (x @ v)


def one_side_transposed(x, w, v, b, c, h, d):
    return jax.nn.silu(x @ w) * (x @ v).T


NEAR_MISSES = {
    gate_of_another_value: "not_a_projection",
    different_inputs: "different_inputs",
    different_dimensions_of_one_input: "different_inputs",
    one_weight_for_two_inputs: "different_inputs",
    activation_on_both_sides: "activation_on_both_sides",
    gate_used_elsewhere: "gate_used_elsewhere",
    inner_gate_used_elsewhere: "gate_used_elsewhere",
    up_used_elsewhere: "up_used_elsewhere",
    projection_used_elsewhere: "projection_used_elsewhere",
    a_sum: "sum_not_product",
    unequal_parts: "unequal_parts",
    two_of_three_parts: "unequal_parts",
    overlapping_parts: "unequal_parts",
    same_half_twice: "same_half_twice",
    same_projection_twice: "same_half_twice",
    split_along_the_rows: "split_axis",
    features_first: "features_not_last",
    rows_and_features_in_one_dimension: "features_not_last",
    one_gate_for_all_features: "different_shapes",
    one_side_transposed: "different_layouts",
}


@pytest.mark.parametrize("f", NEAR_MISSES, ids=lambda f: f.__name__)
class TestNearMisses:
    def test_are_refused_with_their_code_and_line(self, f):
        report = aicf_jax.explain(f, *ARGS)
        assert report.count("glu") == 0
        (refusal,) = (r for r in report.refusals if r.pattern == "glu")
        assert refusal.code == NEAR_MISSES[f]
        assert refusal.expected and refusal.found and refusal.expected != refusal.found
        lines, start = inspect.getsourcelines(f)
        path, _, rest = refusal.site.rpartition(":")
        assert path == __file__
        assert start <= int(rest.split()[0]) < start + len(lines)

    def test_keep_values_and_gradients(self, f):
        def loss(g):
            return lambda *a: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(g(*a)))

        got, want = (quick_jit(jax.value_and_grad(loss(g), (0, 1, 2, 5)))(*ARGS) for g in (aicf_jax.fuse(f), f))
        # tolerance: a gemm_epilogue may still be in it; sums of 12 products, forward and backward, sines of sums
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=64 * 2.0**-24 * max(1.0, float(jnp.abs(b).max())))


@pytest.mark.parametrize("f", [gate_of_another_value, different_inputs, up_used_elsewhere])
def test_what_is_refused_may_still_be_a_gemm_epilogue(f):
    assert aicf_jax.explain(f, *ARGS).count("gemm_epilogue") >= 1


@pytest.mark.parametrize(
    ("f", "why"),
    [
        (lambda x, w, v, b, c, h, d: jax.nn.silu(x @ w) * 2, "a scale"),
        (lambda x, w, v, b, c, h, d: jax.nn.silu(x @ w) * b, "a vector"),
        (lambda x, w, v, b, c, h, d: (x @ w) * (jnp.cos(x) @ v), "a product of unrelated projections"),
        (lambda x, w, v, b, c, h, d: jax.nn.silu(x) * jnp.cos(x), "no projections"),
        (lambda x, w, v, b, c, h, d: jax.nn.relu(x @ w) + jnp.cos(x @ v), "a sum with something else"),
        (lambda x, w, v, b, c, h, d: jnp.maximum(x @ w, 0) * (x @ v), "maximum is not relu: gemm_epilogue says so"),
    ],
)
def test_what_does_not_resemble_it_is_not_mentioned(f, why):
    report = aicf_jax.explain(f, *ARGS)
    assert report.count("glu") == 0 and not [r for r in report.refusals if r.pattern == "glu"], why


def test_the_gate_of_a_part_of_another_operation_is_refused():
    """Attention comes first: its value product is no projection any more."""

    def f(x, w, q):
        weights = jax.nn.softmax(q @ x.T, -1)
        return jax.nn.sigmoid(x @ w) * (weights @ (x @ w))

    report = aicf_jax.explain(f, X, W, normal(7, 6, 4))
    assert report.count("glu") == 0


def test_fusing_twice_changes_nothing():
    once = aicf_jax.fuse(SPELLINGS["biases"][0])
    program = jax.make_jaxpr(once)(*ARGS)
    assert str(jax.make_jaxpr(aicf_jax.fuse(lambda *a: once(*a)))(*ARGS)) == str(program)


def test_bitwise_policy_rewrites_nothing_and_says_so():
    f = SPELLINGS["biases"][0]
    report = aicf_jax.explain(f, *ARGS, policy=aicf_jax.Policy(numerics="bitwise"))
    assert report.fusions == ()
    assert {r.code for r in report.refusals if r.pattern == "glu"} == {"numerics"}


@pytest.mark.parametrize("dtype", [jnp.int32, bool])
@pytest.mark.parametrize("side", ["gate", "up", "up first"])
def test_a_side_that_passes_through_integers_is_refused(side, dtype):
    """Whichever side the chain comes through, and the derivative of the other is asked for."""

    def f(x, w, v):
        g, u = x @ w, x @ v
        if side == "gate":
            return jax.nn.silu(g.astype(dtype).astype(x.dtype)) * u
        u = u.astype(dtype).astype(x.dtype)
        return u * jax.nn.silu(g) if side == "up first" else jax.nn.silu(g) * u

    report = aicf_jax.explain(f, X, W, V)
    assert report.count("glu") == 0
    assert {r.code for r in report.refusals if r.pattern == "glu"} == {"dtype"}
