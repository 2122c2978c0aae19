"""How long values live, what reuses what, and how much is on chip at one time."""

import pytest

from mcir.lifetime import dram_bytes, lifetimes, live_bytes, peak_bytes
from mcir.text import parse
from tests.mcir.programs import attention, backward, moments


def table(program):
    lines = [f"{'name':6} {'first':>5} {'last':>5} {'bytes':>7}  reuses"]
    lines += [f"{v.name:6} {v.first:5} {v.last:5} {v.bytes:7}  {v.reuses or ''}".rstrip() for v in lifetimes(program)]
    numbered = [f"{i:3} {live:9}" for i, live in enumerate(live_bytes(lifetimes(program)))]
    return "\n".join([*lines, "", "statement, live bytes", *numbered])


@pytest.mark.parametrize("program", [attention(-1e30), backward(-1e30), moments()], ids=lambda p: p.name)
def test_lifetimes(program, golden):
    golden(table(program))


def chain(*lines):
    text = "\n  ".join(lines)
    return parse(f"""
program chain
axis a = 100 block 10
axis b = 8 block 4
input x: float32[a]
input xb: float32[a, b]
output y: float32[a]
tile a:
  {text}
""")


def by_name(program):
    return {v.name: v for v in program.lifetimes()}


def test_a_pointwise_result_takes_over_an_argument_that_ends_there():
    program = chain("x1 = load x: float32[a]", "u = neg(x1): float32[a]", "v = exp(u): float32[a]", "store y = v")
    found = by_name(program.verify())
    assert [found[n].reuses for n in ("x1", "u", "v")] == [None, "x1", "u"]
    assert program.peak_bytes() == 40


def test_an_argument_that_is_needed_later_is_not_taken_over():
    program = chain("x1 = load x: float32[a]", "u = neg(x1): float32[a]", "v = mul(x1, u): float32[a]", "store y = v")
    found = by_name(program.verify())
    assert found["u"].reuses is None
    assert found["v"].reuses in ("x1", "u")
    assert program.peak_bytes() == 80


def test_what_has_another_size_is_not_taken_over():
    program = chain("x1 = load x: float32[a]", "u = convert_element_type(x1) new_dtype=bfloat16: bfloat16[a]",
                    "v = convert_element_type(u) new_dtype=float32: float32[a]", "store y = v")  # fmt: skip
    found = by_name(program.verify())
    assert found["u"].bytes == 20
    assert found["u"].reuses is None
    assert found["v"].reuses == "x1"
    assert program.peak_bytes() == 60


def test_storage_is_taken_over_once_at_a_time():
    program = chain("x1 = load x: float32[a]", "u = neg(x1): float32[a]", "v = exp(x1): float32[a]",
                    "w = mul(u, v): float32[a]", "z = neg(w): float32[a]", "store y = z")  # fmt: skip
    reused = [v.reuses for v in program.verify().lifetimes() if v.reuses is not None]
    assert len(set(reused)) == len(reused)
    assert program.peak_bytes() == 80


def test_a_contraction_is_not_computed_in_place():
    """Of its arguments none is taken over, though both end there and have the size of the result."""
    program = parse("""
program dot
axis a = 4 block 4
axis b = 4 block 4
axis c = 4 block 4
input x: float32[a, b]
input w: float32[b, c]
output y: float32[a, c]
tile:
  x1 = load x: float32[a, b]
  w1 = load w: float32[b, c]
  t = dot(x1, w1) over=(b): float32[a, c]
  store y = t
""").verify()
    assert by_name(program)["t"].reuses is None
    assert program.peak_bytes() == 3 * 64


def test_what_a_stream_needs_again_is_not_taken_over_in_its_last_statement():
    program = parse("""
program rounds
axis a = 4 block 4
axis b = 9 block 3
input x: float32[a]
input y: float32[a, b]
output z: float32[a]
tile:
  x1 = load x: float32[a]
  reduction m = max over b: float32[a]
  stream b:
    y1 = load y: float32[a, b]
    m <- max(y1)
    u = add(x1, m): float32[a]
  w = neg(m): float32[a]
  store z = w
""").verify()
    found = by_name(program)
    assert found["u"].reuses is None
    assert found["u"].first == found["x1"].last == 5
    assert found["w"].reuses == "m"


def test_what_a_stream_needs_again_lives_to_its_end():
    found = by_name(attention())
    assert found["q1"].last == found["acc"].last - 1  # the last statement of the stream
    assert found["k1"].last < found["q1"].last
    assert found["m"].last > found["q1"].last  # log-sum-exp


def test_peak_of_attention():
    """q, acc, m, l; of a block of keys: scores and one of k, v."""
    bi, bj, d = 64, 32, 16
    program = attention(h=1, i=256, j=256, d=d, e=d, bi=bi, bj=bj)
    elements = 2 * bi * d + 2 * bi + bi * bj + bj * d
    assert peak_bytes(program) == 4 * elements


def test_peak_grows_with_blocks_and_not_with_axes():
    small = attention(i=64, j=64, bi=8, bj=8)
    assert small.peak_bytes() == attention(i=640, j=640, bi=8, bj=8).peak_bytes()
    assert small.peak_bytes() < small.with_blocks(i=16).peak_bytes() < small.with_blocks(i=16, j=16).peak_bytes()


def test_temporaries_are_in_memory():
    assert dram_bytes(attention()) == 0
    assert dram_bytes(backward(-1e30, h=2, i=13)) == 2 * 13 * 4
