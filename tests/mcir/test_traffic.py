"""Counts against closed forms, and against counting the blocks one by one."""

import itertools
import math

import numpy as np
import pytest

from mcir.interpret import blocks
from mcir.text import parse
from mcir.traffic import traffic
from tests.mcir.programs import attention, backward, moments, sizes

SHAPES = [
    pytest.param({}, id="ragged"),
    pytest.param(dict(i=32, j=64, bi=16, bj=16, bh=2), id="even"),
    pytest.param(dict(i=50, j=70, bi=16, bj=32), id="ragged, blocks that share an evaluation"),
    pytest.param(dict(i=50, j=70, bi=16, bj=24), id="blocks that do not"),
    pytest.param(dict(i=1, j=1, bi=1, bj=1), id="size one"),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_flash_attention_forward(shape):
    """``2 N d + 2 N d ceil(N / B)`` elements a head, log-sum-exp aside: q and out once, k and v for each tile of q."""
    s = sizes(**shape)
    found = attention(**shape).traffic()
    tiles = math.ceil(s["i"] / s["bi"])
    assert found.dram.read == 4 * s["h"] * (s["i"] * s["d"] + s["j"] * (s["d"] + s["e"]) * tiles)
    assert found.dram.written == 4 * s["h"] * s["i"] * (s["e"] + 1)
    # Two contractions; neg, shifted_exp, max and sum of scores; out and log-sum-exp; corrections for each tile of k.
    rows, scores, steps = s["h"] * s["i"], s["h"] * s["i"] * s["j"], math.ceil(s["j"] / s["bj"])
    assert found.flops == (2 * s["d"] + 2 * s["e"] + 4) * scores + rows * (s["e"] + 2) + rows * (s["e"] + 1) * steps
    assert found.steps == math.ceil(s["h"] / s["bh"]) * tiles * steps


def test_square_attention_in_the_form_of_the_paper():
    n, d, b = 512, 64, 128
    found = attention(h=1, i=n, j=n, d=d, e=d, bi=b, bj=b).traffic()
    lse = 4 * n
    assert found.dram.total - lse == 4 * (2 * n * d + 2 * n * d * math.ceil(n / b))
    assert found.compulsory.total - lse == 4 * 4 * n * d
    assert found.intensity == found.flops / found.dram.total


def test_one_tile_of_queries_moves_what_any_program_must():
    found = attention(i=13, bi=13).traffic()
    assert found.dram == found.compulsory


def count(program, fill, late, s):
    """Visited blocks of queries and keys, and bytes of keys and values, one block after the other."""
    seen, moved = 0, 0
    for (i0, i1), (j0, j1) in itertools.product(blocks(program.axis("i")), blocks(program.axis("j"))):
        visible = (np.arange(i0, i1)[:, None] >= np.arange(j0, j1) + late).any()
        seen += visible
        moved += visible * (j1 - j0) * (s["d"] + s["e"]) * s["h"] * 4
    return seen, moved


@pytest.mark.parametrize("late", [0, 6, -9, 1000])
@pytest.mark.parametrize("shape", SHAPES)
def test_skipped_blocks_are_not_counted(shape, late):
    program = attention(-1e30, late=late, **shape)
    s = sizes(**shape)
    seen, moved = count(program, -1e30, late, s)
    found = program.traffic()
    assert found.steps == seen * math.ceil(s["h"] / s["bh"])
    assert dict(found.buffers)["k"].read + dict(found.buffers)["v"].read == moved


def test_causal_attention_moves_and_computes_about_half():
    shape = dict(h=1, i=4096, j=4096, d=64, e=64, bi=128, bj=128)
    full, causal = attention(**shape).traffic(), attention(-1e30, **shape).traffic()
    blocks_seen = 32 * 33 / 2 / 32**2
    assert dict(causal.buffers)["k"].read == blocks_seen * dict(full.buffers)["k"].read
    assert 0.5 < causal.flops / full.flops < 0.53
    assert 0.5 < causal.dram.total / full.dram.total < 0.55


@pytest.mark.parametrize("shape", SHAPES)
def test_backward(shape):
    """For each tile of keys: q and dout once, log-sum-exp, delta; dq is read and written each time."""
    s = sizes(**shape)
    found = backward(-1e30, late=-1000, **shape).traffic()
    rows, tiles = 4 * s["h"] * s["i"], math.ceil(s["j"] / s["bj"])
    buffers = dict(found.buffers)
    assert buffers["dq"].read == buffers["dq"].written == rows * s["d"] * tiles
    assert buffers["q"].read == rows * s["d"] * tiles
    assert buffers["dout"].read == rows * s["e"] * (tiles + 1)
    assert (buffers["delta"].read, buffers["delta"].written) == (rows * tiles, rows)
    assert buffers["k"].read == buffers["dk"].written == 4 * s["h"] * s["j"] * s["d"]


def test_loads_count_where_they_stand():
    """A block that no surrounding loop moves is read again in each of its rounds."""
    text = """
program scale
axis a = 10 block 3
axis b = 7 block 2
input x: float32[a, b]
input s: bfloat16[a]
input key: uint32[]
output y: float32[a, b]
tile a:
  {outside}
  stream b:
    {inside}
    x1 = load x: float32[a, b]
    s2 = convert_element_type(s1) new_dtype=float32: float32[a]
    r = bits(k) axes=(a, b) shape=(10, 7): uint32[a, b]
    y1 = mul(x1, s2): float32[a, b]
    store y = y1
"""
    load_s, load_key = "s1 = load s: bfloat16[a]", "k = load key: uint32[]"
    hoisted = dict(traffic(parse(text.format(outside=load_s, inside=load_key)).verify()).buffers)
    inside = dict(traffic(parse(text.format(outside=load_key, inside=load_s)).verify()).buffers)
    assert (hoisted["s"].read, inside["s"].read) == (10 * 2, 10 * 2 * 4)
    assert (hoisted["key"].read, inside["key"].read) == (8 * 4 * 4, 8 * 4)  # two words
    assert hoisted["x"].read == 4 * 70


def test_chip_traffic_and_levels():
    found = moments(r=4, c=12).traffic()
    # The update reads a tile and the state and writes the state; sub and mul read two tiles or rows and write one.
    tiles, states = 4 * 48, 4 * 4 * 3 * 3
    rows = 4 * 4 * 3  # one value for each row, in each of three blocks of columns
    scalars = 4 * 2 * 2  # of two tiles of rows: eps, and nothing else
    assert found.bytes_read == {
        "dram": 2 * tiles,
        "chip": tiles + states + 2 * (tiles + rows) + 4 * 4 * 4 + scalars // 2,
    }
    assert found.bytes_written == {"dram": tiles + 16, "chip": states + 2 * tiles + 3 * 16}


def test_table(golden):
    golden(str(attention(-1e30, h=8, i=4096, j=4096, d=64, e=64, bh=8, bi=512, bj=512).traffic()))
