"""Which blocks of a stream with skipped blocks are visited: the predicate, evaluated for every element."""

from __future__ import annotations

import functools
import math

import numpy as np

from mcir.interpret import evaluate, positions
from mcir.ir import Compute, Program, Stream, Tile

#: Elements of the predicate to evaluate at a time.
_STRIP = 2**22
#: Blocks of a multiple of this share one evaluation.
_GRAIN = 16


def visited(program: Program, nest: Tile, stream: Stream) -> tuple[tuple[str, ...], np.ndarray]:
    """The axes of the predicate, and whether each block along them is visited.

    Rows that `Skip.rows` would make visit more are not known here: counted as having none.
    """
    assert stream.skip is not None
    definitions = positions(nest, stream.skip.predicate)
    axes = [program.axis(name) for name in definitions[-1].type.axes]
    grains = tuple(_GRAIN if a.block % _GRAIN == 0 or a.block >= a.size else a.block for a in axes)
    sizes = tuple((a, program.axis(a).size) for a in sorted({a for s in definitions for a in s.type.axes}))
    factors = tuple(-(-a.block // grain) for a, grain in zip(axes, grains, strict=True))
    return definitions[-1].type.axes, _coarse(definitions, stream.skip.visible, sizes, grains, factors)


@functools.lru_cache(maxsize=256)
def _coarse(
    definitions: tuple[Compute, ...],
    visible: bool,
    sizes: tuple[tuple[str, int], ...],
    grains: tuple[int, ...],
    factors: tuple[int, ...],
) -> np.ndarray:
    """As `_fine`, for so many of its blocks at once."""
    seen = _fine(definitions, visible, sizes, grains)
    for number, factor in enumerate(factors):
        if seen.shape[number]:
            seen = np.logical_or.reduceat(seen, range(0, seen.shape[number], factor), axis=number)
    return seen


@functools.lru_cache(maxsize=32)
def _fine(
    definitions: tuple[Compute, ...], visible: bool, sizes: tuple[tuple[str, int], ...], grains: tuple[int, ...]
) -> np.ndarray:
    """Whether each block of these sizes has a visible element."""
    whole = {name: (0, size) for name, size in sizes}
    axes = definitions[-1].type.axes
    if not axes:
        return np.asarray(evaluate(definitions, whole) == visible)
    first, rows = axes[0], whole[axes[0]][1]
    others = math.prod(whole[a][1] for a in axes[1:])
    step = max(1, _STRIP // max(1, others) // grains[0]) * grains[0]
    strips = []
    for start in range(0, rows, step):
        strip = evaluate(definitions, {**whole, first: (start, min(start + step, rows))}) == visible
        for number, grain in enumerate(grains):
            if strip.shape[number]:
                strip = np.logical_or.reduceat(strip, range(0, strip.shape[number], grain), axis=number)
        strips.append(strip)
    counts = [-(-whole[a][1] // grain) for a, grain in zip(axes, grains, strict=True)]
    return np.concatenate(strips) if strips else np.zeros(counts, bool)
