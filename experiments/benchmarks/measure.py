"""Honest paired timing of two compiled programs.

What makes a ratio lie, and what is done about it: compilation is finished before the first call; every call is waited
for; both programs get the same arguments, as arguments (a captured value may be folded away); they take turns, so that
a slow second of the machine hits both; who goes first changes with every pair, because the second finds warm caches;
ratios are taken within a pair and their median reported, with an interval that assumes no distribution.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import jax

from experiments.benchmarks.compare import canonical_hlo, relative_difference
from experiments.benchmarks.fusers import Fuser
from experiments.benchmarks.program import Program, Target, step

CONFIDENCE = 0.95
WARM_CALLS = 3
# the stopping rule looks this seldom: each look is another chance to stop on a lucky interval
PAIRS_PER_LOOK = 8


@dataclass(frozen=True)
class Sampling:
    """When to stop: interval of the median narrower than `tolerance`, or `max_pairs`, or the time given to a program.

    `min_pairs` are taken in any case, after `warm_calls` of each program that are not counted. Raises ValueError unless
    8 <= min_pairs <= max_pairs, tolerance > 0 and warm_calls >= 0 (fewer than 8 pairs hardly give a 95 % interval).
    """

    tolerance: float = 0.02
    min_pairs: int = 16
    max_pairs: int = 2000
    warm_calls: int = WARM_CALLS

    def __post_init__(self) -> None:
        if not 8 <= self.min_pairs <= self.max_pairs or self.tolerance <= 0 or self.warm_calls < 0:
            raise ValueError(f"need 8 <= min_pairs <= max_pairs, tolerance > 0 and warm_calls >= 0, found {self}")


@dataclass(frozen=True)
class Ratio:
    """Candidate time over baseline time: below 1 the candidate is faster.

    `low` and `high` bound the median with `CONFIDENCE`, `q1` and `q3` are the quartiles of the single ratios, and
    `stopped` is "tolerance", "pairs" or "time".
    """

    median: float
    low: float
    high: float
    q1: float
    q3: float
    pairs: int
    stopped: str


@dataclass(frozen=True)
class Compiled:
    """A program compiled ahead of time: `run(*args)`, its text and what it cost to make.

    `temporaries_bytes` is None for a program of another framework, which does not report them.
    """

    run: Callable[..., Any]
    hlo: str
    compile_s: float
    temporaries_bytes: int | None


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Bounds of the median from order statistics.

    `[x_(j+1), x_(n-j)]` with the largest j for which `2 P(Binomial(n, 1/2) <= j) <= 1 - confidence`. None when there
    are too few values for any.

    Exact for independent values of any one distribution, and conservative.
    """
    n = len(values)
    # counts of outcomes out of 2**n as whole numbers: thousands of pairs are beyond the range of a float
    allowed = math.floor(Fraction(1 - confidence) / 2 * 2**n)
    j, term, tail = -1, 1, 1
    while tail <= allowed:
        j += 1
        term = term * (n - j) // (j + 1)
        tail += term
    if j < 0:
        return None
    ordered = sorted(values)
    return ordered[j], ordered[n - 1 - j]


def sample_pairs(
    baseline: Callable[[], Any],
    candidate: Callable[[], Any],
    sampling: Sampling,
    seconds: float,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> tuple[list[tuple[int, int]], str]:
    """Times both functions in turns; returns `(baseline_ns, candidate_ns)` of each pair and why it stopped.

    The functions must return only when their work is done. Pairs come in twos, one in each order. Garbage collection
    waits outside: a collection would hit whichever of them it falls on.
    """
    pairs: list[tuple[int, int]] = []
    for _ in range(sampling.warm_calls):
        baseline()
        candidate()
    deadline_ns = clock_ns() + round(seconds * 1e9)
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        while True:
            first = _timed(baseline, clock_ns), _timed(candidate, clock_ns)
            second = _timed(candidate, clock_ns), _timed(baseline, clock_ns)
            pairs += [first, second[::-1]]
            if stopped := _stopped(pairs, sampling, clock_ns() >= deadline_ns):
                return pairs, stopped
    finally:
        if was_enabled:
            gc.enable()


def _timed(function: Callable[[], Any], clock_ns: Callable[[], int]) -> int:
    start = clock_ns()
    function()
    return clock_ns() - start


def _stopped(pairs: Sequence[tuple[int, int]], sampling: Sampling, late: bool) -> str | None:
    if len(pairs) < sampling.min_pairs:
        return None
    if len(pairs) % PAIRS_PER_LOOK == 0:
        interval = median_interval([candidate / baseline for baseline, candidate in pairs])
        if interval is not None and interval[1] - interval[0] <= sampling.tolerance:
            return "tolerance"
    if len(pairs) >= sampling.max_pairs:
        return "pairs"
    return "time" if late else None


def summarize(pairs: Sequence[tuple[int, int]], stopped: str) -> Ratio:
    """The median of the ratios within pairs, its interval and the quartiles. Raises ValueError below 8 pairs."""
    ratios = [candidate / baseline for baseline, candidate in pairs]
    interval = median_interval(ratios)
    if interval is None or len(ratios) < 8:
        raise ValueError(f"{len(ratios)} pairs are too few for an interval")
    q1, median, q3 = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(median, *interval, q1, q3, len(ratios), stopped)


def temporaries_bytes(compiled: Any) -> int:
    """Bytes of temporary buffers of a compiled program, from `memory_analysis().temp_size_in_bytes`.

    Not `cost_analysis` (it counts a loop body once) nor the peak (wrong on CPU). Raises RuntimeError when the backend
    does not report it: an unknown is not a zero.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise RuntimeError("this backend reports no memory analysis, so temporaries cannot be compared")
    return int(analysis.temp_size_in_bytes)


def compile_ahead(function: Target, args: tuple[Any, ...]) -> Compiled:
    """Traces, lowers and compiles `function` for `args`; `compile_s` covers all three."""
    start = time.perf_counter()
    compiled = jax.jit(function).lower(*args).compile()
    compile_s = time.perf_counter() - start
    return Compiled(compiled, compiled.as_text() or "", compile_s, temporaries_bytes(compiled))


def measure(
    program: Program, mode: str, target: Target, args: tuple[Any, ...], fuser: Fuser, sampling: Sampling, seconds: float
) -> dict[str, Any]:
    """Compares one program in one mode, fused against unfused, within about `seconds` (compiling included).

    Returns the JSON entry of the suite. Times are medians of single calls; the ratio is of pairs, not of medians.
    """
    deadline_s = time.perf_counter() + seconds
    unfused = compile_ahead(step(program, target, mode), args)
    fused = compile_ahead(step(program, fuser.fuse(target), mode), args)
    entry = measure_pair(unfused, fused, args, program.tolerance, sampling, deadline_s)
    return {**entry, "fusions": fuser.fusions(target, args)}


def measure_pair(
    unfused: Compiled, fused: Compiled, args: tuple[Any, ...], tolerance: float, sampling: Sampling, deadline_s: float
) -> dict[str, Any]:
    """Compares two compiled programs on the same arguments until `deadline_s` of `time.perf_counter`.

    Returns an entry without its fusions: the ratio of paired times, both sides, and whether their results agree to
    `tolerance` (see `compare.relative_difference`).
    """
    difference = relative_difference(unfused.run(*args), fused.run(*args))
    pairs, stopped = sample_pairs(
        lambda: jax.block_until_ready(unfused.run(*args)),
        lambda: jax.block_until_ready(fused.run(*args)),
        sampling,
        max(0.0, deadline_s - time.perf_counter()),
    )
    return {
        "ratio": asdict(summarize(pairs, stopped)),
        "identical_program": canonical_hlo(unfused.hlo) == canonical_hlo(fused.hlo),
        "unfused": side(unfused, [baseline for baseline, _ in pairs]),
        "fused": side(fused, [candidate for _, candidate in pairs]),
        **agreement(difference, tolerance),
    }


def agreement(difference: float, tolerance: float) -> dict[str, Any]:
    """The part of an entry that says how far two results lie apart.

    JSON has no infinity: None stands for trees, dtypes or non-finite places that differ.
    """
    return {
        "max_relative_difference": difference if math.isfinite(difference) else None,
        "tolerance": tolerance,
        "agrees": difference <= tolerance,
    }


def side(compiled: Compiled, times_ns: Sequence[int]) -> dict[str, Any]:
    """One program of an entry; `median_ns` is None where it was compiled but not run."""
    return {
        "median_ns": int(statistics.median(times_ns)) if times_ns else None,
        "compile_s": round(compiled.compile_s, 4),
        "temporaries_bytes": compiled.temporaries_bytes,
    }
