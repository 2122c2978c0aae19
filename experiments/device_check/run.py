"""The check on a GPU: is every kernel right, what is the ceiling, how fast is each; until the time is used up."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from experiments._progress import Progress
from experiments.device_check import ceilings
from experiments.device_check.correctness import arrays_of, check
from experiments.device_check.timing import Clock, medians_s
from pallas_kernels.device_case import DeviceCase


class Budget:
    """Time until a deadline, and whether another step like the longest so far fits in."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic):
        self._now, self._end_s, self._longest_s = now, now() + seconds, 0.0

    def fits(self) -> bool:
        """Whether there is time for one more step."""
        return self._now() + self._longest_s < self._end_s

    def step(self, f: Callable[[], Any]) -> Any:
        """Runs a step and remembers how long it took."""
        started = self._now()
        try:
            return f()
        finally:
            self._longest_s = max(self._longest_s, self._now() - started)


def run(
    cases: Mapping[str, DeviceCase],
    clock: Clock,
    budget_s: float,
    progress: Progress,
    keep: Callable[[str, Any], None],
    seed: int = 0,
    measure_ceilings: Callable[[Clock], dict[str, Any]] = ceilings.measure,
) -> dict[str, dict[str, Any]]:
    """Checks all cases first, then times those that are right.

    `keep(name, value)` is told of the ceilings and of each entry as it stands, for a file. The status of an entry is
    ``"right"``, ``"wrong"``, ``"failed"`` (with an ``error``) or ``"not checked"``; with ``times``, by program, where
    it was timed.
    """
    started = time.monotonic()
    entries: dict[str, dict[str, Any]] = {name: {"status": "not checked"} for name in cases}
    checks = Budget(budget_s)
    for name, case in cases.items():
        if not checks.fits():
            break
        progress.start(name)
        entries[name] = checks.step(lambda case=case: _checked(case, seed))
        keep(name, entries[name])
        progress.finish(name, _outcome(entries[name]))
    timings = Budget(budget_s - (time.monotonic() - started))
    if timings.fits():
        progress.start("ceilings")
        keep("ceilings", timings.step(lambda: measure_ceilings(clock)))
        progress.finish("ceilings", "measured")
    for name, case in cases.items():
        if entries[name]["status"] != "right":
            continue
        if not timings.fits():
            progress.note("the time is used up; the other cases are not timed (--budget)")
            break
        progress.start(f"{name}, timed")
        entries[name] |= timings.step(lambda case=case: _timed(case, clock, seed))
        keep(name, entries[name])
        progress.finish(name, "timed" if "times" in entries[name] else "not timed")
    return entries


def _checked(case: DeviceCase, seed: int) -> dict[str, Any]:
    try:
        found = check(case, jax.jit(case.kernel), arrays_of(case, seed))
    except Exception as error:
        return {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    return {"status": "right" if found["correct"] else "wrong", **found}


def _timed(case: DeviceCase, clock: Clock, seed: int) -> dict[str, Any]:
    programs = {"kernel": jax.jit(case.kernel), "unfused": jax.jit(case.unfused)}
    programs |= {name: ceilings.with_options(case.unfused, options) for name, options in case.libraries.items()}
    args = arrays_of(case, seed)
    try:
        return {"times": medians_s(programs, args, clock), "flops": case.flops, "bytes": case.bytes}
    except Exception as error:
        return {"status": "failed", "error": f"{type(error).__name__}: {error}"}


def _outcome(entry: Mapping[str, Any]) -> str:
    if entry["status"] == "failed":
        return f"failed: {entry['error'].splitlines()[0]}"
    shown = ", ".join("not a number" if e is None else f"{e:.1e}" for e in entry["errors"])
    return f"{entry['status']}: {shown}" + ("" if entry["repeats"] else ", other bits on another run")
