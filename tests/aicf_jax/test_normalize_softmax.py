"""Softmax in its normal form: every spelling is one node, and what is not softmax, or not safely so, is none."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from aicf_jax import OpFlags
from aicf_jax.normalize import normalize
from tests.aicf_jax.attention_support import evaluate, graph_of, normal, only, ops_of

LOG2E = math.log2(math.e)


def peak(x, axis):
    return x.max(axis=axis, keepdims=True)


def manual(x, axis):
    e = jnp.exp(x - peak(x, axis))
    return e / e.sum(axis=axis, keepdims=True)


def keepdims_by_index(x, axis):
    e = jnp.exp(x - jnp.expand_dims(x.max(axis), axis))
    return e / jnp.expand_dims(jnp.sum(e, axis), axis)


def multiplied_by_the_reciprocal(x, axis):
    e = jnp.exp(x - peak(x, axis))
    return e * (1 / e.sum(axis=axis, keepdims=True))


def multiplied_by_reciprocal_power(x, axis):
    e = jnp.exp(x - peak(x, axis))
    return e.sum(axis=axis, keepdims=True) ** -1 * e


def stopped(x, axis):
    e = jnp.exp(x - lax.stop_gradient(peak(x, axis)))
    return e / jnp.sum(e, axis=axis, keepdims=True)


def exp_of_log_softmax(x, axis):
    return jnp.exp(jax.nn.log_softmax(x, axis=axis))


def minus_logsumexp(x, axis):
    return jnp.exp(x - jax.nn.logsumexp(x, axis=axis, keepdims=True))


def minus_logsumexp_by_hand(x, axis):
    m = peak(x, axis)
    lse = m + jnp.log(jnp.exp(x - m).sum(axis, keepdims=True))
    return jnp.exp(x - lse)


def minus_maximum_minus_log(x, axis):
    z = x - peak(x, axis)
    return jnp.exp(z - jnp.log(jnp.sum(jnp.exp(z), axis, keepdims=True)))


def negated_maximum(x, axis):
    e = jnp.exp(x + -peak(x, axis))
    return e / e.sum(axis=axis, keepdims=True)


def base_two_inside(x, axis):
    e = jnp.exp2((x - peak(x, axis)) * LOG2E)
    return e / e.sum(axis=axis, keepdims=True)


def base_two_outside(x, axis):
    e = jnp.exp2(x * LOG2E - peak(x, axis) * LOG2E)
    return e / e.sum(axis=axis, keepdims=True)


def guarded_maximum(x, axis):
    m = peak(x, axis)
    e = jnp.exp(x - jnp.where(jnp.isfinite(m), m, 0))
    return e / e.sum(axis=axis, keepdims=True)


def guarded_against_minus_infinity(x, axis):
    m = peak(x, axis)
    e = jnp.exp(x - jnp.where(m == -jnp.inf, 0, m))
    return e / e.sum(axis=axis, keepdims=True)


def never_below_minus_infinity(x, axis):
    e = jnp.exp(x - jnp.maximum(peak(x, axis), -jnp.inf))
    return e / e.sum(axis=axis, keepdims=True)


def broadcast_in_full(x, axis):
    e = jnp.exp(x - jnp.broadcast_to(peak(x, axis), x.shape))
    return e / jnp.broadcast_to(e.sum(axis=axis, keepdims=True), x.shape)


def summed_in_float32(x, axis):
    e = jnp.exp(x - peak(x, axis))
    return e / e.astype(jnp.float32).sum(axis=axis, keepdims=True).astype(x.dtype)


def float32_inside(x, axis):
    m = peak(x, axis).astype(jnp.float32)
    e = jnp.exp(x.astype(jnp.float32) - m)
    return (e / e.sum(axis=axis, keepdims=True)).astype(x.dtype)


SPELLINGS = [
    jax.nn.softmax,
    nn.softmax,
    nnx.softmax,
    jax.jit(jax.nn.softmax, static_argnames="axis"),
    manual,
    keepdims_by_index,
    multiplied_by_the_reciprocal,
    multiplied_by_reciprocal_power,
    stopped,
    exp_of_log_softmax,
    minus_logsumexp,
    minus_logsumexp_by_hand,
    minus_maximum_minus_log,
    negated_maximum,
    base_two_inside,
    base_two_outside,
    guarded_maximum,
    guarded_against_minus_infinity,
    never_below_minus_infinity,
    broadcast_in_full,
    summed_in_float32,
    float32_inside,
]
IDS = [f"{i}-{getattr(f, '__name__', 'f')}" for i, f in enumerate(SPELLINGS)]
X = normal(0, 3, 4, 5)


def softmax_of(f, x, *args):
    """The one softmax node of ``f(x)`` and its graph."""
    graph = graph_of(f, x, *args)
    return graph, only(graph, "softmax")


@pytest.mark.parametrize("axis", [-1, pytest.param(1, marks=pytest.mark.slow), 0])
@pytest.mark.parametrize("spelling", SPELLINGS, ids=IDS)
def test_every_spelling_is_one_node_of_x(spelling, axis):
    graph, node = softmax_of(functools.partial(spelling, axis=axis), X)
    assert node.flags == OpFlags.IS_SOFTMAX
    assert node.attr("axis") == axis % 3
    assert node.attr("base") == 1.0
    assert node.attr("keep_when") is None
    np.testing.assert_allclose(evaluate(graph, node, X), jax.nn.softmax(X, axis=axis), rtol=1e-5)


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [
        pytest.param(f, dtype, marks=() if dtype == "bfloat16" else pytest.mark.slow, id=f"{name}-{dtype}")
        for f, name in zip(SPELLINGS, IDS, strict=True)
        for dtype in ("float16", "bfloat16", "float64")
        if (f, dtype) != (float32_inside, "float64")  # it rounds its input: the next test
    ],
)
def test_in_every_precision(spelling, dtype):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        graph, node = softmax_of(functools.partial(spelling, axis=-1), X.astype(dtype))
        assert node.inputs == (graph.arguments[0],)
        exact = 0 if dtype in ("float32", "float64") or "base_two" not in spelling.__name__ else 0.01
        assert node.attr("base") == pytest.approx(1.0, rel=exact, abs=0)  # log2(e) was rounded to the type


def test_an_input_that_is_rounded_inside_is_left_as_written():
    """float64 scores through float32: the maximum is of what was not yet rounded, so it is no softmax of either."""
    with jax.enable_x64(True):
        assert "softmax" not in ops_of(functools.partial(float32_inside, axis=-1), X.astype("float64"))


@pytest.mark.parametrize("spelling", SPELLINGS, ids=IDS)
def test_all_its_equations_are_covered(spelling):
    assert set(ops_of(functools.partial(spelling, axis=-1), X)) <= {"softmax", "convert_element_type"}


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (1, 1), (4, 4, 4), (7,)])
@pytest.mark.parametrize("spelling", [jax.nn.softmax, manual, minus_logsumexp, exp_of_log_softmax, keepdims_by_index])
def test_dimensions_of_one_and_square_shapes(spelling, shape):
    for axis in range(len(shape)):
        _, node = softmax_of(functools.partial(spelling, axis=axis), normal(1, *shape))
        assert node.attr("axis") == axis


def test_a_cast_before_or_after_stays_outside():
    def f(x):
        return jax.nn.softmax(x.astype(jnp.float32)).astype(jnp.bfloat16)

    assert ops_of(f, X.astype(jnp.bfloat16)) == ["convert_element_type", "softmax", "convert_element_type"]


def test_what_scales_or_masks_before_the_maximum_stays_outside():
    def f(x, m):
        return jax.nn.softmax(jnp.where(m, x * 0.5, -jnp.inf))

    assert ops_of(f, X, X > 0) == ["mul", "mask", "softmax"]


def test_a_coefficient_inside_is_the_base():
    for weights, base in ((lambda z: jnp.exp(0.25 * z), 0.25), (jnp.exp2, math.log(2))):

        def f(x, weights=weights):
            e = weights(x - peak(x, -1))
            return e / e.sum(-1, keepdims=True)

        assert softmax_of(f, X)[1].attr("base") == pytest.approx(base)


def test_vmap_moves_the_axis():
    _, node = softmax_of(jax.vmap(functools.partial(jax.nn.softmax, axis=0)), X)
    assert node.attr("axis") == 1


def test_what_vmap_transposes_between_the_maximum_and_the_rest():
    graph, node = softmax_of(jax.vmap(jax.nn.softmax, in_axes=1, out_axes=1), X)
    assert node.inputs == (graph.arguments[0],)
    assert (node.attr("axis"), node.attr("permutation")) == (2, (1, 0, 2))
    np.testing.assert_allclose(evaluate(graph, node, X), jax.nn.softmax(X).transpose(1, 0, 2), rtol=1e-6)


def test_a_guard_decides_where_infinity_yields_nan():
    x = X.at[0, 0, 0].set(jnp.inf)
    for spelling, guarded in ((guarded_maximum, True), (guarded_against_minus_infinity, False), (manual, False)):
        graph, node = softmax_of(functools.partial(spelling, axis=-1), x)
        assert node.attr("guarded") is guarded
        assert int(jnp.isnan(evaluate(graph, node, x)).sum()) == (1 if guarded else x.shape[-1])


# -- where= -----------------------------------------------------------------------------------------------
MASK = (X > 0).at[0, 0].set(False)


def masked_by_hand(x, m):
    s = jnp.where(m, x, -jnp.inf)
    e = jnp.where(m, jnp.exp(s - jnp.max(s, -1, keepdims=True)), 0)
    return e / e.sum(-1, keepdims=True)


def exp_of_masked_log_softmax(x, m):
    return jnp.exp(jax.nn.log_softmax(x, where=m))


@pytest.mark.parametrize(
    ("f", "zeroed"),
    [
        (lambda x, m: jax.nn.softmax(x, where=m), True),
        (lambda x, m: nn.softmax(x, axis=-1, where=m), True),
        (exp_of_masked_log_softmax, True),
        (masked_by_hand, False),
    ],
)
@pytest.mark.parametrize("mask", [MASK, MASK[0], MASK[:, :1], MASK[0, :1]], ids=lambda m: str(m.shape))
def test_a_softmax_of_what_a_mask_keeps(f, zeroed, mask):
    mask = mask if zeroed or mask.shape == X.shape else jnp.broadcast_to(mask, X.shape)
    graph, node = softmax_of(f, X, mask)
    assert (node.attr("keep_when"), node.attr("zeroed")) == (True, zeroed)
    assert set(n.op for n in graph.nodes) == {"softmax", "nop"}
    np.testing.assert_allclose(evaluate(graph, node, X, mask), f(X, mask), rtol=1e-6)


def test_two_different_masks_are_no_softmax():
    def f(x, m, n):
        s = jnp.where(m, x, -jnp.inf)
        e = jnp.where(n, jnp.exp(s - jnp.max(s, -1, keepdims=True)), 0)
        return e / e.sum(-1, keepdims=True)

    assert "softmax" not in ops_of(f, X, MASK, ~MASK)


# -- what is not softmax ----------------------------------------------------------------------------------
def sum_plus_one(x):
    e = jnp.exp(x - peak(x, -1))
    return e / (1 + e.sum(-1, keepdims=True))


def sum_of_others(x):
    e = jnp.exp(x - peak(x, -1))
    return e / (e.sum(-1, keepdims=True) - e)


def two_temperatures(x):
    z = x - peak(x, -1)
    return jnp.exp(z) / jnp.exp(2 * z).sum(-1, keepdims=True)


def misplaced_sum(x):
    e = jnp.exp(x - peak(x, -1))
    return e / jnp.swapaxes(e.sum(-1, keepdims=True), 1, 2)


def twice_the_softmax(x):
    e = jnp.exp(x - peak(x, -1))
    return e / e.sum(-1, keepdims=True) ** 2


def over_two_axes(x):
    return jax.nn.softmax(x, axis=(-2, -1))


def guarded_sum(x):
    e = jnp.exp(x - peak(x, -1))
    s = e.sum(-1, keepdims=True)
    return e / jnp.where(s == 0, 1.0, s)


@pytest.mark.parametrize(
    "f",
    [sum_plus_one, sum_of_others, two_temperatures, misplaced_sum, twice_the_softmax, over_two_axes, guarded_sum]
    + [jax.nn.log_softmax, jax.nn.logsumexp, jax.nn.softplus, jax.nn.sigmoid],
)
def test_none_of_these_is_a_softmax(f):
    graph = graph_of(f, normal(3, 4, 4, 4))
    assert not any(n.flags & (OpFlags.IS_SOFTMAX | OpFlags.IS_NEAR_SOFTMAX) for n in graph.nodes)


# -- near misses ------------------------------------------------------------------------------------------
def without_maximum(x, _):
    e = jnp.exp(x)
    return e / e.sum(-1, keepdims=True)


def fixed_shift(x, _):
    e = jnp.exp(x - 5.0)
    return e / e.sum(-1, keepdims=True)


def given_shift(x, c):
    e = jnp.exp(x - c[..., None])
    return e / e.sum(-1, keepdims=True)


def mean_shift(x, _):
    e = jnp.exp(x - x.mean(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def maximum_of_another(x, _):
    e = jnp.exp(x - jnp.abs(x).max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def global_maximum(x, _):
    e = jnp.exp(x - x.max())
    return e / e.sum(-1, keepdims=True)


def maximum_along_another_axis(x, _):
    e = jnp.exp(x - peak(x, -2))
    return e / e.sum(-1, keepdims=True)


def sum_along_another_axis(x, _):
    e = jnp.exp(x - peak(x, -1))
    return e / e.sum(-2, keepdims=True)


def misplaced_maximum(x, _):
    e = jnp.exp(x - jnp.swapaxes(peak(x, -1), 1, 2))
    return e / e.sum(-1, keepdims=True)


def half_the_maximum(x, _):
    e = jnp.exp(x - 0.5 * peak(x, -1))
    return e / e.sum(-1, keepdims=True)


def inner_sum_unshifted(x, _):
    return jnp.exp(x - jnp.log(jnp.exp(x).sum(-1, keepdims=True)))


def sum_returned(x, _):
    e = jnp.exp(x - peak(x, -1))
    s = e.sum(-1, keepdims=True)
    return e / s, s


def exponentials_used(x, _):
    e = jnp.exp(x - peak(x, -1))
    return e / e.sum(-1, keepdims=True), jnp.sin(e)


def maximum_used(x, _):
    m = peak(x, -1)
    e = jnp.exp(x - m)
    return e / e.sum(-1, keepdims=True), jnp.sin(m)


def logsumexp_returned(x, _):
    lse = jax.nn.logsumexp(x, axis=-1, keepdims=True)
    return jnp.exp(x - lse), lse


@pytest.mark.parametrize(
    ("f", "code"),
    [
        (without_maximum, "no_max_subtraction"),
        (inner_sum_unshifted, "no_max_subtraction"),
        (fixed_shift, "shift_not_row_max"),
        (given_shift, "shift_not_row_max"),
        (mean_shift, "shift_not_row_max"),
        (maximum_of_another, "shift_not_row_max"),
        (global_maximum, "shift_not_row_max"),
        (maximum_along_another_axis, "shift_not_row_max"),
        (sum_along_another_axis, "shift_not_row_max"),
        (misplaced_maximum, "shift_not_row_max"),
        (half_the_maximum, "shift_not_row_max"),
        (sum_returned, "softmax_parts_reused"),
        (exponentials_used, "softmax_parts_reused"),
        (maximum_used, "softmax_parts_reused"),
        (logsumexp_returned, "softmax_parts_reused"),
    ],
)
def test_near_misses_say_why(f, code):
    graph = graph_of(f, normal(3, 4, 4, 4), normal(4, 4, 4))
    (node,) = (n for n in graph.nodes if n.flags & OpFlags.IS_NEAR_SOFTMAX)
    assert node.attr("code") == code
    assert node.attr("expected") and node.attr("found")
    assert not any(n.flags & OpFlags.IS_SOFTMAX for n in graph.nodes)
    assert str(normalize(graph)) == str(graph)


def test_gradients_written_out_reuse_the_parts():
    graph = graph_of(jax.grad(lambda x: jnp.sin(jax.nn.softmax(x)).sum()), X)
    assert [n.attr("code") for n in graph.nodes if n.flags & OpFlags.IS_NEAR_SOFTMAX] == ["softmax_parts_reused"]


def test_normalization_is_idempotent():
    graph = graph_of(lambda x, m: jax.nn.softmax(x, where=m) @ jax.nn.softmax(x), normal(3, 4, 4), MASK[0, :1, :4])
    assert str(normalize(graph)) == str(graph)


# -- weights normalized after the product -----------------------------------------------------------------
Q, K, V = (normal(s, 2, 3, 6, 6) for s in (5, 6, 7))


def late(q, k, v, *, scores="bhqd,bhkd->bhqk", values="bhqk,bhkd->bhqd", finish=lambda o, s: o / s):
    x = jnp.einsum(scores, q, k)
    e = jnp.exp(x - peak(x, -1))
    return finish(jnp.einsum(values, e, v), e.sum(-1, keepdims=True))


@pytest.mark.parametrize(
    "f",
    [
        late,
        functools.partial(late, finish=lambda o, s: o * (1 / s)),
        functools.partial(late, finish=lambda o, s: o / jnp.broadcast_to(s, o.shape)),
        functools.partial(late, values="bhqk,bhkd->bqhd", finish=lambda o, s: o / jnp.swapaxes(s, 1, 2)),
        functools.partial(late, finish=lambda o, s: jnp.swapaxes(o, 1, 2) / jnp.swapaxes(s, 1, 2)),
        functools.partial(late, finish=lambda o, s: o.astype(jnp.float32) / s.astype(jnp.float32)),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_late_normalization_is_two_nodes(f, dtype):
    q, k, v = (x.astype(dtype) for x in (Q, K, V))
    graph = graph_of(f, q, k, v)
    weights, division = only(graph, "softmax_weights"), only(graph, "normalize")
    assert weights.flags == OpFlags.IS_SOFTMAX | OpFlags.IS_UNNORMALIZED
    assert division.flags == OpFlags.IS_NORMALIZE
    assert division.inputs[1:] == weights.outputs
    assert weights.attr("axis") == division.attr("axis") == 3
    x = normal(8, 2, 3, 6, 6, dtype=dtype)
    e = evaluate(graph, weights, x)
    o = normal(9, *graph.values[division.inputs[0]].aval.shape, dtype=graph.values[division.inputs[0]].aval.dtype)
    assert evaluate(graph, division, o, e).shape == o.shape


@pytest.mark.parametrize(
    "f",
    [
        functools.partial(late, values="bhqk,bhqd->bhkd"),  # contracts the queries
        functools.partial(late, finish=lambda o, s: o / jnp.swapaxes(s, 2, 3)),  # divides the features
        functools.partial(late, finish=lambda o, s: o / (s + 1)),
        functools.partial(late, finish=lambda o, s: s / o),
    ],
)
def test_other_divisions_are_not(f):
    assert not any(n.flags & (OpFlags.IS_SOFTMAX | OpFlags.IS_NORMALIZE) for n in graph_of(f, Q, K, V).nodes)


@pytest.mark.parametrize(
    ("f", "code"),
    [
        (functools.partial(late, finish=lambda o, s: (o / s, s)), "softmax_parts_reused"),
        (functools.partial(late, finish=lambda o, s: (o / s, jnp.sin(s))), "softmax_parts_reused"),
    ],
)
def test_late_near_misses(f, code):
    graph = graph_of(f, Q, K, V)
    assert [n.attr("code") for n in graph.nodes if n.flags & OpFlags.IS_NEAR_SOFTMAX] == [code]


def test_late_normalization_without_the_maximum_is_a_near_miss():
    def f(q, k, v):
        e = jnp.exp(q @ k)
        return (e @ v) / e.sum(-1, keepdims=True)

    graph = graph_of(f, Q, K, V)
    assert [n.attr("code") for n in graph.nodes if n.flags & OpFlags.IS_NEAR_SOFTMAX] == ["no_max_subtraction"]
