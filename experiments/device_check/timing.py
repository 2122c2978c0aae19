"""Time on the device: what CUPTI says of each kernel, or the wall clock over many launches where there is no CUPTI."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

#: A sample of the wall clock spans so many seconds of launches, so that starting them does not count.
SAMPLE_S = 0.02


class Clock(Protocol):
    """Something that times a compiled program."""

    name: str

    def times_s(self, program: Callable[..., Any], args: Sequence[Any], count: int) -> list[float]:
        """`count` durations of one call, in seconds."""
        ...


class Cupti:
    """The sum of the durations of the kernels of a call, as the GPU's own counters give them; gaps are left out."""

    name = "CUPTI"

    def times_s(self, program: Callable[..., Any], args: Sequence[Any], count: int) -> list[float]:
        from jax.experimental.mosaic.gpu import profiler

        _, times_ms = profiler.measure(program, iterations=max(2, count))(*args)
        if not times_ms:
            raise RuntimeError("CUPTI saw no kernel")
        return [t * 1e-3 for t in times_ms]


class Wall:
    """The wall clock over as many calls as take `SAMPLE_S`, which run one after the other on the device."""

    name = "wall clock"

    def times_s(self, program: Callable[..., Any], args: Sequence[Any], count: int) -> list[float]:
        jax.block_until_ready(program(*args))
        started = time.perf_counter()
        jax.block_until_ready(program(*args))
        calls = max(1, round(SAMPLE_S / max(time.perf_counter() - started, 1e-6)))
        found = []
        for _ in range(count):
            started = time.perf_counter()
            for _ in range(calls - 1):
                program(*args)
            jax.block_until_ready(program(*args))
            found.append((time.perf_counter() - started) / calls)
        return found


def clock() -> tuple[Clock, str]:
    """The best clock that works here, and why it is not a better one."""
    probe = jax.jit(lambda x: x * 2)
    x = jnp.ones((1024, 1024))
    try:
        Cupti().times_s(probe, (x,), 2)
    except Exception as error:  # whatever it is that CUPTI misses, the wall clock is what is left
        return Wall(), f"no CUPTI: {type(error).__name__}: {error}"
    return Cupti(), ""


def medians_s(
    programs: Mapping[str, Callable[..., Any]], args: Sequence[Any], clock: Clock, rounds: int = 5, per_round: int = 4
) -> dict[str, dict[str, Any]]:
    """``{name: {median_s, low_s, high_s, samples}}``: the programs in turn, so that a drift of clocks hits them all.

    `low_s` and `high_s` are the quartiles.
    """
    found: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            found[name] += clock.times_s(program, args, per_round)
    return {name: _summary(times) for name, times in found.items()}


def _summary(times: Sequence[float]) -> dict[str, Any]:
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return {"median_s": median, "low_s": low, "high_s": high, "samples": len(times)}
