"""Exact counts: bytes between memory and chip, bytes touched on chip, operations.

Nothing is sampled or simulated: how often a statement runs, and on blocks of which size, has a closed form, but for
skipped blocks, whose predicate is evaluated (`mcir.visibility`). `mcir.attention`'s forward moves
``2 N d + 2 N d ceil(N / B)`` elements a head (Dao et al., "FlashAttention", 2022).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from mcir.interpret import walk
from mcir.ir import Axis, Compute, Load, OnlineReduction, Program, Store, Stream, Tile, Type, Update
from mcir.visibility import visited


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes read and written."""

    read: int = 0
    written: int = 0

    @property
    def total(self) -> int:
        return self.read + self.written

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.read + other.read, self.written + other.written)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What a program moves and computes.

    Attributes:
      dram: bytes between memory and chip. ``+=`` reads and writes.
      chip: bytes that operations read and write on chip.
      buffers: the part of `dram` of each buffer, in the program's order.
      compulsory: bytes of all inputs and outputs, moved once: what no program of this computation can go below.
      flops: two for each product that a dot adds up, one for each element of a pointwise result, of what a reduction
        takes in, and of state that is corrected.
      steps: how many times the body of an innermost loop runs.
    """

    dram: Bytes
    chip: Bytes
    buffers: tuple[tuple[str, Bytes], ...]
    compulsory: Bytes
    flops: int
    steps: int

    @property
    def bytes_read(self) -> dict[str, int]:
        """Bytes read, by memory level."""
        return {"dram": self.dram.read, "chip": self.chip.read}

    @property
    def bytes_written(self) -> dict[str, int]:
        """Bytes written, by memory level."""
        return {"dram": self.dram.written, "chip": self.chip.written}

    @property
    def intensity(self) -> float:
        """Operations for each byte of dram traffic."""
        return self.flops / self.dram.total if self.dram.total else math.inf

    def __str__(self) -> str:
        rows = [*self.buffers, ("dram", self.dram), ("compulsory", self.compulsory), ("chip", self.chip)]
        width = max(len(name) for name, _ in rows)
        lines = [f"{'':{width}}  {'bytes read':>18}  {'bytes written':>18}"]
        lines += [f"{name:{width}}  {b.read:>18,}  {b.written:>18,}" for name, b in rows]
        return "\n".join([*lines, f"{self.flops:,} flops, {self.intensity:.4g} flops per byte of dram"])


def traffic(program: Program) -> Traffic:
    """Counts a program. Blocks that a stream skips are not counted, whatever its rows hold.

    Loads count where they stand: once for every round of all loops around them, also where the block is the same.
    """
    buffers = dict.fromkeys((b.name for b in program.buffers), Bytes())
    chip, flops = Bytes(), 0
    words = words_of(program)
    runs = list(placed(program))
    for run in runs:
        if isinstance(run.statement, Load | Store):
            buffers[run.statement.buffer] += moved(program, run, words)
        chip, flops = chip + touched(program, run), flops + flops_of(program, run)
    inputs, outputs = (
        sum(_buffer_bytes(program, b.name, words) for b in program.role(role)) for role in ("input", "output")
    )
    dram = sum(buffers.values(), Bytes())
    steps = sum(run.elements(program, ()) for run in runs if isinstance(run.statement, Stream | Tile))
    return Traffic(dram, chip, tuple(buffers.items()), Bytes(inputs, outputs), flops, steps)


# -- how often statements run ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """A statement at its place: in these loops of this nest, in these streams that skip blocks."""

    statement: Any
    nest: Tile
    loops: tuple[str, ...]
    skipping: tuple[Stream, ...]
    types: dict[str, Type]
    declarations: dict[str, OnlineReduction]

    def elements(self, program: Program, axes: Iterable[str]) -> int:
        """Elements of blocks with these axes, over all rounds of the loops."""
        axes = set(axes)
        masks = [visited(program, stream) for stream in self.skipping]
        weighed = [a for a in self.loops if any(a in names for names, _ in masks)]
        others = {*axes, *self.loops} - {*weighed}
        total = math.prod(program.axis(a).size if a in axes else program.axis(a).count for a in others)
        if not weighed:
            return total
        mask = np.ones([1] * len(weighed), bool)
        for names, blocks in masks:
            outside = tuple(i for i, a in enumerate(names) if a not in self.loops)
            kept = [a for a in names if a in self.loops]
            order = [kept.index(a) for a in weighed if a in kept]
            blocks = np.transpose(blocks.any(axis=outside), order)
            mask = mask & blocks.reshape([program.axis(a).count if a in kept else 1 for a in weighed])
        count: Any = mask.astype(np.int64)
        for a in weighed:  # the leading axis, one after the other
            count = np.tensordot(_extents(program.axis(a), a in axes), count, 1)
        return total * int(count)


def placed(program: Program) -> Iterator[Run]:
    """All statements at their places. Of streams and nests, those that are innermost, standing for their bodies."""
    for nest in program.nests:
        types: dict[str, Type] = {}
        declarations: dict[str, OnlineReduction] = {}
        for s in walk(nest.body):
            if isinstance(s, Load | Compute):
                types[s.result] = s.type
            elif isinstance(s, OnlineReduction):
                types.update(dict.fromkeys(s.results, s.type))
                declarations.update(dict.fromkeys(s.results, s))
        place = Run(nest, nest, nest.axes, (), types, declarations)
        yield from _placed(nest, place)


def _placed(loop: Tile | Stream, place: Run) -> Iterator[Run]:
    if not any(isinstance(s, Stream) for s in loop.body):
        yield dataclasses.replace(place, statement=loop)
    for s in loop.body:
        if isinstance(s, Stream):
            skipping = (*place.skipping, s) if s.skip is not None else place.skipping
            yield from _placed(s, dataclasses.replace(place, loops=(*place.loops, s.axis), skipping=skipping))
        else:
            yield dataclasses.replace(place, statement=s)


def _extents(axis: Axis, elements: bool) -> np.ndarray:
    """The size of each block, or 1 for each."""
    out = np.full(axis.count, axis.block if elements else 1, np.int64)
    if elements and axis.ragged:
        out[-1] = axis.size % axis.block
    return out


# -- what a statement moves and computes -------------------------------------------------------------------------------


def words_of(program: Program) -> dict[str, int]:
    """The elements of a buffer without axes: two where it is the key of random bits."""
    keys = {name for _, s in program.statements() if isinstance(s, Compute) and s.op == "bits" for name in s.args}
    loads = [s for _, s in program.statements() if isinstance(s, Load)]
    return {s.buffer: 2 for s in loads if s.result in keys and not s.type.axes}


def moved(program: Program, run: Run, words: dict[str, int]) -> Bytes:
    """Dram bytes of all runs of a load or store."""
    s = run.statement
    type = program.buffer(s.buffer).type
    count = run.elements(program, type.axes) * jnp.dtype(type.dtype).itemsize * words.get(s.buffer, 1)
    reads = isinstance(s, Load) or s.accumulate
    return Bytes(count if reads else 0, 0 if isinstance(s, Load) else count)


def _buffer_bytes(program: Program, name: str, words: dict[str, int]) -> int:
    type = program.buffer(name).type
    size = math.prod(program.axis(a).size for a in type.axes)
    return size * jnp.dtype(type.dtype).itemsize * words.get(name, 1)


def flops_of(program: Program, run: Run) -> int:
    """Operations of all runs of a statement."""
    s = run.statement
    if isinstance(s, Update):
        axes = {a for name in s.args for a in run.types[name].axes}
        corrected = run.declarations[s.results[0]].corrected_by is not None
        state = run.elements(program, run.types[s.results[0]].axes) if corrected else 0
        return len(s.args) * run.elements(program, axes) + state
    if not isinstance(s, Compute) or s.op in ("constant", "iota"):
        return 0
    axes = {*s.type.axes, *(a for name in s.args for a in run.types[name].axes)}
    return run.elements(program, axes) * (2 if s.op == "dot" else 1)


def touched(program: Program, run: Run) -> Bytes:
    """Chip bytes of all runs of a statement."""
    s = run.statement

    def size(names: Iterable[str]) -> int:
        types = [run.types[name] for name in names]
        return sum(run.elements(program, t.axes) * jnp.dtype(t.dtype).itemsize for t in types)

    if isinstance(s, Update):
        return Bytes(size((*s.args, *s.results)), size(s.results))
    if not isinstance(s, Compute) or s.op in ("constant", "iota"):
        return Bytes()
    return Bytes(size(s.args), size((s.result,)))
