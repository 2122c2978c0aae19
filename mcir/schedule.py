"""Chooses tile sizes: the least modelled traffic among what fits on chip."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpu_probe.property_map import PropertyMap
from mcir._compat import rows_of_products
from mcir.errors import MCIRError
from mcir.ir import Compute, Load, OnlineReduction, Program, Store, Stream, Tile, Update
from mcir.lifetime import lifetimes, live_bytes, peak_bytes
from mcir.text import print_statement
from mcir.traffic import flops_of, moved, placed, words_of

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
#: Choices to compare at most; beyond, every second size is left out.
_CHOICES = 4096


class ScheduleError(MCIRError):
    """No tile sizes fit the hardware; the message names what does not fit."""


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What `schedule` needs to know of the hardware.

    Attributes:
      name: for messages.
      cache_bytes: what fits on chip: the cache that tiles should stay in, or the shared memory of a block.
      step_bytes: the memory traffic that takes as long as starting one round of a loop. Without it the model would take
        the smallest blocks in streams, which move nothing more and leave room for larger tiles.
      flops_per_byte: operations in the time of a byte of memory traffic. It counts where blocks are skipped: large
        tiles skip less. None: operations cost nothing.
      smallest: tiles are no smaller than this along axes that contractions go over, where an axis is that long.
      smallest_rows: the same for the axes of nests, which are the rows of products in streams; `smallest` where larger.
      used: names of the properties that the numbers come from, where they come from a map; not part of equality.
      missing: names of the properties that the map lacks, for which the numbers are assumed; not part of equality.
    """

    name: str
    cache_bytes: int
    step_bytes: int = 0
    flops_per_byte: float | None = None
    smallest: int = 16
    smallest_rows: int = 0
    used: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    missing: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @classmethod
    def host(cls, folder: Path = _CACHES) -> Hardware:
        """This CPU: its last cache, the part of it that falls to the cores this process may use.

        Read from ``/sys/devices/system/cpu/cpu0/cache``. Where there is no such thing (not Linux, some containers),
        4 MiB: less than the last cache of any machine of the last ten years has for two cores. A round of an XLA loop
        takes some ten microseconds to start on a CPU, time for about 64 KiB; two cores do some 90 GFLOP/s (float32)
        beside some 10 GB/s. XLA runs small products on one core: of fewer than 512 rows or, by release
        (`_compat.rows_of_products`) and layout, of less than about 256 x 128 x 64 in eight batches.
        """
        rows = rows_of_products()
        found = []
        for index in sorted(folder.glob("index*")):
            try:
                level, kind, size = (_line(index / n) for n in ("level", "type", "size"))
                sharing = _count(_line(index / "shared_cpu_list"))
            except (OSError, ValueError):
                continue
            if kind != "Instruction":
                found.append((int(level), _bytes(size), sharing))
        if not found:
            return cls("host (cache sizes unknown)", 4 * 2**20, 2**16, 8.0, 256, rows)
        level, size, sharing = max(found)
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(f"host (L{level} cache)", size * min(usable, sharing) // sharing, 2**16, 8.0, 256, rows)

    @classmethod
    def from_properties(cls, properties: Mapping[str, Any]) -> Hardware:
        """A described GPU: ``shared_memory_per_block_bytes``, optionally ``name``, ``step_bytes``, ``flops_per_byte``.

        Raises KeyError naming the property where the first is missing.
        """
        key = "shared_memory_per_block_bytes"
        if key not in properties:
            raise KeyError(f"Hardware.from_properties: expected {key}, found {', '.join(sorted(properties))}")
        # A step of a block costs about a microsecond's wait at a barrier, when one of 132 shares 3 TB/s.
        step = int(properties.get("step_bytes", 2**14))
        balance = properties.get("flops_per_byte")
        name = str(properties.get("name", "described device"))
        return cls(name, int(properties[key]), step, None if balance is None else float(balance))

    @classmethod
    def from_map(cls, properties: PropertyMap, default: Hardware | None = None) -> Hardware:
        """The machine of a property map.

        On chip is the last cache that a CPU's map has, or the shared memory of a GPU's block. `step_bytes` is what
        memory moves in a round's time, ``launch.loop_step * bandwidth`` (a CPU's; of a GPU's no property tells), and
        `flops_per_byte` the rate of float32 products over the bandwidth. What the map lacks is `default`'s (of a CPU
        the host's), and is named in `missing`; what no property tells, such as `smallest`, is `default`'s too.
        """
        is_cpu = properties.kind == "cpu"
        if default is None:
            default = cls.host() if is_cpu else cls("described device", 48 * 2**10, 2**14)
        read = _Reader(properties)
        cache = read("B", *(("l3.size", "l2.size", "l1.size") if is_cpu else ("smem.max_per_block",)))
        bandwidth = read("B/s", *BANDWIDTHS)
        rounds = read("s", "launch.loop_step") if is_cpu else None
        rate = read("FLOP/s", *RATES) if bandwidth else None
        return cls(
            properties.name,
            default.cache_bytes if cache is None else int(cache),
            default.step_bytes if rounds is None or bandwidth is None else round(rounds * bandwidth),
            default.flops_per_byte if rate is None or bandwidth is None else rate / bandwidth,
            default.smallest,
            default.smallest_rows,
            tuple(read.used),
            tuple(read.missing),
        )


#: What tells memory bandwidth and the rate of float32 products, best first.
BANDWIDTHS = ("dram.bw_copy", "dram.bw_read", "dram.bw")
RATES = ("gemm.float32", "tensor.tensorfloat32", "vector.float32")


class _Reader:
    """Reads a map and remembers which properties there were, and which there were not."""

    def __init__(self, properties: PropertyMap):
        self.properties, self.used, self.missing = properties, [], []

    def __call__(self, unit: str, *names: str) -> float | None:
        """The first of these properties; a 0, which nothing can be divided by, counts as missing."""
        found = self.properties.first(names, unit)
        if found is None or not found[1]:
            self.missing.append(" or ".join(names))
            return None
        self.used.append(found[0])
        return found[1]


def schedule(
    program: Program, hardware: Hardware | None = None, given: Mapping[str, int] = MappingProxyType({})
) -> Program:
    """The program with the tile sizes that move the fewest bytes and fit.

    Minimizes dram bytes plus `step_bytes` for each round of an innermost loop and, where blocks are skipped, ``flops /
    flops_per_byte``, subject to ``peak_bytes(program) <= cache_bytes``. Tile sizes are powers of two and whole axes,
    from `Hardware.smallest` on; from 1 on along batch axes. Of equals, those with larger blocks of the nests' axes,
    then of the streams'. Axes without a loop stay whole. Deterministic; the sizes are remembered.

    Args:
      program: any program that verifies; its own tile sizes do not matter.
      hardware: `Hardware.host()` by default.
      given: tile sizes of axes that are not chosen for, such as whole ones whose arrays are sharded.

    Raises ScheduleError where not even the smallest tiles fit.
    """
    return program.with_blocks(**dict(_blocks(program, hardware or Hardware.host(), tuple(sorted(given.items())))))


@functools.lru_cache(maxsize=128)
def _blocks(program: Program, hardware: Hardware, given: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    known = dict(given)
    looped = [a for a in program.axes if a.name not in known and any(a.name in ls for ls, _ in _loops(program))]
    names = [a.name for a in looped]
    program = program.with_blocks(
        **{a.name: known.get(a.name, max(1, a.size)) for a in program.axes if a.name not in names}
    )
    batch = batch_axes(program)
    nests = {axis for nest in program.nests for axis in nest.axes}
    least = {a: max(hardware.smallest, hardware.smallest_rows if a in nests - _streamed(program) else 0) for a in names}
    sizes = _thinned([_sizes(a.size, 1 if a.name in batch else least[a.name]) for a in looped])
    smallest = program.with_blocks(**{name: s[0] for name, s in zip(names, sizes, strict=True)})
    if peak_bytes(smallest) > hardware.cache_bytes:
        raise ScheduleError(_refusal(smallest, names, hardware))
    words = words_of(program)

    def rank(blocks: tuple[int, ...]) -> tuple[Any, ...]:
        candidate = program.with_blocks(**dict(zip(names, blocks, strict=True)))
        cost = 0.0
        for run in placed(candidate):
            if isinstance(run.statement, Load | Store):
                cost += moved(candidate, run, words).total
            elif isinstance(run.statement, Stream | Tile):
                cost += hardware.step_bytes * run.elements(candidate, ())
            elif run.skipping and hardware.flops_per_byte:
                cost += flops_of(candidate, run) / hardware.flops_per_byte
        tiled = math.prod(b for name, b in zip(names, blocks, strict=True) if name in nests)
        return cost, -tiled, -math.prod(blocks), *(-b for b in blocks)

    for blocks in sorted(itertools.product(*sizes), key=rank):
        candidate = program.with_blocks(**dict(zip(names, blocks, strict=True)))
        if peak_bytes(candidate) <= hardware.cache_bytes:
            return tuple((a.name, a.block) for a in candidate.axes)
    raise AssertionError("the smallest tiles fit")


def batch_axes(program: Program) -> set[str]:
    """Loop axes that nothing reduces and that both operands of every contraction have, if one has."""
    out = {axis for loops, _ in _loops(program) for axis in loops}
    types: dict[str, tuple[str, ...]] = {}
    for _, s in program.statements():
        if isinstance(s, Load):
            types[s.result] = s.type.axes
        elif isinstance(s, OnlineReduction):
            types.update(dict.fromkeys(s.results, s.type.axes))
            out -= set(s.over)
        elif isinstance(s, Compute):
            types[s.result] = s.type.axes
            out -= set(s.param("over", ()))
        if isinstance(s, Update) or (isinstance(s, Compute) and s.op == "dot"):
            used = [set(types[name]) for name in s.args]
            out -= set.union(*used) - set.intersection(*used)
    return out


def _loops(program: Program) -> Iterable[tuple[tuple[str, ...], Any]]:
    for nest in program.nests:
        yield nest.axes, nest
    for _, s in program.statements():
        if isinstance(s, Stream):
            yield (s.axis,), s


def _streamed(program: Program) -> set[str]:
    return {s.axis for _, s in program.statements() if isinstance(s, Stream)}


def _sizes(size: int, smallest: int) -> list[int]:
    """Powers of two and the whole, in order."""
    powers = [2**n for n in range(max(1, size).bit_length()) if smallest <= 2**n < size]
    return [*powers, max(1, size)]


def _thinned(sizes: list[list[int]]) -> list[list[int]]:
    """So that there are not too many choices; the smallest and the largest stay."""
    while math.prod(map(len, sizes)) > _CHOICES:
        longest = max(range(len(sizes)), key=lambda i: len(sizes[i]))
        if len(sizes[longest]) <= 2:
            break
        s = sizes[longest]
        sizes[longest] = sorted({s[0], *s[::-2]})
    return sizes


def _refusal(program: Program, names: list[str], hardware: Hardware) -> str:
    found = lifetimes(program)
    live = live_bytes(found)
    number = live.index(max(live))
    largest = max((v for v in found if v.first <= number <= v.last), key=lambda v: v.bytes)
    monoids = {name: s.monoid for _, s in program.statements() if isinstance(s, OnlineReduction) for name in s.results}
    line = print_statement([s for _, s in program.statements()][number], monoids)
    blocks = ", ".join(f"{name} = {program.axis(name).block}" for name in names)
    return (
        f"schedule({program.name}): expected at most {hardware.cache_bytes:,} bytes on chip of {hardware.name}, found "
        f"{max(live):,} with the smallest tiles ({blocks}), at statement {number}, `{line}`; the largest value there "
        f"is {largest.name}, {largest.bytes:,} bytes"
    )


def _line(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()


def _bytes(text: str) -> int:
    """``32K`` and the like."""
    unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:].upper(), 1)
    return int(text.rstrip("KkMmGg")) * unit


def _count(cpus: str) -> int:
    """How many are in a list such as ``0-3,8``."""
    return sum(int(p[-1]) - int(p[0]) + 1 for p in (part.split("-") for part in cpus.split(",")))
