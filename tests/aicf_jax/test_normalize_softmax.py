"""Softmax in its normal form: each spelling is one node of its scores, along any axis, in any precision, masked too."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aicf_jax import OpFlags
from aicf_jax.normalize import normalize
from tests.aicf_jax.attention_support import evaluate, graph_of, normal, only, ops_of
from tests.aicf_jax.softmax_support import (
    IDS,
    SPELLINGS,
    X,
    exp_of_log_softmax,
    float32_inside,
    guarded_against_minus_infinity,
    guarded_maximum,
    keepdims_by_index,
    manual,
    minus_logsumexp,
    peak,
)


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


def test_normalization_is_idempotent():
    graph = graph_of(lambda x, m: jax.nn.softmax(x, where=m) @ jax.nn.softmax(x), normal(3, 4, 4), MASK[0, :1, :4])
    assert str(normalize(graph)) == str(graph)
