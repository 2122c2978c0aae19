"""Programs as lax loops: sums of what need not be written first, as one element of each row, and as contractions."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mcir
from mcir.text import parse
from tests.mcir.programs import draw

PICK = """
program pick
axis i = {i} block {bi}
axis j = {j} block {bj}
input x: float32[i, j]
input label: {label}
output out: float32[i]
tile i:
  label1 = load label: {label}
  fill = constant() value={fill}: float32[]
"""
STREAMED = """  reduction total = sum over j: float32[i]
  stream j:
    x1 = load x: float32[i, j]
    at = iota() axis=j: {dtype}[j]
    here = {test}: bool[i, j]
    chosen = select_n(here, {cases}): float32[i, j]
    total <- {sum}(chosen)
  store out = total
"""
WHOLE = """  x1 = load x: float32[i, j]
  at = iota() axis=j: {dtype}[j]
  here = {test}: bool[i, j]
  chosen = select_n(here, {cases}): float32[i, j]
  total = reduce_{sum}(chosen) over=(j): float32[i]
  store out = total
"""


@pytest.fixture
def one_device(monkeypatch):
    """The tests have eight, over which rows may be split."""
    monkeypatch.setattr(jax, "device_count", lambda *args: 1)


def pick(
    i=5, j=7, bi=2, bj=7, dtype="int32", test="eq(at, label1)", cases="fill, x1", fill="0.0", label=None, sum="sum"
):
    """In one block of `j`, or in a stream of them."""
    label = label or f"{dtype}[i]"
    text = PICK + (WHOLE if bj >= j else STREAMED)
    return parse(text.format(**locals()))


def run(program, *arrays):
    return mcir.lower_program(program)(*arrays)[0]


def reads_elements(program, *arrays):
    return "stablehlo.gather" in jax.jit(mcir.lower_program(program)).lower(*arrays).as_text()


def labels(j, n, dtype="int32"):
    """In the row, and outside of it on either side."""
    return jnp.asarray(np.resize([0, j - 1, 1, -1, j, j + 5, -j, 2], n), dtype)


@pytest.mark.usefixtures("one_device")
class TestOneElementOfEachRow:
    @pytest.mark.parametrize("dtype", ["int32", "int8"])
    @pytest.mark.parametrize(
        "sizes",
        [{}, {"bj": 2, "j": 8}, {"bj": 4, "j": 8, "bi": 5}, {"j": 1, "bj": 1}, {"i": 1, "bi": 1}, {"bj": 1}],
        ids=str,
    )
    def test_values_are_those_of_the_sum(self, sizes, dtype):
        program = pick(dtype=dtype, **sizes)
        x, label = (
            draw(0, *(program.axis(a).size for a in "ij")),
            labels(program.axis("j").size, program.axis("i").size, dtype),
        )
        assert reads_elements(program, x, label)
        n = x.shape[1]
        want = [x[r, k] if 0 <= k < n else 0 for r, k in enumerate(np.asarray(label, int))]
        np.testing.assert_array_equal(run(program, x, label), np.float32(want))

    def test_what_is_not_finite_beside_the_element_is_not_read(self):
        x = jnp.asarray(draw(0, 5, 7)).at[:, 3].set(jnp.nan).at[:, 4].set(jnp.inf)
        label = jnp.asarray([0, 3, 4, 9, 6], jnp.int32)
        np.testing.assert_array_equal(run(pick(), x, label), jnp.asarray([x[0, 0], jnp.nan, jnp.inf, 0, x[4, 6]]))

    @pytest.mark.parametrize(
        ("near_miss", "want"),
        [
            ({"test": "ge(at, label1)"}, lambda x, here: np.where(here(np.greater_equal), x, 0).sum(1)),
            ({"fill": "1.0"}, lambda x, here: np.where(here(np.equal), x, 1).sum(1)),
            ({"cases": "x1, fill"}, lambda x, here: np.where(here(np.equal), 0, x).sum(1)),
            ({"sum": "max"}, lambda x, here: np.where(here(np.equal), x, 0).max(1)),
            # the last block has elements beyond the row, which a label may mean
            ({"bj": 4}, lambda x, here: np.where(here(np.equal), x, 0).sum(1)),
        ],
        ids=["another test", "another fill", "all but one", "another reduction", "ragged blocks"],
    )
    def test_near_misses_are_summed(self, near_miss, want):
        program = pick(**near_miss)
        x, label = draw(0, 5, 7), labels(7, 5)
        found = want(np.asarray(x), lambda test: test(np.arange(7), np.asarray(label)[:, None]))
        assert not reads_elements(program, x, label)
        np.testing.assert_allclose(run(program, x, label), found, rtol=1e-6)

    @pytest.mark.parametrize("dtype", ["uint8", "int8", "float32", "bfloat16"])
    def test_positions_that_are_not_integers_or_start_again_are_compared(self, dtype):
        program = pick(j=300, bj=300, dtype=dtype)
        x, label = draw(0, 5, 300), jnp.asarray([0, 7, 44, 100, 127], dtype)
        assert not reads_elements(program, x, label)
        at = jnp.arange(300, dtype="int32").astype(dtype)
        want = np.where(np.asarray(at == label[:, None]), x, 0).sum(1)
        np.testing.assert_allclose(run(program, x, label), want, rtol=1e-6)

    def test_labels_without_a_sign_may_be_larger_than_any_position(self):
        x, label = draw(0, 5, 7), jnp.asarray([0, 6, 7, 2**31, 2**32 - 1], "uint32")
        assert reads_elements(pick(dtype="uint32"), x, label)
        np.testing.assert_array_equal(run(pick(dtype="uint32"), x, label), jnp.asarray([x[0, 0], x[1, 6], 0, 0, 0]))

    def test_a_label_for_each_element_is_compared(self):
        program = pick(label="int32[i, j]")
        x, label = draw(0, 5, 7), jnp.asarray(np.arange(35).reshape(5, 7) % 3, jnp.int32)
        assert not reads_elements(program, x, label)
        np.testing.assert_allclose(run(program, x, label), np.where(label == np.arange(7), x, 0).sum(1), rtol=1e-6)


def test_among_several_devices_rows_are_summed_where_they_are():
    assert not reads_elements(pick(), draw(0, 5, 7), labels(7, 5))


PRODUCTS = """
program products
axis i = 6 block 3
axis j = {j} block {bj}
input a: {dtype}[i, j]
input b: {b}
output out: {dtype}[i]
tile i:
  a1 = load a: {dtype}[i, j]
  b1 = load b: {b}
  c = mul(a1, b1): {dtype}[i, j]
  s = {reduce}(c) over=(j): {dtype}[i]
  store out = s
"""


def products(j=8, dtype="float32", b=None, reduce="reduce_sum"):
    return parse(PRODUCTS.format(j=j, bj=j, dtype=dtype, b=b or f"{dtype}[i, j]", reduce=reduce))


def is_contraction(program, *arrays):
    return bool(re.search(r"stablehlo\.dot_general", jax.jit(mcir.lower_program(program)).lower(*arrays).as_text()))


@pytest.mark.parametrize("j", [1, 7, 64])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_sum_of_products_is_a_contraction(j, dtype):
    with jax.enable_x64(dtype == "float64"):
        a, b = (jnp.asarray(draw(s, 6, j), dtype) for s in (0, 1))
        assert is_contraction(products(j, dtype), a, b)
        tolerance = (j + 1) * float(jnp.finfo(dtype).eps)
        want = (np.float64(a) * np.float64(b)).sum(1)
        np.testing.assert_allclose(run(products(j, dtype), a, b), want, rtol=tolerance, atol=tolerance)


def test_a_contraction_is_as_precise_as_the_sum():
    text = jax.jit(mcir.lower_program(products())).lower(draw(0, 6, 8), draw(1, 6, 8)).as_text()
    assert "precision = [HIGHEST, HIGHEST]" in text


@pytest.mark.parametrize(
    "near_miss",
    [{"b": "float32[j]"}, {"dtype": "bfloat16"}, {"dtype": "int32"}, {"reduce": "reduce_max"}],
    ids=["one vector for all rows", "rounded products", "integers", "another reduction"],
)
def test_other_sums_are_sums(near_miss):
    program = products(**near_miss)
    dtype = near_miss.get("dtype", "float32")
    a, b = (jnp.asarray(draw(s, 6, 8) * 8, dtype) for s in (0, 1))
    b = b[0] if "b" in near_miss else b
    assert not is_contraction(program, a, b)
    want = getattr(np.float32(a * b), "max" if "reduce" in near_miss else "sum")(1)
    np.testing.assert_allclose(np.float32(run(program, a, b)), want, rtol=2**-6, atol=2**-6)
