"""Global stride sweep: what a load costs when neighbouring threads read words that are apart."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping

from gpu_probe.cuda.code import AddressedBy, AtLeast, NoneOf
from gpu_probe.cuda.draw import plot_over
from gpu_probe.cuda.gpu import Gpu
from gpu_probe.cuda.measure import UNIT_FLOATS, CudaProgram, median_ticks, on_every_sm, program, whole_waves
from gpu_probe.cuda.template import Template, check_range
from gpu_probe.probe import Probe, Target
from gpu_probe.property_map import Property
from gpu_probe.samples import Point, Reading, Samples
from gpu_probe.statistics import measured


@dataclasses.dataclass(frozen=True)
class StridedL1(Template):
    """Every warp reads words `stride` apart that lie in the L1.

    Attributes:
      unroll: loads in a round, each from a window of its own.
    """

    NAME = "probe_stride_l1"
    TEXT = """
// ticks: cycles of each block for `rounds` rounds of $unroll loads by each thread.
extern "C" __global__ void $name(const float* x, u64* ticks, float* out, u32 stride, u32 rounds) {
  const float* at = x + (threadIdx.x % 32) * stride;
  float sum = 0.0f;
  u64 from = 0;
#pragma unroll 1
  for (u32 i = 0; i <= rounds; ++i) {
    if (i == 1) {  // the first round brings the lines in
      __syncthreads();
      from = cycles();
    }
    float v[$unroll];
#pragma unroll
    for (u32 j = 0; j < $unroll; ++j)
      asm volatile("ld.global.ca.f32 %0, [%1];" : "=f"(v[j]) : "l"(at + j * 32 * stride) : "memory");
#pragma unroll
    for (u32 j = 0; j < $unroll; ++j) sum += v[j];
  }
  __syncthreads();
  if (threadIdx.x == 0) ticks[blockIdx.x] = cycles() - from;
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
"""
    CHECKS = (AtLeast("global load", "unroll"), AddressedBy("global load", 3, 24), NoneOf("spill"))

    unroll: int = 8

    def __post_init__(self) -> None:
        check_range(self, "unroll", 1, 32)


@dataclasses.dataclass(frozen=True)
class StridedDram(Template):
    """All threads read words `stride` apart from an array that no cache holds, each word once.

    Attributes:
      unroll: loads that a thread has under way.
    """

    NAME = "probe_stride_dram"
    TEXT = """
// Reads x[k * stride] for k below threads * $unroll * rounds.
extern "C" __global__ void $name(const float* x, float* out, u32 stride, u32 rounds) {
  const u64 threads = (u64)gridDim.x * blockDim.x;
  const u64 id = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  float sum = 0.0f;
#pragma unroll 1
  for (u32 i = 0; i < rounds; ++i) {
    float v[$unroll];
#pragma unroll
    for (u32 j = 0; j < $unroll; ++j) {
      const u64 k = ((u64)i * $unroll + j) * threads + id;
      asm volatile("ld.global.f32 %0, [%1];" : "=f"(v[j]) : "l"(x + k * stride) : "memory");
    }
#pragma unroll
    for (u32 j = 0; j < $unroll; ++j) sum += v[j];
  }
  out[id] = sum;
}
"""
    CHECKS = (AtLeast("global load", "unroll"), AddressedBy("global load", 2, 16), NoneOf("spill"))

    unroll: int = 8

    def __post_init__(self) -> None:
        check_range(self, "unroll", 1, 32)


NAME = "cuda_stride"
L1, DRAM = StridedL1(), StridedDram()
#: Threads of a block; warps of a block that reads from the L1.
_BLOCK, _L1_BLOCK = 256, 1024
#: The array in DRAM, and rounds that are timed in the L1.
_FOOTPRINT_BYTES, _ROUNDS = 1 << 30, 64
STRIDES = (1, 2, 4, 8, 16, 32)


def points(quick: bool) -> list[Point]:
    """Each stride in the L1 and in DRAM; those that are no powers of two only when not quick."""
    strides = STRIDES if quick else tuple(sorted({*STRIDES, 3, 5, 6, 7, 12, 24}))
    return [{"level": level, "stride": stride} for level in ("l1", "dram") for stride in strides]


def generate(point: Point, target: Target) -> CudaProgram:
    """One stride at one level."""
    stride = int(point["stride"])
    return program(target, *((_l1(stride), L1) if point["level"] == "l1" else (_dram(stride), DRAM)))


def _l1(stride: int) -> Callable[[Gpu], Reading]:
    def measure(gpu: Gpu) -> Reading:
        x = gpu.random(4 * 32 * stride * (L1.unroll + 1), **UNIT_FLOATS)
        ticks = median_ticks(gpu, L1, _L1_BLOCK, (x,), (stride, _ROUNDS))
        used_bytes = 4 * _L1_BLOCK * L1.unroll * _ROUNDS
        return on_every_sm(gpu, used_bytes / ticks)

    return measure


def _dram(stride: int) -> Callable[[Gpu], Reading]:
    def measure(gpu: Gpu) -> Reading:
        grid = whole_waves(gpu, _BLOCK)
        threads = grid * _BLOCK
        rounds = max(1, _FOOTPRINT_BYTES // (4 * stride * threads * DRAM.unroll))
        x = gpu.random(4 * (stride * threads * DRAM.unroll * rounds + 1), **UNIT_FLOATS)
        out = gpu.allocate(4 * threads)
        seconds = gpu.seconds(lambda: gpu.launch(DRAM, grid, _BLOCK, (x, out, stride, rounds)))
        clock_hz = gpu.clock_hz()
        used_bytes = 4 * threads * DRAM.unroll * rounds
        value = used_bytes / seconds / clock_hz / gpu.facts["sm_count"]
        return Reading(value, clock_hz, {"sm_count": float(gpu.facts["sm_count"]), "bytes_per_s": used_bytes / seconds})

    return measure


def analyze(samples: Samples) -> Mapping[str, Property]:
    """What remains of the bandwidth at each stride, the size of a sector, and the L1's bandwidth at stride 1."""
    found: dict[str, Property] = {}
    dram = samples.of(NAME, level="dram").counters_by("stride", "bytes_per_s")
    if 1 in dram:
        whole = statistics.median(dram[1])
        for stride, values in dram.items():
            method = f"bytes used a second at stride {stride} over those at stride 1, from DRAM"
            found[f"coalescing.{stride}"] = measured([v / whole for v in values], "ratio", method, NAME)
    for stride, counts in samples.of(NAME, level="l1").counters_by("stride", "ncu.sectors_per_request").items():
        found[f"sectors.{stride}"] = measured(counts, "count", "sectors of a request, counted by Nsight Compute", NAME)
    sector = sector_bytes({stride: statistics.median(values) for stride, values in dram.items()})
    if sector is not None:
        method = "stride from which on fewer bytes used no longer means fewer bytes used a second, in words of 4 bytes"
        found["sector.size"] = Property(sector, "B", "measured", method, None, (NAME,))
    first = samples.of(NAME, level="l1", stride=1)
    if len(first):
        rates = [s.value * s.counters["sm_count"] * s.clock_hz for s in first if s.clock_hz]
        found["l1.bw"] = measured(rates, "B/s", "loads at stride 1 that hit the L1, all multiprocessors", NAME)
    return found


def sector_bytes(rates: Mapping[int, float]) -> int | None:
    """The least that DRAM moves: the bytes between words from which on a doubling of the stride costs nothing.

    Up to there each request moves all bytes between its words, so the bytes used a second halve with each doubling;
    beyond, each word costs one sector. None where the rates do not end that way.
    """
    strides = [s for s in sorted(rates) if s & (s - 1) == 0]
    kept = [2 * rates[b] / rates[a] for a, b in itertools.pairwise(strides)]  # 1: halves, 2: stays
    flat = [b for b, ratio in zip(strides, kept, strict=False) if ratio > 1.5]
    if not flat or any(ratio < 1.5 for stride, ratio in zip(strides, kept, strict=False) if stride > flat[0]):
        return None
    return 4 * flat[0]


PROBE = Probe(
    name=NAME,
    kind="cuda",
    measures="bytes that threads use a cycle and multiprocessor when lane k of a warp reads the word k * stride",
    unit="B/clk/SM",
    parameters={"level": "where the words lie: l1 or dram", "stride": "words of 4 bytes between neighbouring threads"},
    expected="halves with each doubling of the stride while words still share a sector of 32 bytes (stride 8), because "
    "a request then moves min(32, 4 * stride) sectors; in the L1 128 B/clk/SM at stride 1. Beyond stride 8 it stays, "
    "from DRAM only beyond 16 where sectors are filled in pairs",
    caveats=(
        "DRAM's part divides by the clock of the multiprocessors, which may change between the kernel and its reading",
        "large strides touch more pages, so that address translation adds to them",
    ),
    points=points,
    generate=generate,
    analyze=analyze,
    properties=("coalescing.*", "sectors.*", "sector.size", "l1.bw"),
    plot=plot_over("stride", "bytes used by stride", "B/clk/SM", series="level"),
)
