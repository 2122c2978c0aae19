"""What the CPU's probes share: a compiled jax function that is executed and timed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

from gpu_probe.devices.cpu import clock_hz
from gpu_probe.samples import Reading


@dataclasses.dataclass
class JaxProgram:
    """A program of jax whose reading is made of the time of one call.

    Attributes:
      run: one execution, that waits for its results.
      value: seconds -> what the probe measures.
      source: the jaxpr.
    """

    run: Callable[[], Any]
    value: Callable[[float], float]
    source: str

    def execute(self) -> Reading:
        started = time.perf_counter_ns()
        self.run()
        seconds = (time.perf_counter_ns() - started) * 1e-9
        return Reading(self.value(seconds), clock_hz())


def program(f: Callable[..., Any], args: tuple[Any, ...], value: Callable[[float], float]) -> JaxProgram:
    """`f(*args)` compiled ahead, so that executing it traces and looks up nothing."""
    traced = jax.jit(f).trace(*args)
    compiled = traced.lower().compile()
    return JaxProgram(lambda: jax.block_until_ready(compiled(*args)), value, str(traced.jaxpr))
