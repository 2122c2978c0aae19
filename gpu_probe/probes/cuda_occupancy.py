"""Occupancy sweep: how many warps a multiprocessor needs to keep the memory busy."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping

from gpu_probe.cuda.code import AtLeast, NoneOf
from gpu_probe.cuda.draw import plot_over
from gpu_probe.cuda.gpu import Gpu
from gpu_probe.cuda.measure import CudaProgram, program
from gpu_probe.cuda.template import Template, check_range
from gpu_probe.probe import Probe, Target, Unsupported
from gpu_probe.property_map import Property
from gpu_probe.samples import Point, Reading, Samples


@dataclasses.dataclass(frozen=True)
class Stream(Template):
    """Threads read 16 bytes at a time, so many at once, from an array that no cache holds.

    Attributes:
      loads: that a thread has under way.
    """

    NAME = "probe_occupancy_loads$loads"
    TEXT = """
// Shared memory that each block asks for and does not use limits how many are resident.
extern "C" __global__ void $name(const uint4* x, u32* out, u32 rounds) {
  const u64 threads = (u64)gridDim.x * blockDim.x;
  const u64 id = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  u32 sum = 0;
#pragma unroll 1
  for (u32 i = 0; i < rounds; ++i) {
    uint4 v[$loads];
#pragma unroll
    for (u32 j = 0; j < $loads; ++j)
      asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w)
                   : "l"(x + ((u64)i * $loads + j) * threads + id)
                   : "memory");
    // what is needed at once keeps the next round from starting before this one has arrived
#pragma unroll
    for (u32 j = 0; j < $loads; ++j)
      asm volatile("xor.b32 %0, %0, %1;" : "+r"(sum) : "r"(v[j].x ^ v[j].y ^ v[j].z ^ v[j].w));
  }
  out[id] = sum;
}
"""
    CHECKS = (AtLeast("global load", "loads"), NoneOf("spill"))

    loads: int = 1

    def __post_init__(self) -> None:
        check_range(self, "loads", 1, 8)


NAME = "cuda_occupancy"
_BLOCK = 128
_WARPS = _BLOCK // 32
#: What is read: more than any cache holds.
_BYTES = 1 << 30
#: A bandwidth this near to the best is as good as it.
_SATURATED = 0.95


def points(quick: bool) -> list[Point]:
    """Blocks of four warps on a multiprocessor, with one and with four loads under way in each thread."""
    blocks = (1, 2, 4, 8, 16) if quick else (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
    return [{"warps": _WARPS * n, "loads": loads} for loads in (1, 4) for n in blocks]


def generate(point: Point, target: Target) -> CudaProgram:
    """So many resident warps."""
    warps, stream = int(point["warps"]), Stream(int(point["loads"]))

    def measure(gpu: Gpu) -> Reading:
        blocks = warps // _WARPS
        spoiler = spoiler_bytes(gpu.facts, blocks)
        resident = gpu.resident_blocks(stream, _BLOCK, spoiler)
        if resident != blocks:
            raise Unsupported(
                f"{blocks} blocks a multiprocessor cannot be arranged on this GPU: {spoiler} bytes of shared memory a "
                f"block leave room for {resident}"
            )
        grid = blocks * gpu.facts["sm_count"]
        rounds = max(1, _BYTES // (16 * stream.loads * grid * _BLOCK))
        x, out = gpu.random(16 * stream.loads * rounds * grid * _BLOCK), gpu.allocate(4 * grid * _BLOCK)
        seconds = gpu.seconds(lambda: gpu.launch(stream, grid, _BLOCK, (x, out, rounds), spoiler))
        return Reading(16 * stream.loads * rounds * grid * _BLOCK / seconds, gpu.clock_hz())

    return program(target, measure, stream)


def spoiler_bytes(facts: Mapping[str, int], blocks: int) -> int:
    """Shared memory that each block asks for so that a multiprocessor holds that many blocks and no more.

    Each block also takes what the system reserves, and memory is given out in pieces of 1 KiB.
    """
    share = facts["smem_per_sm_bytes"] // blocks // 1024 * 1024 - facts["smem_reserved_bytes"]
    return min(share, facts["smem_per_block_bytes"])


def analyze(samples: Samples) -> Mapping[str, Property]:
    """Fewest warps, with one load under way in each thread, that reach the best bandwidth within a twentieth."""
    by = {warps: statistics.median(values) for warps, values in samples.of(NAME, loads=1).by("warps").items()}
    if len(by) < 3:
        return {}
    enough = [warps for warps, rate in by.items() if rate >= _SATURATED * max(by.values())]
    lower = [warps for warps in by if warps < enough[0]]
    method = (
        f"fewest warps that reach {_SATURATED} of the best bandwidth, one load of 16 bytes under way in each thread"
    )
    interval = (float(lower[-1]) if lower else float(enough[0]), float(enough[0]))
    return {"occupancy.saturation_warps": Property(enough[0], "count", "measured", method, interval, (NAME,))}


PROBE = Probe(
    name=NAME,
    kind="cuda",
    measures="bytes read from DRAM a second with so many warps on each multiprocessor",
    unit="B/s",
    parameters={"warps": "resident on a multiprocessor", "loads": "of 16 bytes that each thread has under way"},
    expected="grows in proportion to warps * loads while latency bounds it (Little's law: latency times bandwidth is "
    "what must be under way), then stays at the bandwidth of DRAM; with four loads a quarter of the warps is enough",
    caveats=(
        "what limits the warps is shared memory that is asked for and not used, which also takes room from the L1",
        "a GPU that cannot hold a number of blocks says so and has no value there",
    ),
    points=points,
    generate=generate,
    analyze=analyze,
    properties=("occupancy.saturation_warps",),
    plot=plot_over("warps", "bandwidth by warps", "B/s", series="loads"),
)
