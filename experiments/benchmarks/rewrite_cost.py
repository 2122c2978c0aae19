"""What fusing costs before the first step, against what jit itself spends; and that it is paid once.

Both paths start from nothing (caches of jax and of the fuser emptied) and are taken through the same stages of
`jax.jit(step)`: trace, lower, compile. With u for unfused and f for fused,

    rewriting_s = (trace_f + lower_f) - (trace_u + lower_u)
    fraction    = rewriting_s / (trace_u + lower_u + compile_u)

`trace_f` holds everything that `fuse` does: its own run of the user's Python, analysis, matching, rewriting, and
binding the result. Lowering belongs to it, because kernels are expanded there. Compiling the fused program is XLA's
work on another program, timed in the suite, and no part of rewriting.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax

from experiments.benchmarks.fusers import Fuser, Work
from experiments.benchmarks.program import Program, Target, step


@dataclass(frozen=True)
class Stages:
    """Seconds in each stage of jit; `compile_s` is None where compiling was left out."""

    trace_s: float
    lower_s: float
    compile_s: float | None = None

    @property
    def before_compile_s(self) -> float:
        """The stages in which rewriting happens: tracing and lowering."""
        return self.trace_s + self.lower_s


@dataclass(frozen=True)
class Round:
    """One fresh run of both paths. Raises ValueError when the unfused path was not compiled."""

    unfused: Stages
    fused: Stages

    def __post_init__(self) -> None:
        if self.unfused.compile_s is None:
            raise ValueError("the unfused path must be compiled: its time is the denominator")

    @property
    def jit_s(self) -> float:
        """What jit spends on the unfused model."""
        return self.unfused.before_compile_s + (self.unfused.compile_s or 0.0)

    @property
    def rewriting_s(self) -> float:
        """What fusing adds; noise can make it negative."""
        return self.fused.before_compile_s - self.unfused.before_compile_s


def stages(make: Callable[[], Target], args: tuple[Any, ...], compiling: bool, fuser: Fuser) -> Stages:
    """Takes `jax.jit(make())` through its stages from empty caches; calling `make` (which fuses) counts as tracing."""
    jax.clear_caches()
    fuser.clear()
    gc.collect()
    start = time.perf_counter()
    traced = jax.jit(make()).trace(*args)
    after_trace = time.perf_counter()
    lowered = traced.lower()
    after_lower = time.perf_counter()
    if not compiling:
        return Stages(after_trace - start, after_lower - after_trace)
    lowered.compile()
    return Stages(after_trace - start, after_lower - after_trace, time.perf_counter() - after_lower)


def measure_round(program: Program, target: Target, args: tuple[Any, ...], fuser: Fuser, fused_first: bool) -> Round:
    """Both paths of the training step once, in the given order."""

    def unfused_stages():
        return stages(lambda: step(program, target, "value_and_grad"), args, True, fuser)

    def fused_stages():
        return stages(lambda: step(program, fuser.fuse(target), "value_and_grad"), args, False, fuser)

    if fused_first:
        fused = fused_stages()
        return Round(unfused_stages(), fused)
    return Round(unfused_stages(), fused_stages())


def second_calls(program: Program, target: Target, args: tuple[Any, ...], fuser: Fuser) -> dict[str, Work]:
    """Work of the fuser in the second of two equal calls: the model eagerly, its gradient eagerly, a jitted step."""
    fuser.clear()
    fused = fuser.fuse(target)
    training = step(program, fused, "value_and_grad")
    jitted = jax.jit(training)
    calls = {"eager_forward": fused, "eager_step": training, "jitted_step": jitted}
    return {name: _second_call(call, args, fuser) for name, call in calls.items()}


def _second_call(call: Target, args: tuple[Any, ...], fuser: Fuser) -> Work:
    jax.block_until_ready(call(*args))
    before = fuser.work()
    jax.block_until_ready(call(*args))
    return fuser.work() - before


def summarize(rounds: list[Round], calls: dict[str, Work]) -> dict[str, Any]:
    """The JSON entry: medians over rounds. The fraction is taken within rounds, its spread given by its extremes."""
    fractions = [r.rewriting_s / r.jit_s for r in rounds]
    return {
        "rounds": [asdict(r) for r in rounds],
        "jit_s": statistics.median(r.jit_s for r in rounds),
        "rewriting_s": statistics.median(r.rewriting_s for r in rounds),
        "fraction": statistics.median(fractions),
        "fraction_extremes": [min(fractions), max(fractions)],
        "second_calls": {name: asdict(work) for name, work in calls.items()},
    }
