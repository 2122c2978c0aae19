"""`CompileReport`: what a program compiles to, as values, text and JSON; and two of them side by side."""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

from pallas_kernels.aot.hlo import KernelLaunch
from pallas_kernels.aot.resources import MosaicKernel


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """What XLA and Mosaic GPU make of a program for one GPU.

    Attributes:
      name: of the program.
      target: the GPU, one of `targets`.
      kernels: the places that launch a kernel, in the order of XLA's schedule. What stands in a loop is there once.
      mosaic: what each distinct Mosaic GPU kernel needs, in the order in which they were compiled.
      temporaries_bytes: memory that the program needs beside its arguments and results.
      arguments_bytes, results_bytes: the memory of those; several results have a table of their addresses.
      jax: the release that compiled.
    """

    name: str
    target: str
    kernels: tuple[KernelLaunch, ...]
    mosaic: tuple[MosaicKernel, ...]
    temporaries_bytes: int
    arguments_bytes: int
    results_bytes: int
    jax: str = ""

    @property
    def count(self) -> int:
        """Number of kernels; a loop's are counted once."""
        return len(self.kernels)

    @property
    def counts(self) -> dict[str, int]:
        """Number of kernels of each kind, see `KernelLaunch.kind`."""
        return dict(sorted(collections.Counter(k.kind for k in self.kernels).items()))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the kernels."""
        return tuple(k.name for k in self.kernels)

    @property
    def bytes_moved(self) -> int:
        """Bytes that the kernels read and write: the sum over them of whole operands and results."""
        return sum(k.bytes_moved for k in self.kernels)

    @property
    def spill_bytes(self) -> int:
        """Bytes that threads of the Mosaic kernels spill."""
        return sum(k.spill_bytes for k in self.mosaic)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        data = dataclasses.asdict(self)
        data["mosaic"] = [{**m, "tensor_core": dict(m["tensor_core"])} for m in data["mosaic"]]
        return {**data, "count": self.count, "counts": self.counts, "bytes_moved": self.bytes_moved}

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def beside(self, other: CompileReport) -> Comparison:
        """This report and another, as that of the unfused program, in one table."""
        return Comparison((self, other))

    def __str__(self) -> str:
        facts = (
            _plural(self.count, "kernel"),
            f"{bytes_text(self.temporaries_bytes)} of temporaries",
            f"{bytes_text(self.bytes_moved)} moved between kernels",
        )
        lines = [f"{self.name} for {self.target}: {', '.join(facts)}"]
        if self.kernels:
            lines += _table(("kernel", "kind", "reads", "writes", ""), [_row(k) for k in self.kernels], left=(0, 1, 4))
        if self.mosaic:
            heads = ("Mosaic kernel", "launches", "threads", "registers", "spilled", "shared memory", "tensor core")
            lines += _table(heads, [_resources(m) for m in self.mosaic], left=(0, 6))
        warnings = dict.fromkeys(f"{m.name}: {text}" for m in self.mosaic for text in m.warnings)
        return "\n".join([*lines, *warnings])


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Reports of several programs that compute the same.

    Attributes:
      reports: in the order of the columns.
    """

    reports: tuple[CompileReport, ...]

    def beside(self, other: CompileReport) -> Comparison:
        """One column more."""
        return Comparison((*self.reports, other))

    def to_dict(self) -> dict[str, Any]:
        """The reports, as plain data."""
        return {"reports": [r.to_dict() for r in self.reports]}

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        reports = self.reports
        kinds = sorted({kind for r in reports for kind in r.counts})
        rows = [("kernels", *(str(r.count) for r in reports))]
        rows += [(f"  {kind}", *(str(r.counts.get(kind, 0)) for r in reports)) for kind in kinds]
        rows.append(("temporaries", *(bytes_text(r.temporaries_bytes) for r in reports)))
        rows.append(("moved between kernels", *(bytes_text(r.bytes_moved) for r in reports)))
        rows.append(("spilled by Mosaic kernels", *(bytes_text(r.spill_bytes) for r in reports)))
        targets = dict.fromkeys(r.target for r in reports)
        return "\n".join(_table((f"for {', '.join(targets)}", *(r.name for r in reports)), rows, left=(0,)))


def bytes_text(count: int) -> str:
    """`count` bytes in the largest decimal unit that keeps it at 1 or above."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _resources(m: MosaicKernel) -> tuple[str, ...]:
    instructions = ", ".join(f"{n} {_short(name)}" for name, n in m.tensor_core) or "none"
    numbers = (m.launches, m.threads, m.registers)
    return (m.name, *map(str, numbers), bytes_text(m.spill_bytes), bytes_text(m.smem_bytes), instructions)


def _row(k: KernelLaunch) -> tuple[str, ...]:
    place = f"in {', '.join(k.inside)}" if k.inside else ""
    return (k.name, k.kind, bytes_text(k.bytes_read), bytes_text(k.bytes_written), place)


def _short(instruction: str) -> str:
    """Family and shape: ``wgmma m64n128k16``."""
    shape = re.search(r"m\d+n\d+k\d+", instruction)
    return " ".join([instruction.partition(".")[0], *([shape[0]] if shape else [])])


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Lines of a table with aligned columns; those in `left` are aligned to the left, the others to the right."""
    widths = [max(len(row[k]) for row in (heads, *rows)) for k in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        parts = (c.ljust(w) if k in left else c.rjust(w) for k, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return "  ".join(parts).rstrip()

    return ["", line(heads), line(["-" * w for w in widths]), *map(line, rows)]
