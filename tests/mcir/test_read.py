"""Axis inference: which dimensions are the same loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mcir
from mcir.read import trace


def struct(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def views(graph):
    """The axes of each dimension of each view of an argument, in order of the arguments."""
    order = sorted(graph.views, key=lambda i: graph.values[i].param("argument"))
    return [graph.views[i].dims for i in order]


def lowered_equals(function, *shapes):
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal(s), "float32") for s in shapes]
    expected = jax.tree.leaves(jax.jit(function)(*arrays))
    derived = mcir.derive_bound(function, *arrays)
    for a, b in zip(jax.jit(mcir.lower(derived))(*arrays), expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        # Unit roundoff times the elements of the longest sum here, 24, and a few operations on each.
        np.testing.assert_allclose(a, b, rtol=2.0**-24 * 24 * 8, atol=2.0**-24 * 24 * 8)
    return derived


def test_a_contraction_names_its_axes():
    graph = trace(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), struct(2, 3, 4), struct(2, 4, 5))
    (left, right), ((_, out),) = views(graph), graph.outputs
    assert left[0] == right[0] == out.dims[0]
    assert left[2] == right[1] not in out.dims
    assert (out.dims[1], out.dims[2]) == (left[1], right[2])
    assert len(graph.axes) == 4


def test_transposes_and_broadcasts_leave_no_value():
    def f(x, y):
        return x.T * y[None, :, None] + jnp.swapaxes(x, 0, 2)

    graph = trace(f, struct(2, 3, 2), struct(3))
    assert {v.op for v in graph.values} == {"input", "mul", "add"}


@pytest.mark.parametrize(
    "function, shapes",
    [
        (lambda x: x.reshape(2, 3, 4).sum(1), ((6, 4),)),
        (lambda x, y: x.reshape(24) * y, ((2, 3, 4), (24,))),
        (lambda x, y: (x.reshape(6, 4) * y).reshape(2, 3, 2, 2), ((2, 3, 4), (6, 4))),
        (lambda x, y: x.reshape(4, 6) @ y, ((2, 2, 6), (6, 5))),
        (lambda x: x.reshape(2, 12).reshape(2, 2, 6).sum(0), ((24,),)),
        (lambda x, y: jnp.squeeze(x, 1) + y, ((3, 1, 4), (3, 4))),
        (lambda x, y: x[:, None] * y[None], ((3,), (4,))),
    ],
    ids=["split", "merge", "merge and split", "merge to contract", "split twice", "squeeze", "outer product"],
)
def test_reshapes(function, shapes):
    lowered_equals(function, *shapes)


def test_a_merged_dimension_is_two_axes():
    graph = trace(lambda x, y: x.reshape(6, 4) * y, struct(2, 3, 4), struct(6, 4))
    first, second = views(graph)
    assert second == (first[0] + first[1], first[2])


def test_uneven_cuts_are_refused():
    with pytest.raises(mcir.DeriveError) as raised:
        trace(lambda x, y: x.reshape(4, 6) + y.reshape(6, 4).T, struct(3, 8), struct(24))
    assert raised.value.code in ("reshape", "axis_twice")
    with pytest.raises(mcir.DeriveError) as raised:
        trace(lambda x: x.reshape(4, 9), struct(6, 6))
    assert raised.value.code == "reshape"


@pytest.mark.parametrize(
    "function, shapes",
    [
        (lambda x, y: x + y, ((1, 4), (3, 4))),
        (lambda x, y: x * y, ((3, 1), (1, 4))),
        (lambda x: x - x.mean(0, keepdims=True), ((1, 4),)),
        (lambda x: x.sum(0), ((1, 4),)),
        (lambda x, y: x @ y, ((3, 1), (1, 4))),
        (lambda x: jax.nn.softmax(x, axis=-1), ((3, 1),)),
        (lambda x: jnp.broadcast_to(x, (3, 4)), ((4,),)),
        (lambda x: jnp.broadcast_to(x[:, None], (3, 4)).sum(1), ((3,),)),
        (lambda x: jnp.max(jnp.broadcast_to(x[:, None], (3, 4)), axis=1), ((3,),)),
        (lambda x, y: x * 2 + y, ((), (3,))),
    ],
    ids=[
        "row",
        "outer",
        "mean of one",
        "sum of one",
        "contract one",
        "softmax of one",
        "result repeated",
        "sum of repeated",
        "max of repeated",
        "scalar",
    ],
)
def test_dimensions_of_size_one_and_repetition(function, shapes):
    lowered_equals(function, *shapes)


def test_dimensions_of_size_one_are_no_loops():
    assert trace(lambda x: x + 1, struct(1, 4, 1)).axes == {"a0": 4}


def test_iota_in_two_roles():
    """One `arange` as rows and as columns: two axes."""

    def f(x):
        n = jnp.arange(6)
        return jnp.where(n[:, None] >= n[None], x, 0)

    graph = trace(f, struct(6, 6))
    assert len({v.param("axis") for v in graph.values if v.op == "iota"}) == 2
    lowered_equals(f, (6, 6))


def test_one_array_in_three_roles():
    """Self-attention without projections."""

    def f(x):
        return jax.nn.softmax(x @ x.T, axis=-1) @ x

    derived = lowered_equals(f, (6, 4))
    buffers = [b for b in derived.program.role("input")]
    assert len(buffers) == 2  # as queries; as keys and values
    assert [k for k, _ in derived.arguments] == [0, 0]


def test_views_of_one_array_are_one_where_nothing_tells_them_apart():
    """Features of q are contracted for the scores and kept for the gradient of k: still one buffer."""
    program = mcir.attention_backward(heads=2, q_len=8, kv_len=6, head_dim=4)
    assert [b.name for b in program.role("input")] == ["q", "k", "v", "out", "m", "l", "dout"]


def test_a_sum_with_its_transpose_reads_two_views():
    lowered_equals(lambda x: x + x.T, (5, 5))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (lambda z: z + z.T)(x @ x.T),
        lambda x: (lambda z: jnp.sum(z * z.T))(x @ x.T),
        lambda x: (lambda z: jnp.sum(z * z.T))(jnp.sum(x[:, None] * x[None], axis=-1)),
        lambda x: (lambda s: s[:, None] * s[None])(jnp.sum(x, axis=0)),
        lambda x: (lambda p: p @ p)(jax.nn.softmax(x @ x.T)),
    ],
    ids=["sum", "product summed", "summed by hand", "outer product of a sum", "square of a matrix"],
)
def test_diagonals_are_refused(function):
    """What has been reduced is computed once: its two dimensions cannot be one loop."""
    with pytest.raises(mcir.DeriveError) as raised:
        trace(function, struct(5, 5))
    assert raised.value.code == "axis_twice"


def test_equal_values_are_one():
    graph = trace(lambda x: jnp.exp(x) + jnp.exp(x) * jnp.exp(x), struct(3))
    assert sum(v.op == "exp" for v in graph.values) == 1


def test_nested_programs_are_entered():
    def f(x):
        return jax.checkpoint(jax.jit(lambda y: jax.nn.relu(y) + jax.nn.silu(y)))(x)

    lowered_equals(f, (3, 4))


def test_what_changes_nothing_leaves_no_value():
    def f(x):
        y = jnp.maximum(-jnp.inf, x) * 1.0 / 1.0 - 0.0
        return jnp.where(jnp.asarray(True) & (y > 0), y, y)

    assert [v.op for v in trace(f, struct(3)).values if v.op != "constant"][-1] in ("input", "gt", "and")
    assert trace(f, struct(3)).outputs[0][0] == next(iter(trace(f, struct(3)).views))


def test_adding_zero_to_floats_changes_the_sign_of_zero():
    assert "add" in {v.op for v in trace(lambda x: x + 0.0, struct(3)).values}
    assert "add" not in {v.op for v in trace(lambda x: x + 0, struct(3, dtype="int32")).values}


def test_literals_have_the_type_of_the_program():
    graph = trace(lambda x: x + jnp.where(x > 0, 0.0, -1e30), struct(3))
    assert {v.dtype for v in graph.values if v.op == "constant"} == {"float32"}
    assert -1e30 in [v.param("value") for v in graph.values if v.op == "constant"]  # not -1.0000000150474662e+30


def test_arrays_closed_over_are_refused():
    table = np.arange(3, dtype=np.float32)
    for function in (lambda x: x + table, jax.jit(lambda x: x + table)):
        with pytest.raises(mcir.DeriveError) as raised:
            trace(function, struct(3))
        assert raised.value.code == "constant"
