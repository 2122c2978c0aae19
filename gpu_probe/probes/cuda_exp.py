"""Exponentials a cycle: the special-function unit, which bounds attention with small heads."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping

from gpu_probe.cuda.code import AtLeast, NoneOf
from gpu_probe.cuda.gpu import Gpu
from gpu_probe.cuda.measure import UNIT_FLOATS, CudaProgram, median_ticks, on_every_sm, program
from gpu_probe.cuda.template import Template, check_range
from gpu_probe.probe import Probe, Target
from gpu_probe.property_map import Property
from gpu_probe.samples import Point, Reading, Samples
from gpu_probe.statistics import measured


@dataclasses.dataclass(frozen=True)
class Exponentials(Template):
    """Each thread runs independent chains of ``a = 2 ** -a``, which stays between 1/2 and 1.

    Attributes:
      ilp: independent chains.
      steps: exponentials of a chain in a round.
    """

    NAME = "probe_exp"
    TEXT = """
// ticks: cycles of each block for `rounds` rounds of $steps exponentials on $ilp chains.
extern "C" __global__ void $name(const float* x, u64* ticks, float* out, u32 rounds) {
  float a[$ilp];
#pragma unroll
  for (u32 j = 0; j < $ilp; ++j) a[j] = x[threadIdx.x + j * blockDim.x];
  __syncthreads();
  const u64 from = cycles();
#pragma unroll 1
  for (u32 i = 0; i < rounds; ++i) {
#pragma unroll
    for (u32 k = 0; k < $steps; ++k) {
#pragma unroll
      for (u32 j = 0; j < $ilp; ++j) asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(a[j]) : "f"(-a[j]));
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
    CHECKS = (AtLeast("exponential", "count"), NoneOf("spill"))

    ilp: int = 4
    steps: int = 16

    def __post_init__(self) -> None:
        check_range(self, "ilp", 1, 16)
        check_range(self, "steps", 1, 64)

    @property
    def count(self) -> int:
        """Exponentials in a round."""
        return self.ilp * self.steps


NAME = "cuda_exp"
EXPONENTIALS = Exponentials()
_ROUNDS = 64


def points(quick: bool) -> list[Point]:
    """Warps on a multiprocessor."""
    return [{"warps": warps} for warps in ((8, 16) if quick else (4, 8, 16, 32))]


def generate(point: Point, target: Target) -> CudaProgram:
    """So many warps."""
    block = 32 * int(point["warps"])

    def measure(gpu: Gpu) -> Reading:
        x = gpu.random(4 * block * EXPONENTIALS.ilp, **UNIT_FLOATS)
        ticks = median_ticks(gpu, EXPONENTIALS, block, (x,), (_ROUNDS,))
        return on_every_sm(gpu, block * EXPONENTIALS.count * _ROUNDS / ticks)

    return program(target, measure, EXPONENTIALS)


def analyze(samples: Samples) -> Mapping[str, Property]:
    """The rate of the number of warps that is fastest, by cycle and by second."""
    by = {warps: statistics.median(values) for warps, values in samples.by("warps").items()}
    if not by:
        return {}
    best = samples.of(NAME, warps=max(by, key=lambda warps: by[warps]))
    method = "ex2.approx, four chains in each thread, at the number of warps that is fastest"
    found = {"sfu.exp_clk": measured(best.values(), "1/clk/SM", method, NAME)}
    rates = [s.value * s.counters["sm_count"] * s.clock_hz for s in best if s.clock_hz]
    return found | ({"sfu.exp_rate": measured(rates, "1/s", method, NAME)} if rates else {})


PROBE = Probe(
    name=NAME,
    kind="cuda",
    measures="exponentials (base 2, float32, approximate) that a multiprocessor finishes a cycle",
    unit="1/clk/SM",
    parameters={"warps": "on a multiprocessor"},
    expected="16 a cycle from eight warps on",
    caveats=("base e costs a multiplication more, in another unit", "polynomials on the other units are not counted"),
    points=points,
    generate=generate,
    analyze=analyze,
    properties=("sfu.exp_clk", "sfu.exp_rate"),
)
