"""Convolutions, their biases, and scale and shift per channel in their normal form."""

import jax
import jax.numpy as jnp
import pytest

from aicf_jax import OpFlags
from aicf_jax.normalize import normalize
from aicf_jax.normalize._roles import roles_of
from tests.aicf_jax.attention_support import evaluate, graph_of, normal, only, ops_of
from tests.aicf_jax.patterns import test_conv_epilogue as spellings
from tests.aicf_jax.patterns.test_conv_epilogue import ARGS, NEAR_MISSES, NHWC, B, W, X, convolved, normalized


@pytest.mark.parametrize("out", ["NHWC", "NCHW", "CNHW", "HWNC"])
def test_the_channels_of_a_result(out):
    graph = graph_of(lambda x, w: convolved(x, w, numbers=(*NHWC[:2], out)), X, W)
    node = only(graph, "conv")
    assert node.attr("roles") == "".join("n" if c == "C" else "s" for c in out)
    assert node.attr("channel") == out.index("C") - 4


def test_roles_follow_layout_changes():
    def f(x, w):
        y = convolved(x, w)
        return jnp.moveaxis(y, -1, 1), y.reshape(2, 36, 6), y.reshape(-1, 6), y.reshape(2, 6, 36), y[:, :, :, None]

    graph = graph_of(f, X, W)
    assert [roles_of(graph, v) for v in graph.results[:3]] == ["snss", "ssn", "sn"]
    assert roles_of(graph, graph.results[3]) is None  # a dimension of positions and channels


def test_of_dimensions_of_one_the_channels_give_the_role():
    """Not the first of a set of letters, which is another one in another process."""
    graph = graph_of(lambda x, w: convolved(x, w).reshape(1), X[:1, :1, :1], W[..., :1])
    assert roles_of(graph, graph.results[0]) == "n"


@pytest.mark.parametrize(
    "norm",
    [normalized, spellings.divided, spellings.folded, spellings.negated, spellings.in_full],
    ids=lambda f: f.__name__,
)
def test_the_node_is_the_equations_it_covers(norm):
    f = lambda x, w, b, *p: norm(convolved(x, w) + b, *p)  # noqa: E731
    graph = graph_of(f, *ARGS)
    node = only(graph, "channel_affine")
    assert node.flags & OpFlags.IS_AFFINE and node.inputs[0] == only(graph, "bias_add").outputs[0]
    assert all(graph.values[v].aval.size == 6 for v in node.inputs[1:])
    x = normal(9, 2, 6, 6, 6)
    vectors = [normal(20 + i, *graph.values[v].aval.shape) for i, v in enumerate(node.inputs[1:])]
    out = evaluate(graph, node, x, *vectors)
    # Affine in x with a slope of each channel: the second difference is rounding only.
    second = evaluate(graph, node, 2 * x, *vectors) - 2 * out + evaluate(graph, node, 0 * x, *vectors)
    assert float(jnp.abs(second).max()) < 64 * 2.0**-24 * float(jnp.abs(out).max())


def test_what_the_vectors_are_computed_from_stays_outside():
    graph = graph_of(lambda x, w, b, *p: normalized(convolved(x, w), *p), *ARGS)
    node = only(graph, "channel_affine")
    covered = {graph.eqn(c).primitive.name for c in node.covers}
    assert covered == {"broadcast_in_dim", "sub", "mul", "add"}
    assert "rsqrt" in ops_of(lambda x, w, b, *p: normalized(convolved(x, w), *p), *ARGS)


@pytest.mark.parametrize("f", NEAR_MISSES, ids=lambda f: f.__name__)
def test_a_near_miss_is_the_node_it_was_with_a_reason(f):
    graph = graph_of(f, *ARGS)
    near = [n for n in graph.nodes if n.flags & OpFlags.IS_NEAR_AFFINE]
    marked = NEAR_MISSES[f] in ("scale_axis", "shift_axis", "batch_statistics", "normalization_axes")
    assert {n.attr("code") for n in near} == ({NEAR_MISSES[f]} if marked else set())
    assert all(n.op in ("add", "sub", "mul", "div") for n in near)


def test_a_value_used_in_between_ends_the_node():
    def f(x, w, b, m, v, s, t):
        y = convolved(x, w) * s
        return y + t, jnp.cos(y)

    graph = graph_of(f, *ARGS)
    node = only(graph, "channel_affine")
    assert [graph.eqn(c).primitive.name for c in node.covers] == ["broadcast_in_dim", "mul"]


@pytest.mark.parametrize("f", [*NEAR_MISSES, lambda x, w, b, *p: jax.nn.relu(normalized(convolved(x, w) + b, *p))])
def test_normalizing_twice_changes_nothing(f):
    graph = graph_of(f, *ARGS)
    assert str(normalize(graph)) == str(graph)


def test_a_bias_along_the_channels_only():
    axis = lambda f: [n.attr("axis") for n in graph_of(f, X, W, B).nodes if n.op == "bias_add"]  # noqa: E731
    assert axis(lambda x, w, b: convolved(x, w) + b) == ["features"]
    assert axis(lambda x, w, b: convolved(x, w) + b[:, None]) == ["rows"]
    assert axis(lambda x, w, b: convolved(x, w, numbers=(*NHWC[:2], "NCHW")) + b) == ["rows"]
    assert axis(lambda x, w, b: convolved(x, w, numbers=(*NHWC[:2], "NCHW")) + b[:, None, None]) == ["features"]
    assert axis(lambda x, w, b: convolved(x, w) + jnp.concatenate([x, x], -1)[..., :6]) == []
