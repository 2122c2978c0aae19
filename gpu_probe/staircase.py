"""Levels of a memory hierarchy, from latency over the size of what is walked through."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

#: A plateau is worth a further segment where it lowers the sum of squared log2 latencies by this: four sizes that are
#: off by a fifth.
PENALTY = 4 * math.log2(1.2) ** 2
#: Neighbouring plateaus differ by more than this factor; a smaller step is the slope of one level.
STEP = 1.35
#: A plateau is at least this wide, in octaves of size: what is shorter is the way from one level to the next.
WIDTH = 0.9
#: Bootstrap resamples of the repetitions, for the interval of a size.
RESAMPLES = 40


@dataclasses.dataclass(frozen=True)
class Level:
    """One level of the hierarchy.

    Attributes:
      latency: typical of its plateau, in the unit of the samples.
      sizes: smallest and largest size on the plateau.
      capacity: the largest size that it holds: whose latency is below the geometric mean of this plateau's and the
        next. None for the last level, which holds everything.
      interval: lowest and highest capacity among resampled repetitions, up to the next size that was measured.
    """

    latency: float
    sizes: tuple[int, int]
    capacity: int | None = None
    interval: tuple[int, int] | None = None


def levels(samples: Mapping[int, Sequence[float]], seed: int = 0) -> list[Level]:
    """Levels from samples of latency by size; at least four sizes, else none.

    The latency of a size is the lower quartile of its samples: whatever else runs on the machine can only add to it.
    Its logarithm, made non-decreasing, is cut into constant pieces by dynamic programming (least squares, `PENALTY` a
    piece); pieces that are short or hardly higher than the one before are no level of their own.
    """
    sizes = sorted(samples)
    if len(sizes) < 4:
        return []
    found = _levels(sizes, [float(np.percentile(samples[s], 25)) for s in sizes])
    generator = np.random.default_rng(seed)
    capacities: list[list[int]] = [[] for _ in found]
    for _ in range(RESAMPLES):
        resampled = [float(np.percentile(generator.choice(samples[s], len(samples[s])), 25)) for s in sizes]
        others = _levels(sizes, resampled)
        if len(others) == len(found):
            for known, other in zip(capacities, others, strict=True):
                known += [other.capacity] if other.capacity is not None else []
    return [
        dataclasses.replace(level, interval=_interval(sizes, level.capacity, others))
        for level, others in zip(found, capacities, strict=True)
    ]


def _interval(sizes: Sequence[int], capacity: int | None, others: Sequence[int]) -> tuple[int, int] | None:
    """What is just too large is one measured size above the highest capacity."""
    if capacity is None:
        return None
    highest = max(capacity, *others) if others else capacity
    return min(capacity, *others) if others else capacity, next((s for s in sizes if s > highest), highest)


def _levels(sizes: Sequence[int], latencies: Sequence[float]) -> list[Level]:
    logs = isotonic([math.log2(x) for x in latencies])
    plateaus = _plateaus(sizes, logs)
    found = []
    for n, (first, last, log) in enumerate(plateaus):
        capacity = None
        if n + 1 < len(plateaus):
            between = (log + plateaus[n + 1][2]) / 2
            capacity = max(s for s, x in zip(sizes, logs, strict=True) if x <= between)
        found.append(Level(2**log, (sizes[first], sizes[last]), capacity))
    return found


def _plateaus(sizes: Sequence[int], logs: Sequence[float]) -> list[tuple[int, int, float]]:
    """(first, last, level) of the pieces that are levels."""
    kept: list[tuple[int, int, float]] = []
    pieces = segments(logs)
    for n, (first, last) in enumerate(pieces):
        log = float(np.median(logs[first : last + 1]))
        wide = math.log2(sizes[last] / sizes[first]) >= WIDTH
        if kept and log - kept[-1][2] < math.log2(STEP):
            begin, _, lower = kept[-1]
            kept[-1] = (begin, last, lower)
        elif wide or (n == 0 and not kept):
            kept.append((first, last, log))
    return kept


def isotonic(values: Sequence[float]) -> list[float]:
    """The closest non-decreasing sequence (least squares; pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, n), (b, m) = pools[-2:]
            pools[-2:] = [((a * n + b * m) / (n + m), n + m)]
    return [value for value, n in pools for _ in range(n)]


def segments(values: Sequence[float]) -> list[tuple[int, int]]:
    """(first, last) of the constant pieces with the least squared error plus `PENALTY` a piece."""
    sums, squares = np.cumsum([0.0, *values]), np.cumsum([0.0, *(v * v for v in values)])

    def error(first: int, last: int) -> float:
        n = last - first + 1
        total = sums[last + 1] - sums[first]
        return float(squares[last + 1] - squares[first] - total * total / n)

    best: list[tuple[float, int]] = []
    for last in range(len(values)):
        best.append(
            min(
                ((best[first - 1][0] if first else 0.0) + error(first, last) + PENALTY, first)
                for first in range(last + 1)
            )
        )
    found, last = [], len(values) - 1
    while last >= 0:
        first = best[last][1]
        found.append((first, last))
        last = first - 1
    return found[::-1]


def size_class(size: float) -> int:
    """The power of two nearest to a size, as its exponent: sizes whose classes differ by at most 1 are alike."""
    return round(math.log2(size))
