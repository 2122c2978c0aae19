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
class View:
    """How an array of the outside is laid out: the axes of each of its dimensions, major first."""

    shape: tuple[int, ...]
    dims: tuple[tuple[str, ...], ...]


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
