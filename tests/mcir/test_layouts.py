"""Arrays of the outside in loops: tiles are brought into the program's order, arrays only where tiles cannot be."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mcir._layouts import layouts
from mcir.derive import derive_bound
from mcir.lower_jax import lower
from tests.mcir.programs import draw

B, S, H, D = 2, 24, 3, 4


def attention(order):
    """Attention whose arrays have their dimensions in this order."""

    def f(q, k, v):
        scores = jnp.einsum(f"{order},{order.replace('s', 't')}->bhst", q, k)
        weights = jnp.exp(scores - jnp.max(scores, -1, keepdims=True))
        mixed = jnp.einsum(f"bhst,{order.replace('s', 't')}->{order}", weights, v)
        total = jnp.einsum(f"bhst->{order.replace('d', '')}", weights)
        return mixed / jnp.expand_dims(total, order.index("d"))

    return f


def sizes(order):
    return tuple({"b": B, "s": S, "h": H, "d": D}[c] for c in order)


def bound(order, rows=8, columns=8):
    """The derived program with its tiles: of 8 positions, all else whole."""
    f, avals = attention(order), [jax.ShapeDtypeStruct(sizes(order), "float32")] * 3
    derived = derive_bound(f, *avals)
    program = derived.program
    q, k, _ = program.role("input")
    (row,), (column,) = set(q.type.axes) - set(k.type.axes), set(k.type.axes) - set(q.type.axes)
    return f, dataclasses.replace(derived, program=program.with_blocks(**{row: rows, column: columns}))


def transposed(derived, *arrays):
    """Shapes of whole arrays that the lowered program transposes, inside and outside of its loops."""
    text = jax.jit(lower(derived)).lower(*arrays).as_text()
    shapes = re.findall(r"stablehlo\.transpose [^\n]*: \(tensor<([\dx]+)xf32>\)", text)
    found = [tuple(map(int, s.split("x"))) for s in shapes]
    return [s for s in found if np.prod(s) >= B * S * H * D]


CASES = [("".join(p), 7, 5) for p in itertools.permutations("bshd")]
CASES += [("bshd", *tiles) for tiles in [(8, 8), (24, 8), (8, 24), (24, 24), (1, 24)]]


@pytest.mark.parametrize(("order", "rows", "columns"), CASES)
def test_values_are_those_of_the_function(order, rows, columns):
    f, derived = bound(order, rows, columns)
    arrays = [draw(n, *sizes(order)) for n in range(3)]
    (found,) = lower(derived)(*arrays)
    # 4 products, 24 exponentials and 24 products in blocks, a division
    np.testing.assert_allclose(found, f(*arrays), rtol=60 * 2**-23, atol=60 * 2**-23)


@pytest.mark.parametrize("order", ["bshd", "sbhd", "bhsd", "hbsd"])
def test_no_array_is_transposed_whose_tiles_can_be(order):
    _, derived = bound(order)
    assert transposed(derived, *[draw(n, *sizes(order)) for n in range(3)]) == []


def test_what_varies_fastest_along_another_axis_is_turned_once_and_not_tile_by_tile():
    order = "bhds"
    _, derived = bound(order)
    found = layouts(derived)
    assert all(found[b.name] == b.type.axes for b in derived.program.buffers)
    assert transposed(derived, *[draw(n, *sizes(order)) for n in range(3)])


def test_what_is_read_whole_in_every_round_is_turned_once():
    _, derived = bound("bshd", 8, S)
    q, k, v = derived.program.role("input")
    found = layouts(derived)
    assert found[q.name] != q.type.axes, "rows are read tile by tile"
    assert [found[b.name] for b in (k, v)] == [k.type.axes, v.type.axes]


def test_an_array_of_the_programs_own_order_stays_as_it_is():
    _, derived = bound("bhsd")
    assert layouts(derived) == {b.name: b.type.axes for b in derived.program.buffers}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_types_are_kept(dtype):
    f = attention("bshd")
    arrays = [draw(n, *sizes("bshd")).astype(dtype) for n in range(3)]
    derived = derive_bound(f, *arrays)
    axes = {a.name: 8 for a in derived.program.axes if a.size == S}
    (found,) = lower(dataclasses.replace(derived, program=derived.program.with_blocks(**axes)))(*arrays)
    assert found.dtype == dtype
    # scores, weights and results are each rounded to the type: the largest has 8 bits (bfloat16) and values below 4
    exact = f(*(a.astype("float32") for a in arrays))
    np.testing.assert_allclose(found.astype("float32"), exact, atol=16 * float(jnp.finfo(dtype).eps))
