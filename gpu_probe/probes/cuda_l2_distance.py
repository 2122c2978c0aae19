"""Near and far L2: the latency of single loads that hit the L2, one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpu_probe.cuda.chain import Chain, Walk
from gpu_probe.cuda.code import Chained, InOrder, NoneOf
from gpu_probe.cuda.gpu import Gpu
from gpu_probe.cuda.measure import CudaProgram, program
from gpu_probe.cuda.template import Template, check_range
from gpu_probe.probe import Probe, Target
from gpu_probe.property_map import Property
from gpu_probe.samples import Point, Reading, Samples
from gpu_probe.statistics import measured


@dataclasses.dataclass(frozen=True)
class TimedLoads(Template):
    """One thread follows pointers past the L1 and times each load.

    Attributes:
      samples: loads that are timed; their times are kept in shared memory, 8 bytes each.
    """

    NAME = "probe_timed_loads"
    TEXT = """
// Walks `warm` loads, then $samples of them timed one by one, then as many timed together. out: cycles of each, of all.
extern "C" __global__ void $name(const u64* chain, u64* out, u32 warm) {
  __shared__ u64 took[$samples];
  __shared__ u64 sink;
  const u32 sink_at = shared_address(&sink);
  u64 p = (u64)chain;
  for (u32 i = 0; i < warm; ++i) asm volatile("ld.global.cg.u64 %0, [%0];" : "+l"(p) : : "memory");
#pragma unroll 1
  for (u32 i = 0; i < $samples; ++i) {
    const u64 from = cycles();
    asm volatile("ld.global.cg.u64 %0, [%0];" : "+l"(p) : : "memory");
    // the store needs what was loaded, and instructions are issued in order: the clock is read after the load is done
    asm volatile("st.shared.u64 [%0], %1;" : : "r"(sink_at), "l"(p) : "memory");
    took[i] = cycles() - from;
  }
  const u64 from = cycles();
#pragma unroll 16
  for (u32 i = 0; i < $samples; ++i) asm volatile("ld.global.cg.u64 %0, [%0];" : "+l"(p) : : "memory");
  asm volatile("st.shared.u64 [%0], %1;" : : "r"(sink_at), "l"(p) : "memory");
  out[$samples] = cycles() - from;
  for (u32 i = 0; i < $samples; ++i) out[i] = took[i];
}
"""
    CHECKS = (
        Chained("global load", 2),
        InOrder(("global load", "clock", "global load", "shared store", "clock")),
        NoneOf("spill"),
    )

    samples: int = 4096

    def __post_init__(self) -> None:
        check_range(self, "samples", 16, 4096)


NAME = "cuda_l2_distance"
LOADS = TimedLoads()
#: Two clusters whose centres are nearer than this are one: the L2 of this GPU has no parts, or all is near.
_APART = 1.2


def points(quick: bool) -> list[Point]:
    """Footprints that the L2 holds and the L1 does not."""
    return [{"footprint_bytes": size} for size in ((4 << 20,) if quick else (2 << 20, 4 << 20, 8 << 20))]


def generate(point: Point, target: Target) -> CudaProgram:
    """Timed loads through one footprint."""
    footprint = int(point["footprint_bytes"])
    held: dict[str, Any] = {}

    def measure(gpu: Gpu) -> Reading:
        if not held:
            held.update(chain=Chain(gpu, footprint, LOADS.samples), out=gpu.allocate(8 * (LOADS.samples + 1)))
        chain: Chain = held["chain"]
        chain.warm(gpu)
        gpu.launch(LOADS, 1, 1, (chain.start, held["out"], chain.lines))
        *each, untimed = (float(x) for x in gpu.read(held["out"], LOADS.samples + 1, np.uint64))
        near, far, share = two_clusters(each)
        mean = untimed / LOADS.samples
        counters = {"near": near, "far": far, "far_share": share, "timing": sum(each) / LOADS.samples - mean}
        return Reading(mean, gpu.clock_hz(), counters)

    return program(target, measure, LOADS, Walk())


def two_clusters(values: Sequence[float]) -> tuple[float, float, float]:
    """The medians of the lower and the upper of two clusters, and the share of the upper.

    The border is where the clusters' summed squared distances from their means are least. The highest hundredth is left
    out: loads that missed or waited.
    """
    found = np.sort(np.asarray(values, float))
    found = found[: max(2, round(0.99 * len(found)))]
    sums, squares, count = np.cumsum(found), np.cumsum(found**2), len(found)
    k = np.arange(1, count)  # values in the lower cluster
    lower = squares[k - 1] - sums[k - 1] ** 2 / k
    upper = (squares[-1] - squares[k - 1]) - (sums[-1] - sums[k - 1]) ** 2 / (count - k)
    border = int(np.argmin(lower + upper)) + 1
    return float(np.median(found[:border])), float(np.median(found[border:])), 1 - border / count


def analyze(samples: Samples) -> Mapping[str, Property]:
    """Near and far, less what timing each load adds; nothing where the loads are of one kind."""
    near, far = (
        [s.counters[part] - s.counters["timing"] for s in samples if _two_kinds(s.counters)] for part in ("near", "far")
    )
    if not near or 2 * len(near) < len(samples):
        return {}
    method = "medians of the two clusters of single loads past the L1, less what timing each of them adds"
    return {
        "l2.latency_near": measured(near, "cycles", method, NAME),
        "l2.latency_far": measured(far, "cycles", method, NAME),
    }


def _two_kinds(counters: Mapping[str, float]) -> bool:
    """Whether the clusters are apart and each has a tenth of the loads."""
    return counters["far"] > _APART * counters["near"] and 0.1 <= counters["far_share"] <= 0.9


PROBE = Probe(
    name=NAME,
    kind="cuda",
    measures="cycles of one dependent load past the L1 that hits the L2, on average; each load is timed as well",
    unit="cycles",
    parameters={"footprint_bytes": "memory that the chain of pointers goes through"},
    expected="single loads form two clusters, half of them in each: 200 to 270 cycles in the partition beside the "
    "multiprocessor, 395 to 500 in the other",
    caveats=(
        "one multiprocessor measures; others lie nearer to or farther from the partitions",
        "timing each load adds some cycles, which are found by walking the same chain untimed",
    ),
    points=points,
    generate=generate,
    analyze=analyze,
    properties=("l2.latency_near", "l2.latency_far"),
)
