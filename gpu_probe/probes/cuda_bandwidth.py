"""DRAM bandwidth: reading and copying arrays that no cache holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from gpu_probe.cuda.code import AtLeast, NoneOf
from gpu_probe.cuda.gpu import Gpu
from gpu_probe.cuda.measure import CudaProgram, program, whole_waves
from gpu_probe.cuda.template import Template, check_choice, check_range
from gpu_probe.probe import Probe, Target
from gpu_probe.property_map import Property
from gpu_probe.samples import Point, Reading, Samples
from gpu_probe.statistics import measured


@dataclasses.dataclass(frozen=True)
class Move(Template):
    """All threads read 16 bytes at a time and, when copying, write them elsewhere.

    Attributes:
      what: "read" or "copy".
      unroll: loads that a thread has under way.
    """

    NAME = "probe_dram_$what"
    TEXT = """
// Element k of `elements`, which is a multiple of threads * $unroll. When reading, `y` takes one word a thread.
extern "C" __global__ void $name(const uint4* x, uint4* y, u64 elements) {
  const u64 threads = (u64)gridDim.x * blockDim.x;
  const u64 id = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  u32 sum = 0;
#pragma unroll 1
  for (u64 from = id; from < elements; from += $unroll * threads) {
    uint4 v[$unroll];
#pragma unroll
    for (u32 j = 0; j < $unroll; ++j)
      asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w)
                   : "l"(x + from + j * threads)
                   : "memory");
#pragma unroll
    for (u32 j = 0; j < $unroll; ++j) {
      if ($copies) y[from + j * threads] = v[j];
      else sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
  }
  if (!$copies) ((u32*)y)[id] = sum;
}
"""
    CHECKS = (AtLeast("global load", "unroll"), AtLeast("global store", "stores"), NoneOf("spill"))

    what: str = "read"
    unroll: int = 8

    def __post_init__(self) -> None:
        check_choice(self, "what", ("read", "copy"))
        check_range(self, "unroll", 1, 16)

    def derived(self) -> dict[str, object]:
        return {"copies": int(self.what == "copy")}

    @property
    def stores(self) -> int:
        """Stores in the code."""
        return self.unroll if self.what == "copy" else 1


NAME = "cuda_bandwidth"
_BLOCK = 256


def points(quick: bool) -> list[Point]:
    """Reading and copying 256 MiB to 4 GiB."""
    exponents = (28, 30) if quick else (28, 29, 30, 31, 32)
    return [{"what": what, "array_bytes": 1 << k} for what in ("read", "copy") for k in exponents]


def generate(point: Point, target: Target) -> CudaProgram:
    """One size, read or copied."""
    size, move = int(point["array_bytes"]), Move(str(point["what"]))

    def measure(gpu: Gpu) -> Reading:
        grid = whole_waves(gpu, _BLOCK)
        piece = grid * _BLOCK * move.unroll
        elements = max(1, size // 16 // piece) * piece
        x = gpu.random(16 * elements)
        y = gpu.allocate(16 * elements if move.what == "copy" else 4 * grid * _BLOCK)
        seconds = gpu.seconds(lambda: gpu.launch(move, grid, _BLOCK, (x, y, elements)))
        moved = 16 * elements * (2 if move.what == "copy" else 1)
        return Reading(moved / seconds, gpu.clock_hz(), {"bytes": float(moved), "seconds": seconds})

    return program(target, measure, move)


def fit(bytes_seconds: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """``(a, b)`` of the least squares line ``seconds = a + bytes / b``, relative errors weighing alike.

    None where there are not two sizes, or more bytes take no longer.
    """
    if len({v for v, _ in bytes_seconds}) < 2:
        return None
    volume, seconds = np.array(bytes_seconds, float).T
    rows = np.stack([1 / seconds, volume / seconds], axis=1)
    (a, slope), *_ = np.linalg.lstsq(rows, np.ones(len(seconds)), rcond=None)
    return (float(a), float(1 / slope)) if slope > 0 else None


def analyze(samples: Samples) -> Mapping[str, Property]:
    """Bytes a second of reading and of copying, by the slope of time over bytes: what a launch takes is left out."""
    found: dict[str, Property] = {}
    for what in ("read", "copy"):
        own = samples.of(NAME, what=what)
        line = fit([(s.counters["bytes"], s.counters["seconds"]) for s in own])
        if line is None:
            continue
        repeats = sorted({s.repeat for s in own})
        lines = [
            fit([(s.counters["bytes"], s.counters["seconds"]) for s in own if s.repeat == repeat]) for repeat in repeats
        ]
        rates = [one[1] for one in lines if one is not None] or [line[1]]
        method = f"slope of seconds over bytes {'read and written' if what == 'copy' else 'read'}, all multiprocessors"
        found[f"dram.bw_{what}"] = measured(rates, "B/s", method, NAME)
    return found


PROBE = Probe(
    name=NAME,
    kind="cuda",
    measures="bytes read, or read and written, a second",
    unit="B/s",
    parameters={"what": "read or copy", "array_bytes": "size of the array, about"},
    expected="grows with the size towards the bandwidth of DRAM, because a launch takes some microseconds; reading is "
    "a little faster than copying, which turns the memory's bus around",
    caveats=("the array is random: memory that compresses data would look faster on zeros",),
    points=points,
    generate=generate,
    analyze=analyze,
    properties=("dram.bw_read", "dram.bw_copy"),
)
