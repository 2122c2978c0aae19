"""From what happened to the record of a run: curves against their bounds, times, temporaries, verdict."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

import numpy as np

from experiments.benchmarks.measure import Compiled, Sampling, side, summarize
from experiments.text_lm import agreement
from experiments.text_lm.config import TextConfig
from experiments.text_lm.train import VARIANTS, History, Pair, schedule

# fewer pairs hardly give an interval of the median
LEAST_PAIRS = Sampling(min_pairs=8).min_pairs


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether rounding explains every difference; `lines` says it in words."""

    passed: bool
    lines: tuple[str, ...]


def summarize_run(
    config: TextConfig, vocabulary: int, history: History, steps: dict[str, Compiled], fusions: dict[str, int] | None
) -> dict[str, Any]:
    """The record of a finished run, JSON values but for floats that are not finite; texts are added by the caller."""
    error = agreement.usual_error(config, vocabulary)
    unfused, fused = zip(*history.losses, strict=True)
    rate = schedule(config)
    rates = [float(np.asarray(rate(step))) for step in range(config.steps)]
    bounds = agreement.curve_bounds(error, unfused, rates, history.masses)
    differences = agreement.curve_differences(unfused, fused)
    limit = agreement.gradient_bound(config, vocabulary)
    pairs = [(baseline, candidate) for baseline, candidate in history.times_ns]
    temporaries = {name: steps[name].temporaries_bytes for name in VARIANTS}
    record: dict[str, Any] = {
        "history": dataclasses.asdict(history),
        "curve": {"differences": differences.tolist(), "bounds": bounds.tolist()},
        "gradient": {"max_difference": max(history.gradients), "bound": limit},
        "validation": dict(zip(VARIANTS, history.validation[-1][1:], strict=True)),
        "ratio": ratio_of(pairs),
        "steps": {name: side(steps[name], [pair[place] for pair in pairs]) for place, name in enumerate(VARIANTS)},
        "temporaries_ratio": _part(temporaries),
        "fusions": fusions,
    }
    verdict = judge(differences, bounds, max(history.gradients), limit, config.gradient_steps)
    return record | {"verdict": {"passed": verdict.passed, "lines": list(verdict.lines)}}


def ratio_of(pairs: list[tuple[int, int]]) -> dict[str, Any]:
    """Fused over unfused, median of the steps; with an interval where there are steps enough."""
    if len(pairs) >= LEAST_PAIRS:
        return dataclasses.asdict(summarize(pairs, "steps"))
    return {"median": statistics.median(fused / unfused for unfused, fused in pairs), "pairs": len(pairs)}


def _part(temporaries: Pair) -> float | None:
    unfused, fused = temporaries["unfused"], temporaries["fused"]
    return fused / unfused if unfused else None


def judge(differences: np.ndarray, bounds: np.ndarray, gradient: float, limit: float, steps: int) -> Verdict:
    """Passed when no step of the curve and no gradient is beyond its bound; a bound that is not finite is exceeded."""
    # not `differences > bounds`: that is False for NaN
    beyond = np.flatnonzero(~(differences <= bounds))
    top = int(np.argmax(differences))
    lines = [
        f"largest difference of the loss curves: {differences[top]:.2g} at step {top} (allowed there "
        f"{bounds[top]:.2g}), at step 0 {differences[0]:.2g} (allowed {bounds[0]:.2g})",
        f"largest relative difference of gradients at equal parameters, first {steps} steps: {gradient:.2g}"
        f" (allowed {limit:.2g})",
    ]
    if len(beyond):
        first = int(beyond[0])
        lines.append(
            f"the curves disagree: {len(beyond)} steps beyond what rounding explains, the first is step {first} "
            f"({differences[first]:.2g}, allowed {bounds[first]:.2g})"
        )
    if not gradient <= limit:
        lines.append(f"the gradients disagree: {gradient:.2g} exceeds {limit:.2g}, rounding does not explain it")
    passed = not len(beyond) and gradient <= limit and math.isfinite(gradient)
    lines.append(f"fused and unfused learn alike: {'yes' if passed else 'no'}")
    return Verdict(passed, tuple(lines))
