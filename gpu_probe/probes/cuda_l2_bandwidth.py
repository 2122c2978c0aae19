"""L2 bandwidth: all multiprocessors read the same array again and again, past their L1."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping

from gpu_probe.cuda.code import AtLeast, NoneOf
from gpu_probe.cuda.draw import plot_over
from gpu_probe.cuda.gpu import Gpu
from gpu_probe.cuda.measure import CudaProgram, program, whole_waves
from gpu_probe.cuda.template import Template, check_range
from gpu_probe.probe import Probe, Target, Unsupported
from gpu_probe.property_map import Property
from gpu_probe.samples import Point, Reading, Samples
from gpu_probe.statistics import measured


@dataclasses.dataclass(frozen=True)
class ReadAgain(Template):
    """All threads together walk through an array and start again at its end.

    Attributes:
      unroll: loads that a thread has under way.
    """

    NAME = "probe_l2_read"
    TEXT = """
// `elements` is at least the number of threads; each thread reads $unroll * rounds of them.
extern "C" __global__ void $name(const uint4* x, u32* out, u32 elements, u32 rounds) {
  const u32 threads = gridDim.x * blockDim.x;
  const u32 id = blockIdx.x * blockDim.x + threadIdx.x;
  u32 at = id, sum = 0;
#pragma unroll 1
  for (u32 i = 0; i < rounds; ++i) {
    uint4 v[$unroll];
#pragma unroll
    for (u32 j = 0; j < $unroll; ++j) {
      asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w)
                   : "l"(x + at)
                   : "memory");
      at += threads;
      if (at >= elements) at -= elements;
    }
#pragma unroll
    for (u32 j = 0; j < $unroll; ++j) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  out[id] = sum;
}
"""
    CHECKS = (AtLeast("global load", "unroll"), NoneOf("spill"))

    unroll: int = 8

    def __post_init__(self) -> None:
        check_range(self, "unroll", 1, 16)


NAME = "cuda_l2_bandwidth"
READ = ReadAgain()
_BLOCK = 512
#: What is read in all: long enough that a launch does not count.
_TOTAL_BYTES = 4 << 30
#: Sizes whose rate is this near to the best are on its plateau.
_PLATEAU = 0.9


def points(quick: bool) -> list[Point]:
    """8 MiB, which every thread's first element needs, up to 512 MiB, which no L2 holds."""
    sizes = [16, 64, 256] if quick else [8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512]
    return [{"footprint_bytes": size << 20} for size in sizes]


def generate(point: Point, target: Target) -> CudaProgram:
    """One footprint."""
    footprint = int(point["footprint_bytes"])

    def measure(gpu: Gpu) -> Reading:
        grid = whole_waves(gpu, _BLOCK)
        threads, elements = grid * _BLOCK, footprint // 16
        if elements < threads:
            raise Unsupported(f"{footprint} bytes are fewer than one element of 16 bytes for each of {threads} threads")
        rounds = max(1, _TOTAL_BYTES // (16 * threads * READ.unroll))
        x, out = gpu.random(footprint), gpu.allocate(4 * threads)
        seconds = gpu.seconds(lambda: gpu.launch(READ, grid, _BLOCK, (x, out, elements, rounds)))
        return Reading(16 * threads * READ.unroll * rounds / seconds, gpu.clock_hz())

    return program(target, measure, READ)


def analyze(samples: Samples) -> Mapping[str, Property]:
    """The rate of the sizes that are as good as the best; nothing where even the largest is one of them."""
    by = {size: statistics.median(values) for size, values in samples.by("footprint_bytes").items()}
    if len(by) < 2 or by[max(by)] >= _PLATEAU * max(by.values()):
        return {}
    held = [size for size, rate in by.items() if rate >= _PLATEAU * max(by.values())]
    values = [s.value for s in samples if s.point["footprint_bytes"] in held]
    method = f"reads past the L1 of arrays up to {max(held)} bytes, again and again, all multiprocessors"
    return {"l2.bw": measured(values, "B/s", method, NAME)}


PROBE = Probe(
    name=NAME,
    kind="cuda",
    measures="bytes read a second, past the L1, from an array that is read again and again",
    unit="B/s",
    parameters={"footprint_bytes": "size of the array"},
    expected="a plateau while the L2 holds the array, then a fall to the bandwidth of DRAM",
    caveats=(
        "an L2 in two parts serves half of the reads from the other part; which reads is not controlled",
        "the fall is gradual, because what is read in turn is not evicted in turn",
    ),
    points=points,
    generate=generate,
    analyze=analyze,
    properties=("l2.bw",),
    plot=plot_over("footprint_bytes", "reads past the L1", "B/s"),
)
