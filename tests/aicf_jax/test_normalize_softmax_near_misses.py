"""What is not softmax is no softmax node; what is nearly one, or not safely so, is left as written and says why."""

import jax
import jax.numpy as jnp
import pytest

from aicf_jax import OpFlags
from aicf_jax.normalize import normalize
from tests.aicf_jax.attention_support import graph_of, normal
from tests.aicf_jax.softmax_support import X, peak


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
