"""Programs as lax loops: products that read both operands across have one turned, once, outside of their stream."""

import re

import jax
import numpy as np
import pytest

import mcir
from mcir.text import parse
from tests.mcir.programs import draw

ACROSS = """
program across
axis h = 2 block 1
axis j = {j} block {bj}
axis {first} = {n} block {bn}
axis {second} = {m} block {bm}
input a: float32[h, j, i]
input k: float32[h, j, d]
output o: float32[h, {first}, {second}]
tile h, j:
  k1 = load k: float32[h, j, d]
  stream i:
    a1 = load a: float32[h, j, i]
    t = dot({operands}) over=(j): float32[h, {first}, {second}]
    store o += t
"""


def across(result="id", operands="a1, k1", j=6, i=8, d=3, bj=3, bi=4):
    first, second = result
    (n, bn), (m, bm) = ({"i": (i, bi), "d": (d, d)}[axis] for axis in result)
    return parse(ACROSS.format(first=first, second=second, n=n, bn=bn, m=m, bm=bm, j=j, bj=bj, operands=operands))


def contracted(program, *arrays):
    """Pairs of contracted dimensions of the products of a lowered program."""
    text = jax.jit(mcir.lower_program(program)).lower(*arrays).as_text()
    return re.findall(r"contracting_dims = \[(\d+)\] x \[(\d+)\]", text)


@pytest.mark.parametrize("operands", ["a1, k1", "k1, a1"])
@pytest.mark.parametrize("result", ["id", "di"])
@pytest.mark.parametrize(
    "sizes",
    [{}, {"j": 7, "i": 9}, {"i": 1, "bi": 1}, {"j": 1, "bj": 1}, {"d": 1}, {"i": 2, "bi": 1, "d": 16}, {"bi": 8}],
    ids=str,
)
def test_values_are_those_of_the_product(operands, result, sizes):
    program = across(result, operands, **sizes)
    a, k = (draw(s, *(program.axis(x).size for x in axes)) for s, axes in ((0, "hji"), (1, "hjd")))
    (found,) = mcir.lower_program(program)(a, k)
    # sums of at most 7 products, in blocks
    np.testing.assert_allclose(found, np.einsum(f"hji,hjd->h{result}", a, k), rtol=8 * 2**-23, atol=8 * 2**-22)


@pytest.mark.parametrize("operands", ["a1, k1", "k1, a1"])
def test_what_is_outside_of_the_stream_is_turned_outside_of_it(operands):
    a, k = draw(0, 2, 6, 8), draw(1, 2, 6, 3)
    assert contracted(across(operands=operands), a, k) == [("2", "1")]  # rows times columns
    # In a stream of one block nothing is saved: it is as the program says.
    assert contracted(across(operands=operands, bi=8), a, k) == [("1", "1")]
