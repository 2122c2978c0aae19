"""What the files that write a nest share: names, types, and which value lies where."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mcir.graph import ComputationGraph
from mcir.ir import Type

_LOW = ("bfloat16", "float16")


def accumulator(dtype: str) -> str:
    """What sums of this type are kept in: float32 for narrower floats, the type itself otherwise."""
    return "float32" if dtype in _LOW else dtype


class Names:
    """Fresh names for values; shared by all nests of a program."""

    def __init__(self, taken: Sequence[str]):
        self.taken = set(taken)

    def fresh(self, wanted: str) -> str:
        name, k = wanted, 1
        while name in self.taken:
            k += 1
            name = f"{wanted}{k}"
        self.taken.add(name)
        return name


@dataclasses.dataclass
class Site:
    """What a nest is made from.

    Attributes:
      graph: all values.
      known: value -> buffer, for what earlier nests or the caller provide.
      buffer_types: of those buffers.
      names: the program's names.
      axis_name: of the graph -> of the program; its order is that of the program.
      computed: values that an earlier stream or nest computed; doing so again is a rematerialization.
    """

    graph: ComputationGraph
    known: dict[int, str]
    buffer_types: dict[str, Type]
    names: Names
    axis_name: dict[str, str]
    computed: set[int]

    def type_of(self, dtype: str, axes: Any) -> Type:
        return Type(dtype, tuple(new for old, new in self.axis_name.items() if old in axes))

    def renamed(self, axes: Any) -> tuple[str, ...]:
        return tuple(new for old, new in self.axis_name.items() if old in axes)
