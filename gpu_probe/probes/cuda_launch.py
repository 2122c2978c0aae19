"""Launch overhead: kernels that do nothing, one after the other in a stream and as a graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gpu_probe.cuda.gpu import Gpu
from gpu_probe.cuda.measure import CudaProgram, program
from gpu_probe.cuda.template import Template
from gpu_probe.probe import Probe, Target
from gpu_probe.property_map import Property
from gpu_probe.samples import Point, Reading, Samples
from gpu_probe.statistics import measured


@dataclasses.dataclass(frozen=True)
class Nothing(Template):
    """A kernel without a body."""

    NAME = "probe_nothing"
    TEXT = """
extern "C" __global__ void $name() {}
"""


NAME = "cuda_launch"
NOTHING = Nothing()


def points(quick: bool) -> list[Point]:
    """So many launches in a row, each way."""
    counts = (16, 256) if quick else (16, 64, 256, 1024)
    return [{"way": way, "launches": n} for way in ("stream", "graph") for n in counts]


def generate(point: Point, target: Target) -> CudaProgram:
    """So many launches, timed on the device from before the first to after the last."""
    count, way = int(point["launches"]), str(point["way"])
    held: dict[str, Callable[[], None]] = {}

    def launches(gpu: Gpu, on: Any = None) -> None:
        for _ in range(count):
            gpu.launch(NOTHING, 1, 1, on=on)

    def measure(gpu: Gpu) -> Reading:
        if not held:
            graph = gpu.graph(lambda on: launches(gpu, on)) if way == "graph" else None
            held["go"] = graph or (lambda: launches(gpu))
        gpu.wait()
        seconds = gpu.seconds(held["go"])
        return Reading(seconds / count, None, {"seconds": seconds})

    return program(target, measure, NOTHING)


def analyze(samples: Samples) -> Mapping[str, Property]:
    """What one more launch takes: the slope of seconds over launches, each repetition by itself."""
    found: dict[str, Property] = {}
    for way in ("stream", "graph"):
        own = samples.of(NAME, way=way)
        slopes = []
        for repeat in sorted({s.repeat for s in own}):
            taken = [(float(s.point["launches"]), s.counters["seconds"]) for s in own if s.repeat == repeat]
            if len({n for n, _ in taken}) >= 2:
                count, seconds = np.array(taken).T
                slopes.append(float(np.polyfit(count, seconds, 1)[0]))
        if slopes and min(slopes) > 0:
            method = "slope of seconds over launches of an empty kernel of one thread"
            found[f"launch.{way}"] = measured(slopes, "s", method, NAME)
    return found


PROBE = Probe(
    name=NAME,
    kind="cuda",
    measures="seconds of one launch of an empty kernel among many in a row, on the device",
    unit="s",
    parameters={"way": "stream or graph", "launches": "in a row"},
    expected="about 2.5 us in a stream and 1.3 us in a graph, from some tens of launches on",
    caveats=(
        "in a stream Python launches: where its call takes longer than the device does, it is what is measured",
        "kernels with more arguments and blocks take longer to launch",
    ),
    points=points,
    generate=generate,
    analyze=analyze,
    properties=("launch.stream", "launch.graph"),
)
