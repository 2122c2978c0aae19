"""Layered drawing of a directed acyclic graph, top to bottom.

The usual four steps (Sugiyama, Tagawa and Toda, "Methods for visual understanding of hierarchical system structures",
1981): layers by longest path, edges over several layers cut by bends, order within a layer by barycenters, then
horizontal places as near to the neighbours' as order and widths allow (isotonic regression, so exactly).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

#: Between neighbours of a layer, and between layers.
GAP_X, GAP_Y = 22.0, 26.0
_BEND_WIDTH = 10.0
_SWEEPS = 6


@dataclasses.dataclass(frozen=True)
class Layout:
    """Centres of the boxes, the points each edge goes through (from its first box to its last), and the size of all."""

    centres: tuple[tuple[float, float], ...]
    edges: tuple[tuple[tuple[float, float], ...], ...]
    width: float
    height: float


def layout(sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]]) -> Layout:
    """Places boxes of these (width, height) with these edges ``(from, to)``, where ``from < to``.

    Raises:
      ValueError: an edge that goes backwards.
    """
    for a, b in edges:
        if not 0 <= a < b < len(sizes):
            raise ValueError(f"layout(edges=...): expected edges from a box to a later one, found {(a, b)}")
    if not sizes:
        return Layout((), (), 0.0, 0.0)
    layer = _layers(len(sizes), edges)
    boxes, chains, links = list(sizes), [], []
    for a, b in edges:
        chain = [a]
        for k in range(layer[a] + 1, layer[b]):
            boxes.append((_BEND_WIDTH, 0.0))
            layer.append(k)
            chain.append(len(boxes) - 1)
        chain.append(b)
        links += itertools.pairwise(chain)
        chains.append(chain)
    rows: list[list[int]] = [[] for _ in range(max(layer) + 1)]
    for i, k in enumerate(layer):
        rows[k].append(i)
    above: list[list[int]] = [[] for _ in boxes]
    below: list[list[int]] = [[] for _ in boxes]
    for a, b in links:
        above[b].append(a)
        below[a].append(b)
    _order(rows, above, below)
    x = _across(rows, [w for w, _ in boxes], above, below)
    tall = [max(boxes[i][1] for i in row) for row in rows]
    y, top = [], 0.0
    for height in tall:
        y.append(top + height / 2)
        top += height + GAP_Y
    left = min(x[i] - boxes[i][0] / 2 for i in range(len(boxes)))
    right = max(x[i] + boxes[i][0] / 2 for i in range(len(boxes)))
    centres = tuple((x[i] - left, y[layer[i]]) for i in range(len(boxes)))
    paths = tuple(tuple(centres[i] for i in chain) for chain in chains)
    return Layout(centres[: len(sizes)], paths, right - left, top - GAP_Y)


def _layers(n: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Longest path from a source; a source that is read later only stands right above its first reader."""
    layer, first_reader = [0] * n, [n] * n
    incoming: list[list[int]] = [[] for _ in range(n)]
    for a, b in edges:
        incoming[b].append(a)
    for b in range(n):
        layer[b] = max((layer[a] + 1 for a in incoming[b]), default=0)
    for a, b in edges:
        first_reader[a] = min(first_reader[a], layer[b])
    for a in range(n):
        if not incoming[a] and first_reader[a] < n:
            layer[a] = first_reader[a] - 1
    return layer


def _order(rows: list[list[int]], above: list[list[int]], below: list[list[int]]) -> None:
    """Sorts each row by the mean place of its neighbours in the row before, down and up in turn."""
    place = {i: k for row in rows for k, i in enumerate(row)}
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        neighbours = above if down else below
        for row in rows if down else reversed(rows):
            mean = {i: sum(place[j] for j in neighbours[i]) / len(neighbours[i]) for i in row if neighbours[i]}
            row.sort(key=lambda i, mean=mean: mean.get(i, place[i]))
            place.update((i, k) for k, i in enumerate(row))


def _across(
    rows: list[list[int]], widths: Sequence[float], above: list[list[int]], below: list[list[int]]
) -> list[float]:
    x = [0.0] * len(widths)
    for row in rows:
        _place(row, widths, [0.0] * len(row), x)
    for sweep in range(2 * _SWEEPS):
        down = sweep % 2 == 0
        neighbours = above if down else below
        for row in rows if down else reversed(rows):
            wanted = [_mean([x[j] for j in neighbours[i]], x[i]) for i in row]
            _place(row, widths, wanted, x)
    return x


def _mean(values: list[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _place(row: list[int], widths: Sequence[float], wanted: list[float], x: list[float]) -> None:
    """Centres in this order, no two boxes nearer than the gap, with the least sum of squared distances to `wanted`.

    With the widths subtracted this is isotonic regression: neighbours that are in the wrong order share their mean.
    """
    offset, at = [], 0.0
    for k, i in enumerate(row):
        at += (widths[row[k - 1]] + widths[i]) / 2 + GAP_X if k else 0.0
        offset.append(at)
    pools: list[list[float]] = []  # sum, count
    for target, shift in zip(wanted, offset, strict=True):
        pools.append([target - shift, 1.0])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] >= pools[-1][0] / pools[-1][1]:
            total, count = pools.pop()
            pools[-1][0] += total
            pools[-1][1] += count
    k = 0
    for total, count in pools:
        for _ in range(int(count)):
            x[row[k]] = total / count + offset[k]
            k += 1
