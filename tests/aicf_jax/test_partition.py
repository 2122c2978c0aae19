"""Rules by which kernels that XLA cannot see into are split over devices."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from aicf_jax import Kernel
from aicf_jax.partition import Partition, split
from tests.support import normal

#: Rows and their sum over rows; a parameter that is needed whole.
RULE = Partition((("r", None), (None,)), (("r", None), (None,)), sums=(1,))


def double(x, p):
    return 2 * x * p, jnp.sum(x, axis=0)


def mesh_of(**axes):
    count = math.prod(axes.values())
    return Mesh(np.array(jax.devices()[:count]).reshape(tuple(axes.values())), tuple(axes))


def test_a_rule_names_every_dimension_once_and_says_what_has_to_be_whole():
    assert RULE.rule() == ("r w0, w1 -> r w2, w3", ("w0", "w1", "w2", "w3"))


@pytest.mark.parametrize("spec", [P("a"), P(("a", "b")), P("b", "a"), P()])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_give_what_the_whole_gives(spec, dtype):
    mesh = mesh_of(a=2, b=4)
    # Small integers: sums are exact, in whatever order and type.
    x, p = jnp.round(4 * normal(0, 16, 8)).astype(dtype), jnp.ones(8, dtype)
    found = jax.jit(split(double, RULE))(jax.device_put(x, NamedSharding(mesh, spec)), p)
    for got, want in zip(found, double(x, p), strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.dtype == want.dtype


def test_rows_stay_where_they_are():
    mesh = mesh_of(a=8)
    x = jax.device_put(normal(0, 16, 8), NamedSharding(mesh, P("a")))
    compiled = jax.jit(split(double, RULE)).lower(x, jnp.ones(8)).compile()
    assert "all-gather" not in compiled.as_text()
    assert compiled(x, jnp.ones(8))[0].sharding.is_equivalent_to(x.sharding, 2)


GROUPS = Partition((("heads", "group", None),), (("heads", "group", None), ("heads", None)), sums=(1,))


def double_and_add(x):
    return 2 * x, jnp.sum(x, axis=1)


@pytest.mark.parametrize("shape", [(2, 4), (3, 2)])
def test_a_dimension_that_becomes_two_is_split_along_both_over_parts_of_an_axis_of_the_mesh(shape):
    mesh = mesh_of(a=math.prod(shape))
    x = jnp.round(4 * normal(0, math.prod(shape), 8))
    flat = jax.device_put(x, NamedSharding(mesh, P("a")))

    def f(x):
        y, total = split(double_and_add, GROUPS)(x.reshape(*shape, 8))
        return y.reshape(-1, 8), total

    compiled = jax.jit(lambda x: f(x)[0]).lower(flat).compile()
    assert "all-gather" not in compiled.as_text()
    found, total = jax.jit(f)(flat)
    np.testing.assert_array_equal(found, 2 * x)
    np.testing.assert_array_equal(total, jnp.sum(x.reshape(*shape, 8), axis=1))


@pytest.mark.parametrize(("most", "rows"), [(2, 16), (4, 4)])
def test_a_name_is_split_into_no_more_parts_than_it_may_be(most, rows):
    seen = []

    def f(x):
        seen.append(x.shape[0])
        return (2 * x,)

    rule = Partition((("r", None),), (("r", None),), most={"r": most})
    x = normal(0, 16, 8)
    found = jax.jit(split(f, rule))(jax.device_put(x, NamedSharding(mesh_of(a=4), P("a"))))
    np.testing.assert_array_equal(found[0], 2 * x)
    assert seen[-1] == rows


def test_a_part_may_call_what_jax_itself_would_split():
    x = normal(0, 16, 8)
    inner = split(lambda x: (2 * x,), Partition((("r", None),), (("r", None),)))
    outer = split(lambda x: inner(x + 1), Partition((("r", None),), (("r", None),)))
    found = jax.jit(outer)(jax.device_put(x, NamedSharding(mesh_of(a=4), P("a"))))
    np.testing.assert_array_equal(found[0], 2 * (x + 1))


def test_a_kernel_is_for_machines_of_its_platforms():
    def run(op, x):
        return (x,)

    kernel = Kernel("mine", "layer_norm", ("cuda",), {}, run, targets=("h200",))
    assert kernel.is_for("h200") and not kernel.is_for("a100") and not kernel.is_for(None)
    with pytest.raises(ValueError, match=r"targets=.*expected machines of its platforms, found \['cpu'\]"):
        Kernel("mine", "layer_norm", ("cuda",), {}, run, targets=("cpu",))
