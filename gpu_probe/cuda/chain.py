"""Random chains of pointers through device memory, for chases."""

from __future__ import annotations

import dataclasses

import numpy as np

from gpu_probe.cuda.gpu import Address, Gpu, Memory
from gpu_probe.cuda.template import Template, check_range

#: One pointer in each so many bytes: what one miss brings.
LINE_BYTES = 128


@dataclasses.dataclass(frozen=True)
class Walk(Template):
    """Many threads, one a block, walk different parts of a chain at once: the caches hold it afterwards.

    Attributes:
      unroll: loads in a round.
    """

    NAME = "probe_walk"
    TEXT = """
// Block k follows `loads` pointers from starts[k]. out: where it ended.
extern "C" __global__ void $name(const u64* starts, u64* out, u32 loads) {
  u64 p = starts[blockIdx.x];
#pragma unroll $unroll
  for (u32 i = 0; i < loads; ++i) asm volatile("ld.global.cg.u64 %0, [%0];" : "+l"(p) : : "memory");
  out[blockIdx.x] = p;
}
"""

    unroll: int = 4

    def __post_init__(self) -> None:
        check_range(self, "unroll", 1, 64)


def random_cycle(lines: int, seed: int = 0) -> np.ndarray:
    """The lines in the order of a chain that visits each once: a random one of all full cycles."""
    return np.random.default_rng(seed).permutation(lines)


def pointers(order: np.ndarray, base: int) -> np.ndarray:
    """The memory that holds the chain: the first word of each line is the address of the next line in `order`."""
    words = np.zeros((len(order), LINE_BYTES // 8), np.uint64)
    words[order, 0] = np.uint64(base) + np.roll(order, -1).astype(np.uint64) * np.uint64(LINE_BYTES)
    return words.reshape(-1)


class Chain:
    """A chain on the device.

    Attributes:
      start: where it begins; the chase comes back there after all lines.
      lines: how many it has.
    """

    def __init__(self, gpu: Gpu, footprint_bytes: int, timed_loads: int):
        self.lines = footprint_bytes // LINE_BYTES
        order = random_cycle(self.lines)
        self._memory: Memory = gpu.allocate(footprint_bytes)
        gpu.write(self._memory, pointers(order, self._memory.address))
        self.start = Address(self._memory.address + int(order[0]) * LINE_BYTES)
        # What is timed is at most a quarter of the first walker's part, and the oldest quarter: where the chain is
        # larger than the cache, these are the lines that it no longer holds.
        self._walkers = max(1, self.lines // (4 * timed_loads))
        self._part = -(-self.lines // self._walkers)
        starts = self._memory.address + order[:: self._part].astype(np.uint64) * np.uint64(LINE_BYTES)
        self._starts = gpu.allocate(8 * len(starts))
        self._ends = gpu.allocate(8 * len(starts))
        gpu.write(self._starts, starts.astype(np.uint64))
        self._walkers = len(starts)

    def warm(self, gpu: Gpu) -> None:
        """Walks through all of it, so that the L2 holds what it can."""
        gpu.launch(Walk(), self._walkers, 1, (self._starts, self._ends, self._part))
