"""BufferLifetime: how long each value stays on chip, what takes over its storage, and how much is there at one time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from mcir._signature import pointwise
from mcir.ir import Compute, Load, OnlineReduction, Program, Store, Stream, Tile, Type, Update


@dataclasses.dataclass(frozen=True)
class BufferLifetime:
    """A value on chip: the result of a load or of an operation, or running state.

    Attributes:
      name: of the value.
      first, last: numbers of the statements (places in `Program.statements()`) that define it and use it last. What is
        defined before a stream and used in it lives to the stream's last statement, for the next round needs it.
      bytes: of a full block.
      reuses: the value whose storage it takes over: one of the same size that is dead by then, or whose last use is the
        pointwise operation that defines this one.
    """

    name: str
    first: int
    last: int
    bytes: int
    reuses: str | None = None


def lifetimes(program: Program) -> tuple[BufferLifetime, ...]:
    """The lifetimes of all values on chip, in order of definition, one nest after the other."""
    out: list[BufferLifetime] = []
    start = 0
    for nest in program.nests:
        found = _Lifetimes(program, nest, start)
        out += found.assigned()
        start = found.number
    return tuple(out)


def peak_bytes(program: Program) -> int:
    """The largest number of bytes on chip at one time, each storage counted once for all values taking turns in it."""
    return max(live_bytes(lifetimes(program)), default=0)


def live_bytes(found: tuple[BufferLifetime, ...]) -> list[int]:
    """The bytes on chip during each statement, up to the last one that uses any."""
    change = [0] * (max((v.last for v in found), default=-1) + 2)
    last = {}
    for v in found:
        # A value that takes over storage in the very statement that uses it up is in it together with the old one.
        first = v.first + (v.reuses is not None and last[v.reuses] == v.first)
        last[v.name] = v.last
        if first <= v.last:
            change[first] += v.bytes
            change[v.last + 1] -= v.bytes
    live, out = 0, []
    for step in change[:-1]:
        live += step
        out.append(live)
    return out


def dram_bytes(program: Program) -> int:
    """Bytes of the temporaries: what the program keeps in memory besides its inputs and outputs."""
    sizes = {a.name: a.size for a in program.axes}
    return sum(
        math.prod(sizes[a] for a in b.type.axes) * jnp.dtype(b.type.dtype).itemsize for b in program.role("temporary")
    )


def tile_bytes(program: Program, type: Type) -> int:
    """Bytes of a full block."""
    blocks = {a.name: min(a.block, a.size) for a in program.axes}
    return math.prod(blocks[a] for a in type.axes) * jnp.dtype(type.dtype).itemsize


def _used(s: Any) -> tuple[str, ...]:
    """The values that a statement reads."""
    match s:
        case Compute():
            return s.args
        case Update():
            return (*s.results, *s.args)
        case Store():
            return (s.value,)
        case Stream():
            return tuple(name for name in (s.skip.rows,) if name) if s.skip else ()
    return ()


class _Lifetimes:
    """The values of one nest, whose first statement has the number `start`."""

    def __init__(self, program: Program, nest: Tile, start: int):
        self.program, self.number = program, start
        self.first: dict[str, tuple[int, Any, tuple[int, ...]]] = {}  # number, statement, streams around it
        self.last: dict[str, int] = {}
        self.uses: list[tuple[str, int, tuple[int, ...]]] = []
        self.ends: dict[int, int] = {}  # the last statement of the stream with this number
        for number, s, streams in self.walk(nest.body, ()):
            if isinstance(s, Load | Compute):
                self.first[s.result] = number, s, streams
            elif isinstance(s, OnlineReduction):
                self.first.update((name, (number, s, streams)) for name in s.results)
            if isinstance(s, Update) and (by := self.first[s.results[0]][1].corrected_by):
                self.uses.append((by, number, streams))
            self.uses += [(name, number, streams) for name in _used(s)]
        for name, number, streams in self.uses:
            if name in self.first:
                self.last[name] = max(self.last.get(name, 0), self.end(name, number, streams))

    def walk(self, body: tuple[Any, ...], streams: tuple[int, ...]) -> Iterator[tuple[int, Any, tuple[int, ...]]]:
        for s in body:
            number = self.number
            self.number += 1
            yield number, s, streams
            if isinstance(s, Stream):
                yield from self.walk(s.body, (*streams, number))
                self.ends[number] = self.number - 1

    def end(self, name: str, number: int, streams: tuple[int, ...]) -> int:
        """Until when a use keeps a value: to the end of the outermost stream around the use and not the definition."""
        outside = [s for s in streams if s not in self.first[name][2]]
        return self.ends[outside[0]] if outside else number

    def in_place(self, s: Any, streams: tuple[int, ...]) -> list[str]:
        """The arguments whose storage the result may take while they are read: no later round of a loop needs them."""
        if not isinstance(s, Compute) or not pointwise(s):
            return []
        arguments = [(name, *self.first[name][1:]) for name in s.args]
        return [name for name, by, around in arguments if by.type.axes == s.type.axes and around == streams]

    def assigned(self) -> list[BufferLifetime]:
        """All values, each with the dead one whose storage it takes over."""
        dead: list[BufferLifetime] = []  # to be: everything defined so far that nothing has taken over
        out: list[BufferLifetime] = []
        for name, (first, s, streams) in self.first.items():
            size = tile_bytes(self.program, s.type)
            in_place = self.in_place(s, streams)
            fits = [v for v in dead if v.bytes == size and (v.last < first or (v.last == first and v.name in in_place))]
            # The argument that dies here first: it is at hand. Then what died last.
            chosen = max(fits, key=lambda v: (v.last, v.first), default=None)
            if chosen is not None:
                dead.remove(chosen)
            value = BufferLifetime(name, first, self.last.get(name, first), size, chosen.name if chosen else None)
            dead.append(value)
            out.append(value)
        return out
