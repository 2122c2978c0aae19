"""Load latency by footprint: a random pointer chase through 1 KB to four times the L2."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from gpu_probe.cuda.chain import LINE_BYTES, Chain, Walk
from gpu_probe.cuda.code import Chained, NoneOf
from gpu_probe.cuda.draw import plot_over
from gpu_probe.cuda.gpu import Gpu
from gpu_probe.cuda.measure import CudaProgram, program
from gpu_probe.cuda.template import Template, check_range
from gpu_probe.probe import Probe, Target
from gpu_probe.property_map import Property
from gpu_probe.samples import Point, Reading, Samples
from gpu_probe.staircase import levels
from gpu_probe.statistics import measured


@dataclasses.dataclass(frozen=True)
class Chase(Template):
    """One thread follows pointers; each load's address is the value that the one before has loaded.

    Attributes:
      unroll: loads in a round.
    """

    NAME = "probe_chase"
    TEXT = """
// Walks `warm` rounds untimed and `rounds` rounds timed. out: cycles, nanoseconds, where it ended.
extern "C" __global__ void $name(const u64* chain, u64* out, u32 warm, u32 rounds) {
  u64 p = (u64)chain;
  u64 from_cycle = 0, from_ns = 0;
  for (u32 i = 0; i < warm + rounds; ++i) {
    if (i == warm) {
      from_ns = nanoseconds();
      from_cycle = cycles();
    }
#pragma unroll
    for (u32 j = 0; j < $unroll; ++j) asm volatile("ld.global.ca.u64 %0, [%0];" : "+l"(p) : : "memory");
  }
  const u64 took_cycles = cycles() - from_cycle;
  out[0] = took_cycles;
  out[1] = nanoseconds() - from_ns;
  out[2] = p;
}
"""
    CHECKS = (Chained("global load", "unroll"), NoneOf("spill"))

    unroll: int = 32

    def __post_init__(self) -> None:
        check_range(self, "unroll", 1, 128)


NAME = "cuda_latency"
CHASE = Chase()
#: Loads that are timed.
TIMED = 4096
#: Chains of at most so many bytes are walked by the timed thread itself first: its L1 may hold them.
_MAYBE_L1 = 512 << 10


def points(quick: bool) -> list[Point]:
    """1 KiB to 512 MiB, which is four times the largest L2 there is, two sizes an octave where caches end."""
    octaves = [1 << k for k in range(10, 30)]
    between = [3 << k for k in range(15, 28)]  # 96 KiB to 384 MiB
    return [{"footprint_bytes": size} for size in (octaves[::2] if quick else sorted(octaves + between))]


def generate(point: Point, target: Target) -> CudaProgram:
    """The chase through one footprint."""
    footprint = int(point["footprint_bytes"])
    held: dict[str, Any] = {}

    def measure(gpu: Gpu) -> Reading:
        if not held:
            held.update(chain=Chain(gpu, footprint, TIMED), out=gpu.allocate(24))
        chain: Chain = held["chain"]
        chain.warm(gpu)
        warm = chain.lines // CHASE.unroll + 1 if footprint <= _MAYBE_L1 else 0
        gpu.launch(CHASE, 1, 1, (chain.start, held["out"], warm, TIMED // CHASE.unroll))
        cycles, ns = (float(x) for x in gpu.read(held["out"], 2, np.uint64))
        return Reading(cycles / TIMED, cycles / ns * 1e9 if ns else None, {"ns": ns / TIMED})

    return program(target, measure, CHASE, Walk())


def analyze(samples: Samples) -> Mapping[str, Property]:
    """L1, L2 and DRAM are the three plateaus; where there are not three, only the first is sure."""
    by = samples.by("footprint_bytes")
    found = levels(by)
    if not found or found[0].sizes[0] > 32 << 10:
        return {}
    properties = _level("l1", samples, found[0].sizes, "l1.latency_cycles")
    if len(found) != 3:
        return properties
    for name, level in zip(("l1", "l2"), found, strict=False):
        if level.capacity is not None:
            method = f"largest chain below the geometric mean of the latencies of {name} and what follows"
            properties[f"{name}.size"] = Property(level.capacity, "B", "measured", method, level.interval, (NAME,))
    properties |= _level("l2", samples, found[1].sizes)
    return properties | _level("dram", samples, found[2].sizes, "dram.latency_cycles")


def _level(name: str, samples: Samples, sizes: tuple[int, int], cycles: str | None = None) -> dict[str, Property]:
    """The latency of a plateau in nanoseconds, and in cycles under the name `cycles`."""
    inside = [s for s in samples if sizes[0] <= int(s.point["footprint_bytes"]) <= sizes[1]]
    method = f"random chase through {sizes[0]} to {sizes[1]} bytes, one pointer in {LINE_BYTES}"
    found = {f"{name}.latency": measured([s.counters["ns"] for s in inside], "ns", method, NAME)}
    return found | ({cycles: measured([s.value for s in inside], "cycles", method, NAME)} if cycles else {})


PROBE = Probe(
    name=NAME,
    kind="cuda",
    measures="cycles of one load whose address is what the load before it has loaded",
    unit="cycles",
    parameters={"footprint_bytes": f"memory that the chain of pointers goes through, one in {LINE_BYTES} bytes"},
    expected="three plateaus: about 33 cycles in the L1, 200 to 470 in the L2, 560 to 650 in DRAM; the steps are at "
    "the sizes of the caches",
    caveats=(
        "the L2 plateau mixes the near and the far partition, see cuda_l2_distance",
        "address translation adds to the largest footprints",
        "the L1 shares its memory with shared memory: its size is what this kernel, which uses none, leaves it",
    ),
    points=points,
    generate=generate,
    analyze=analyze,
    properties=(
        *(f"{level}.latency" for level in ("l1", "l2", "dram")),
        *("l1.latency_cycles", "dram.latency_cycles", "l1.size", "l2.size"),
    ),
    plot=plot_over("footprint_bytes", "latency staircase", "cycles a load"),
)
