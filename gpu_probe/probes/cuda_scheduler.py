"""Warp scheduler: fused multiply-adds a cycle, by independent chains in a warp (ILP) and warps (TLP)."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping

from gpu_probe.cuda.code import AtLeast, Chained, NoneOf
from gpu_probe.cuda.draw import plot_over
from gpu_probe.cuda.gpu import Gpu
from gpu_probe.cuda.measure import UNIT_FLOATS, CudaProgram, median_ticks, on_every_sm, program
from gpu_probe.cuda.template import Template, check_choice
from gpu_probe.probe import Probe, Target
from gpu_probe.property_map import Property
from gpu_probe.samples import Point, Reading, Samples
from gpu_probe.statistics import measured


@dataclasses.dataclass(frozen=True)
class MultiplyAdds(Template):
    """Each thread runs `ilp` chains of multiply-adds; one in a chain needs the one before.

    Attributes:
      ilp: independent chains.
      steps: multiply-adds of a chain in a round.
    """

    NAME = "probe_scheduler_ilp$ilp"
    TEXT = """
// ticks: cycles of each block for `rounds` rounds of $steps multiply-adds on $ilp chains.
extern "C" __global__ void $name(const float* x, u64* ticks, float* out, u32 rounds) {
  const float b = -0.5f * x[threadIdx.x], c = x[threadIdx.x + blockDim.x];  // |b| < 1: nothing overflows
  float a[$ilp];
#pragma unroll
  for (u32 j = 0; j < $ilp; ++j) a[j] = x[threadIdx.x + (2 + j) * blockDim.x];
  __syncthreads();
  const u64 from = cycles();
#pragma unroll 1
  for (u32 i = 0; i < rounds; ++i) {
#pragma unroll
    for (u32 k = 0; k < $steps; ++k) {
#pragma unroll
      for (u32 j = 0; j < $ilp; ++j) asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(a[j]) : "f"(b), "f"(c));
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) ticks[blockIdx.x] = cycles() - from;
  float sum = 0.0f;
#pragma unroll
  for (u32 j = 0; j < $ilp; ++j) sum += a[j];
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
"""
    CHECKS = (AtLeast("fma", "count"), Chained("fma", "steps"), NoneOf("spill"))

    ilp: int = 1
    steps: int = 32

    def __post_init__(self) -> None:
        check_choice(self, "ilp", (1, 2, 4, 8))
        check_choice(self, "steps", (8, 16, 32, 64))

    @property
    def count(self) -> int:
        """Multiply-adds in a round."""
        return self.ilp * self.steps


NAME = "cuda_scheduler"
_ROUNDS = 64
WARPS = (1, 2, 4, 8, 16, 32)
CHAINS = (1, 2, 4, 8)


def points(quick: bool) -> list[Point]:
    """The table of warps and chains."""
    return [
        {"warps": w, "ilp": n} for w in (WARPS[::2] if quick else WARPS) for n in (CHAINS[::2] if quick else CHAINS)
    ]


def generate(point: Point, target: Target) -> CudaProgram:
    """One entry of the table."""
    warps, adds = int(point["warps"]), MultiplyAdds(int(point["ilp"]))

    def measure(gpu: Gpu) -> Reading:
        block = 32 * warps
        x = gpu.random(4 * block * (2 + adds.ilp), **UNIT_FLOATS)
        ticks = median_ticks(gpu, adds, block, (x,), (_ROUNDS,))
        return on_every_sm(gpu, block * adds.count * _ROUNDS / ticks)

    return program(target, measure, adds)


def analyze(samples: Samples) -> Mapping[str, Property]:
    """The best rate, what of it each entry reaches, and the latency of one multiply-add."""
    rates = {(s.point["warps"], s.point["ilp"]): s.value for s in samples}
    if not rates:
        return {}
    for key in rates:
        rates[key] = statistics.median(samples.of(NAME, warps=key[0], ilp=key[1]).values())
    best = max(rates, key=lambda key: rates[key])
    found = {
        f"issue.warps{warps}.ilp{ilp}": measured(
            [v / rates[best] for v in samples.of(NAME, warps=warps, ilp=ilp).values()],
            "ratio",
            "multiply-adds a cycle over the most that any number of warps and chains reaches",
            NAME,
        )
        for warps, ilp in sorted(rates)
    }
    flops = [
        2 * s.value * s.counters["sm_count"] * s.clock_hz
        for s in samples.of(NAME, warps=best[0], ilp=best[1])
        if s.clock_hz
    ]
    if flops:
        method = f"two operations a multiply-add, {best[0]} warps of {best[1]} chains on each multiprocessor"
        found["vector.f32"] = measured(flops, "FLOP/s", method, NAME)
    return found


PROBE = Probe(
    name=NAME,
    kind="cuda",
    measures="multiply-adds of float32 that a multiprocessor finishes a cycle",
    unit="1/clk/SM",
    parameters={"warps": "on a multiprocessor", "ilp": "chains in each thread that do not need each other"},
    expected="32 * warps * ilp / 4 while latency (4 cycles) bounds it, then 128: four warps must each issue every "
    "cycle; warps and chains may stand in for each other",
    caveats=("fewer than four warps leave schedulers idle, whatever their chains",),
    points=points,
    generate=generate,
    analyze=analyze,
    properties=("issue.*", "vector.f32"),
    plot=plot_over("warps", "multiply-adds by warps", "1/clk/SM", series="ilp"),
)
