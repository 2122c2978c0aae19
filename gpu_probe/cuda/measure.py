"""What the probes' programs and analyses share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from gpu_probe.cuda.gpu import Gpu, Memory
from gpu_probe.cuda.template import Template
from gpu_probe.probe import DeviceError, Target
from gpu_probe.samples import Reading

#: Bits that make of random words floats from 1 up to 2.
UNIT_FLOATS = {"keep": 0x007FFFFF, "one": 0x3F800000}


@dataclasses.dataclass(frozen=True)
class CudaProgram:
    """A compiled kernel and how it is run for one reading.

    Attributes:
      template: the kernel.
      target: what it was compiled for.
      measure: ``measure(gpu) -> Reading``.
    """

    template: Template
    target: Target
    measure: Callable[[Gpu], Reading]

    @property
    def source(self) -> str:
        """The CUDA C++."""
        return self.template.source

    def execute(self) -> Reading:
        """One reading. Raises DeviceError where the target is only described."""
        if not self.target.present:
            raise DeviceError(f"{self.target.name} is only compiled for here, so {self.template.name} cannot run")
        return self.measure(self.target.handle)


def program(target: Target, measure: Callable[[Gpu], Reading], *templates: Template) -> CudaProgram:
    """The program of the first template; all are compiled now, so that nothing is while it is measured."""
    for template in templates:
        target.handle.compile(template)
    return CudaProgram(templates[0], target, measure)


def median_ticks(
    gpu: Gpu, template: Template, block: int, before: Sequence[Memory], after: Sequence[object], smem_bytes: int = 0
) -> float:
    """Cycles that a block of a kernel takes when each multiprocessor has one: the median over them.

    The kernel's arguments are `before`, a u64 array for each block's cycles, a word for each thread, and `after`.
    """
    blocks = gpu.facts["sm_count"]
    ticks, out = gpu.allocate(8 * blocks), gpu.allocate(4 * blocks * block)
    gpu.launch(template, blocks, block, (*before, ticks, out, *after), smem_bytes)
    return float(np.median(gpu.read(ticks, blocks, np.uint64)))


def on_every_sm(gpu: Gpu, value: float, **counters: float) -> Reading:
    """A reading of one multiprocessor, with the clock and how many there are."""
    return Reading(value, gpu.clock_hz(), {"sm_count": float(gpu.facts["sm_count"]), **counters})


def whole_waves(gpu: Gpu, block: int) -> int:
    """Blocks that fill all multiprocessors with threads once."""
    return gpu.facts["sm_count"] * (gpu.facts["threads_per_sm"] // block)
