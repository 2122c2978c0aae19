"""What Mosaic GPU writes about the kernels it compiles, read back: the ptxas report, the PTX and the launch."""

from __future__ import annotations

import collections
import dataclasses
import re
from pathlib import Path

#: Instructions of the tensor cores: Hopper's, Ampere's (which Hopper runs too) and Blackwell's.
_TENSOR_CORE = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*")


@dataclasses.dataclass(frozen=True)
class MosaicKernel:
    """What one Mosaic GPU kernel needs of a multiprocessor.

    Attributes:
      name: of the kernel's function.
      launches: places in the program that launch it.
      registers: of a thread.
      spill_store_bytes, spill_load_bytes: of a thread, to memory, because registers did not suffice.
      stack_bytes: of a thread.
      smem_bytes: shared memory of a block, static and dynamic.
      threads: of a block.
      tensor_core: (instruction, places in the PTX that issue it), as ``("wgmma.mma_async. ... .m64n128k16...", 4)``.
      warnings: what ptxas remarks on its speed.
    """

    name: str
    launches: int
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    smem_bytes: int
    threads: int
    tensor_core: tuple[tuple[str, int], ...]
    warnings: tuple[str, ...] = ()

    @property
    def spill_bytes(self) -> int:
        """Stores and loads."""
        return self.spill_store_bytes + self.spill_load_bytes

    @property
    def wgmma(self) -> int:
        """Places in the PTX that issue a Hopper warpgroup product."""
        return sum(n for name, n in self.tensor_core if name.startswith("wgmma"))


def read_dump(folder: Path) -> list[MosaicKernel]:
    """The kernels described in a dump folder; those of one name in the order in which they were compiled.

    Who launches them is not known here: `MosaicKernel.launches` is 0.

    Raises:
      ValueError: a file is not as expected; the message names it and shows its text.
    """

    def name_and_number(path: Path) -> tuple[str, int]:
        name, _, number = path.stem.rpartition("_")
        return name, int(number)

    return [_kernel(name_and_number(path)[0], path) for path in sorted(folder.glob("*.ptxas"), key=name_and_number)]


def _kernel(name: str, report: Path) -> MosaicKernel:
    text, ptx = report.read_text(), report.with_suffix(".ptx").read_text()
    launch = report.with_suffix(".mlir-passes.log").read_text()
    used = _search(report, r"[Uu]sed (\d+) registers(?:.*?(\d+) bytes smem)?", text)
    stack = _search(report, r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    counts = collections.Counter(_TENSOR_CORE.findall(ptx))
    return MosaicKernel(
        name=name,
        launches=0,
        registers=int(used[1]),
        spill_store_bytes=int(stack[2]),
        spill_load_bytes=int(stack[3]),
        stack_bytes=int(stack[1]),
        smem_bytes=int(used[2] or 0) + _dynamic_smem_bytes(report, launch),
        threads=int(_search(report, r"\.maxntid\s+(\d+)", ptx)[1]),
        tensor_core=tuple(sorted(counts.items())),
        warnings=tuple(dict.fromkeys(re.findall(r"Potential Performance Loss: (.*\S)", text))),
    )


def _dynamic_smem_bytes(report: Path, launch: str) -> int:
    """The dynamic shared memory that the host asks for, from Mosaic's program up to the launch."""
    found = re.search(r"dynamic_shared_memory_size (%[\w.]+)", launch)
    if found is None:
        return 0
    return int(_search(report, rf"{re.escape(found[1])} = arith\.constant (\d+)", launch)[1])


def _search(report: Path, pattern: str, text: str) -> re.Match[str]:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"{report.name}: expected {pattern!r} in what Mosaic GPU wrote, found:\n{text[:2000]}")
    return found
