"""The computation graph: what is computed, with named axes and no layout.

Transposes, broadcasts and reshapes do not occur: they only say how axes are laid out. What is left are pointwise
operations, contractions, reductions, constants, positions (`iota`) and random bits of positions. `mcir.read` makes one
from a jaxpr.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Value:
    """One computed array: `op` of earlier values. `axes` are those it varies along, in the graph's order."""

    op: str
    args: tuple[int, ...]
    params: tuple[tuple[str, Any], ...]
    axes: tuple[str, ...]
    dtype: str

    def param(self, name: str, default: Any = None) -> Any:
        return dict(self.params).get(name, default)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an array lies in a larger one: element i of a dimension at ``start + stride * i`` of the whole's."""

    whole: tuple[int, ...]
    starts: tuple[int, ...]
    strides: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class View:
    """How an array of the outside is laid out: the axes of each of its dimensions, major first.

    `place`: of an array that is part of the one outside, None for all of it. The rest of an argument is not read, the
    rest of a result is 0.
    """

    shape: tuple[int, ...]
    dims: tuple[tuple[str, ...], ...]
    place: Place | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class ComputationGraph:
    """Values in order of computation.

    Attributes:
      axes: name -> size.
      values: each refers to earlier ones by position. An ``input`` has params ``argument`` (which argument of the
        function it views).
      views: value position of an ``input`` -> its `View`.
      outputs: ``(value position, View)`` of each result.
    """

    axes: dict[str, int]
    values: tuple[Value, ...]
    views: dict[int, View]
    outputs: tuple[tuple[int, View], ...]


def has_positions(graph: ComputationGraph, axis: str) -> bool:
    """Whether a value is the position along an axis, or depends on it."""
    return any(axis in v.axes or axis in v.param("axes", ()) for v in graph.values if v.op in ("iota", "bits"))


def multiple_of(graph: ComputationGraph, v: int) -> int | None:
    """The value of the same type that v is a constant multiple of: w where v is ``c w`` or ``w / c``; else None.

    Of floats: the quotient of an integer is rounded, and a sum of quotients is another number than that of the sum.
    """
    value = graph.values[v]
    if value.op not in ("mul", "div") or "float" not in value.dtype:
        return None
    rest = [k for k, a in enumerate(value.args) if not _is_number(graph, a)]
    if len(rest) != 1 or (value.op == "div" and rest != [0]):
        return None
    w = value.args[rest[0]]
    return w if graph.values[w].dtype == value.dtype else None


def _is_number(graph: ComputationGraph, v: int) -> bool:
    """Whether a value rests on constants alone."""
    value = graph.values[v]
    if value.op == "constant":
        return True
    return not value.axes and bool(value.args) and all(_is_number(graph, a) for a in value.args)


def split(graph: ComputationGraph, axis: str, major: int) -> ComputationGraph:
    """The graph with one axis as two, the first of size `major`: blocks of the second take elements from everywhere.

    Raises ValueError where `major` does not divide the axis, or a value depends on the position along it.
    """
    size = graph.axes[axis]
    if size % major:
        raise ValueError(f"split: expected a divisor of {axis}, of size {size}, found {major}")
    if has_positions(graph, axis):
        raise ValueError(f"split: expected an axis without positions, found positions along {axis}")
    parts = [f"{axis}{letter}" for letter in ("_major", "_minor")]

    def split_names(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(new for a in names for new in (parts if a == axis else (a,)))

    def split_view(view: View) -> View:
        return dataclasses.replace(view, dims=tuple(map(split_names, view.dims)))

    axes = {
        new: n
        for a, s in graph.axes.items()
        for new, n in ({parts[0]: major, parts[1]: size // major} if a == axis else {a: s}).items()
    }
    values = [
        dataclasses.replace(
            v,
            axes=split_names(v.axes),
            params=tuple((k, split_names(p) if k == "over" else p) for k, p in v.params),
        )
        for v in graph.values
    ]
    views = {i: split_view(view) for i, view in graph.views.items()}
    return ComputationGraph(axes, tuple(values), views, tuple((v, split_view(view)) for v, view in graph.outputs))
