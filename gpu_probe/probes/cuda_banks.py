"""Shared-memory bank test: what a load costs when the threads of a warp read words `stride` apart."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping

from gpu_probe.cuda.code import AddressedBy, AtLeast, NoneOf
from gpu_probe.cuda.draw import plot_over
from gpu_probe.cuda.gpu import Gpu
from gpu_probe.cuda.measure import CudaProgram, median_ticks, on_every_sm, program
from gpu_probe.cuda.template import Template, check_range
from gpu_probe.probe import Probe, Target
from gpu_probe.property_map import Property
from gpu_probe.samples import Point, Reading, Samples
from gpu_probe.statistics import measured


@dataclasses.dataclass(frozen=True)
class Banks(Template):
    """All warps of a block read four-byte words of shared memory, lane k the word `k * stride`.

    Attributes:
      unroll: loads in a round, each 32 words after the one before: the same banks.
    """

    NAME = "probe_banks"
    TEXT = """
// ticks: cycles of each block for `rounds` rounds of $unroll loads by each warp. `stride` is at most 64.
extern "C" __global__ void $name(u64* ticks, u32* out, u32 stride, u32 rounds) {
  __shared__ u32 words[31 * 64 + 32 * $unroll];
  for (u32 i = threadIdx.x; i < 31 * 64 + 32 * $unroll; i += blockDim.x) words[i] = i * 2654435761u;
  __syncthreads();
  const u32 at = shared_address(words) + (threadIdx.x % 32) * stride * 4;
  u32 sum = 0;
  const u64 from = cycles();
#pragma unroll 1
  for (u32 i = 0; i < rounds; ++i) {
    u32 v[$unroll];
#pragma unroll
    for (u32 j = 0; j < $unroll; ++j)
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v[j]) : "r"(at + j * 128) : "memory");
#pragma unroll
    for (u32 j = 0; j < $unroll; ++j) sum ^= v[j];
  }
  __syncthreads();
  if (threadIdx.x == 0) ticks[blockIdx.x] = cycles() - from;
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
"""
    CHECKS = (AtLeast("shared load", "unroll"), AddressedBy("shared load", 2, 16), NoneOf("spill"))

    unroll: int = 16

    def __post_init__(self) -> None:
        check_range(self, "unroll", 1, 32)


NAME = "cuda_banks"
BANKS = Banks()
#: Threads of a block, one block a multiprocessor: enough warps that the pipe and not its latency is measured.
_BLOCK, _ROUNDS = 512, 64
_WARPS = _BLOCK // 32
#: A doubling of the stride that costs so much more is a conflict.
_CONFLICT = 1.5


def points(quick: bool) -> list[Point]:
    """Powers of two up to 64, and when not quick every stride up to 33."""
    strides = (1, 2, 4, 8, 16, 32, 64) if quick else (*range(1, 34), 48, 64)
    return [{"stride": stride} for stride in strides]


def generate(point: Point, target: Target) -> CudaProgram:
    """One stride, which is an argument of the kernel: the optimizer does not know it."""
    stride = int(point["stride"])

    def measure(gpu: Gpu) -> Reading:
        ticks = median_ticks(gpu, BANKS, _BLOCK, (), (stride, _ROUNDS))
        return on_every_sm(gpu, ticks / (_WARPS * BANKS.unroll * _ROUNDS))

    return program(target, measure, BANKS)


def conflicts(stride: int, banks: int = 32) -> int:
    """How many words of a warp fall into one bank: the ways of the conflict."""
    return math.gcd(stride, banks)


def analyze(samples: Samples) -> Mapping[str, Property]:
    """Banks: ways of the worst conflict. Width: bytes between words up to which there is none. Bandwidth: stride 1."""
    cost = {stride: statistics.median(values) for stride, values in samples.by("stride").items()}
    powers = [s for s in sorted(cost) if s & (s - 1) == 0]
    if not powers or powers[0] != 1 or powers[-1] < 32:
        return {}
    free = next((a for a, b in itertools.pairwise(powers) if cost[b] > _CONFLICT * cost[a]), None)
    bytes_a_cycle = [32 * 4 / v for v in samples.of(NAME, stride=1).values()]
    found = {"smem.bw": measured(bytes_a_cycle, "B/clk/SM", "loads of 4 bytes at stride 1, without conflicts", NAME)}
    if free is None:
        return found
    # the cost of the worst conflict is that of so many requests without one
    ways = round(max(cost[p] for p in powers) / cost[free])
    found["smem.bank_count"] = Property(
        ways, "count", "measured", "cost of the worst stride over that without conflict, rounded", None, (NAME,)
    )
    found["smem.bank_width"] = Property(
        4 * free, "B", "measured", "largest power-of-two stride without a conflict, in words of 4 bytes", None, (NAME,)
    )
    return found


PROBE = Probe(
    name=NAME,
    kind="cuda",
    measures="cycles of a multiprocessor for one warp's load from shared memory, lane k reading the word k * stride",
    unit="cycles",
    parameters={"stride": "words of 4 bytes between neighbouring threads"},
    expected="gcd(stride, 32) cycles: so many of the 32 words fall into one bank and are read one after the other; odd "
    "strides cost one cycle",
    caveats=("a broadcast, stride 0, costs one cycle and is not measured", "stores may behave otherwise"),
    points=points,
    generate=generate,
    analyze=analyze,
    properties=("smem.bank_count", "smem.bank_width", "smem.bw"),
    plot=plot_over("stride", "bank conflicts", "cycles a request", expected=conflicts),
)
