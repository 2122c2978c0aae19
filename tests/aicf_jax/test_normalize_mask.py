"""Masks in their normal form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aicf_jax import OpFlags
from tests.aicf_jax.attention_support import evaluate, graph_of, normal, only, ops_of

X = normal(0, 3, 4, 5)
M = X > 0
ROW = normal(1, 5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    ("f", "fill", "keep_when"),
    [
        (lambda x, m: jnp.where(m, x, -jnp.inf), -jnp.inf, True),
        (lambda x, m: jnp.where(m, -jnp.inf, x), -jnp.inf, False),
        (lambda x, m: jnp.where(m, x, jnp.finfo(x.dtype).min), None, True),
        (lambda x, m: jnp.where(m, x, jnp.asarray(-1e4, x.dtype)), -1e4, True),
        (lambda x, m: jnp.where(m, x, 0), 0.0, True),
        (lambda x, m: jax.lax.select(m, x, jnp.full_like(x, 0.5)), 0.5, True),
        (lambda x, m: jnp.where(m[:1, :1], x, 0), 0.0, True),
        (lambda x, m: jnp.where(~m, 0, x), 0.0, False),
    ],
)
def test_where_with_a_number(f, fill, keep_when, dtype):
    with jax.enable_x64(True):
        x = X.astype(dtype)
        graph = graph_of(f, x, M)
        node = only(graph, "mask")
        expected = float(jnp.finfo(dtype).min) if fill is None else float(jnp.asarray(fill, dtype))
        assert (node.attr("fill"), node.attr("keep_when")) == (expected, keep_when)
        assert node.inputs[0] == graph.arguments[0] and len(node.inputs) == 2
        assert node.flags == OpFlags.IS_MASK | OpFlags.IS_ELEMENTWISE
        pred = jnp.broadcast_to(M, x.shape)
        out = evaluate(graph, node, x, pred)
        kept = pred if keep_when else ~pred
        np.testing.assert_array_equal(out, jnp.where(kept, x, jnp.asarray(expected, dtype)))


def test_where_with_a_value_of_lower_rank():
    graph = graph_of(lambda x, m, r: jnp.where(m, x, r), X, M, ROW)
    node = only(graph, "mask")
    assert node.attr("fill") is None
    assert node.inputs == graph.arguments
    np.testing.assert_array_equal(evaluate(graph, node, X, M, ROW), jnp.where(M, X, ROW))


@pytest.mark.parametrize(
    "f",
    [
        lambda x, m: jnp.where(m, x, 2 * x),  # a choice between two values
        lambda x, m: jnp.where(m, 1.0, 0.0),  # constants only
        lambda x, m: jnp.where(m, 3, 0) + x.astype(int),
        lambda x, m: jnp.where(m, jnp.ones(5), jnp.zeros(5)) * x,
        lambda x, m: jnp.where(m, (x > 1).astype(int), 0),
    ],
)
def test_other_selections_are_left_alone(f):
    assert "mask" not in ops_of(f, X, M)


def test_activations_keep_their_name():
    assert ops_of(lambda z: jnp.where(z > 0, z, 0.3 * z), X) == ["leaky_relu"]
    assert ops_of(jax.nn.relu, X) == ["relu"]
    assert ops_of(lambda x, m: jax.nn.relu(jnp.where(m, x, 0)), X, M)[0] == "mask"


def test_dropout_is_a_mask():
    def f(x, key):
        keep = jax.random.bernoulli(key, 0.9, x.shape)
        return jnp.where(keep, jax.nn.softmax(x) / 0.9, 0)

    assert ops_of(f, X, jax.random.key(0))[-3:] == ["softmax", "div", "mask"]
