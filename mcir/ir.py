"""The language: what a memory flow program is made of.

Grammar, in the form `mcir.text` prints and parses::

    program    = "program" NAME axis* buffer* nest*
    axis       = "axis" NAME "=" SIZE "block" BLOCK
    buffer     = ("input" | "output" | "temporary") NAME ":" type
    nest       = "tile" [NAME ("," NAME)*] ":" statement+
    statement  = NAME "=" "load" NAME ":" type                                 a Tile of a buffer, memory to chip
               | ["recompute"] NAME "=" OP "(" args ")" params ":" type        recompute: a Rematerialization
               | "reduction" NAME ("," NAME)* "=" MONOID "over" NAME ("," NAME)*
                 ["corrected by" NAME] ["base" NUMBER] ":" type
               | NAME ("," NAME)* "<-" MONOID "(" args ")"                     an OnlineReduction takes in a tile
               | "store" NAME ("=" | "+=") NAME                                chip to memory
               | "stream" NAME [skip] ":" statement+
    skip       = "while" NAME "is" BOOL "else" FILL ["unless" NAME "low"] ["base" NUMBER]
    type       = DTYPE "[" [NAME ("," NAME)*] "]"

Arrays have named axes and no layout: a value varies along the axes of its type and along nothing else. A *Tile* is the
block of a buffer at the position of the surrounding loops. A *Stream* walks over the blocks of one axis in order. An
*OnlineReduction* is a reduction over the streamed axis that takes in one tile at a time: a monoid, possibly *corrected*
when the running value it is relative to changes. A *Rematerialization* computes again what an earlier loop computed and
did not keep. *BufferLifetime* is derived from the statements (`mcir.lifetime`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

MONOIDS = ("sum", "max", "min", "moments")
ROLES = ("input", "output", "temporary")


@dataclasses.dataclass(frozen=True)
class Axis:
    """A loop of `size` steps, taken in blocks. The last block may be ragged."""

    name: str
    size: int
    block: int

    def __post_init__(self) -> None:
        if self.size < 0 or not 1 <= self.block <= max(1, self.size):
            raise ValueError(
                f"Axis({self.name!r}): expected 1 <= block <= size, found block {self.block} of {self.size}"
            )

    @property
    def count(self) -> int:
        """Number of blocks."""
        return -(-self.size // self.block)

    @property
    def ragged(self) -> bool:
        return self.size % self.block != 0


@dataclasses.dataclass(frozen=True)
class Type:
    """Element type and axes. The order of the axes is that of the program's axis list."""

    dtype: str
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(self.axes)}]"


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array in memory."""

    name: str
    role: str
    type: Type

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"Buffer({self.name!r}, role=...): expected one of {ROLES}, found {self.role!r}")


@dataclasses.dataclass(frozen=True)
class Load:
    """``result = load buffer``: the tile of a buffer at the position of the loops."""

    result: str
    buffer: str
    type: Type


@dataclasses.dataclass(frozen=True)
class Compute:
    """``result = op(args)`` on tiles. Arguments are names; `params` are sorted ``(name, value)`` pairs.

    Operations: every pointwise one of `mcir.operations`, arguments broadcast to the result's axes; ``constant``;
    ``iota`` (the position along an axis); ``bits`` (random bits of an element's position); ``dot`` and
    ``reduce_sum``, ``reduce_max``, ``reduce_min`` within a tile (param ``over``);
    ``shifted_exp(x, m) = exp(base (x - m))``, 0 where both are -inf.
    """

    result: str
    op: str
    args: tuple[str, ...]
    params: tuple[tuple[str, Any], ...]
    type: Type

    def param(self, name: str, default: Any = None) -> Any:
        return dict(self.params).get(name, default)


@dataclasses.dataclass(frozen=True)
class Rematerialization(Compute):
    """A `Compute` of something that an earlier loop of the program (or the forward program) computed and threw away."""


@dataclasses.dataclass(frozen=True)
class OnlineReduction:
    """Declares running state, at its empty value: one name, or three for ``moments`` (count, mean, M2).

    ``corrected_by=m``: the state is relative to ``exp(base m)`` of the running maximum m, and is multiplied by
    ``exp(base (m_old - m_new))`` when m changes.
    """

    results: tuple[str, ...]
    monoid: str
    over: tuple[str, ...]
    type: Type
    corrected_by: str | None = None
    base: float = 1.0

    def __post_init__(self) -> None:
        if self.monoid not in MONOIDS:
            raise ValueError(f"OnlineReduction(monoid=...): expected one of {MONOIDS}, found {self.monoid!r}")


@dataclasses.dataclass(frozen=True)
class Update:
    """``state <- monoid(args)``: takes in the current tile. Two arguments: the sum of their products (a ``dot``)."""

    results: tuple[str, ...]
    args: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Store:
    """``store buffer = value`` or, with `accumulate`, ``+=`` (the buffer starts at zero)."""

    buffer: str
    value: str
    accumulate: bool = False


@dataclasses.dataclass(frozen=True)
class Skip:
    """Blocks of a stream that need no visit.

    Where `predicate` (a value computed from positions alone) differs from `visible` in a whole block, everything the
    stream would add there is zero: scores are `fill`. That is true unless a row's own maximum is not far above `fill`;
    `rows` names it: running state (then the rest is streamed afterwards if any row needs it) or a buffer (then nothing
    is skipped if any row needs it). None: `fill` is -inf and nothing can need it.
    """

    predicate: str
    visible: bool
    fill: float
    rows: str | None = None
    base: float = 1.0


@dataclasses.dataclass(frozen=True)
class Stream:
    """Walks over the blocks of one axis in order, one after the other."""

    axis: str
    body: tuple[Any, ...]
    skip: Skip | None = None


@dataclasses.dataclass(frozen=True)
class Tile:
    """A nest of loops over blocks of these axes, in any order: its iterations are independent but for ``+=``."""

    axes: tuple[str, ...]
    body: tuple[Any, ...]


Statement = Load | Compute | OnlineReduction | Update | Store | Stream


@dataclasses.dataclass(frozen=True)
class Program:
    """A memory flow program. Immutable; `print` it to read it. `verify` checks it against the rules of the language."""

    name: str
    axes: tuple[Axis, ...]
    buffers: tuple[Buffer, ...]
    nests: tuple[Tile, ...]

    def axis(self, name: str) -> Axis:
        return next(a for a in self.axes if a.name == name)

    def buffer(self, name: str) -> Buffer:
        return next(b for b in self.buffers if b.name == name)

    def role(self, role: str) -> tuple[Buffer, ...]:
        """Buffers of this role, in order."""
        return tuple(b for b in self.buffers if b.role == role)

    def with_blocks(self, **blocks: int) -> Program:
        """The program with other tile sizes; sizes beyond an axis are cut to it. Raises KeyError for unknown axes."""
        unknown = set(blocks) - {a.name for a in self.axes}
        if unknown:
            raise KeyError(f"with_blocks: expected axes of {self.name}, found {', '.join(sorted(unknown))}")
        axes = [
            dataclasses.replace(a, block=max(1, min(blocks[a.name], a.size))) if a.name in blocks else a
            for a in self.axes
        ]
        return dataclasses.replace(self, axes=tuple(axes))

    def statements(self) -> Iterator[tuple[tuple[str, ...], Any]]:
        """``(names of the loops around it, statement)`` of every statement, streams before their bodies."""
        for nest in self.nests:
            yield from _walk(nest.body, nest.axes)

    # -- the analyses, under the names people look for ---------------------------------------------------
    def verify(self) -> Program:
        """Checks every rule of the language; returns self. Raises VerifyError naming the statement and the rule."""
        from mcir.verify import verify

        return verify(self)

    def run(self, *inputs: Any) -> tuple[Any, ...]:
        """Executes the program slowly and obviously, see `mcir.interpret`."""
        from mcir.interpret import interpret

        return interpret(self, *inputs)

    def traffic(self) -> Any:
        """Exact bytes between memory and chip and operations, see `mcir.traffic`."""
        from mcir.traffic import traffic

        return traffic(self)

    def lifetimes(self) -> Any:
        """First and last use of every value on chip, see `mcir.lifetime`."""
        from mcir.lifetime import lifetimes

        return lifetimes(self)

    def peak_bytes(self) -> int:
        """Largest number of bytes on chip at one time, see `mcir.lifetime`."""
        from mcir.lifetime import peak_bytes

        return peak_bytes(self)

    def __str__(self) -> str:
        from mcir.text import print_program

        return print_program(self)


def _walk(body: tuple[Any, ...], loops: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for statement in body:
        yield loops, statement
        if isinstance(statement, Stream):
            yield from _walk(statement.body, (*loops, statement.axis))
