"""Softmax weights that are normalized after their product with the values: two nodes, and what resembles them."""

import functools

import jax.numpy as jnp
import pytest

from aicf_jax import OpFlags
from tests.aicf_jax.attention_support import evaluate, graph_of, normal, only
from tests.aicf_jax.softmax_support import peak

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
