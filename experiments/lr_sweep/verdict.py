"""What the numbers say: do fused and unfused diverge at the same rates, and is the origin's observation there?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from experiments.lr_sweep.config import Cell, SweepConfig
from experiments.lr_sweep.store import Results
from experiments.lr_sweep.train import Outcome

ORIGIN = Cell("unscaled", "sgd", "float32")
CONVERGING_RATE, DIVERGING_RATE = 1e-3, 1e-2


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The answer in numbers; `lines` says it in words.

    Attributes:
      disagreements: (cell, rate, variant that diverged there alone).
      excesses: (cell, max gradient difference, bound) of every cell beyond its bound.
      worst: the largest gradient difference of each dtype: (dtype, difference, the same in unit roundoffs, bound).
      gradient_steps: steps in which gradients were compared.
      origin: lines about the origin's setting; empty if this sweep does not contain it.
    """

    disagreements: tuple[tuple[Cell, float, str], ...]
    excesses: tuple[tuple[Cell, float, float], ...]
    worst: tuple[tuple[str, float, float, float], ...]
    gradient_steps: int
    origin: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """True if the fused gradient is not to blame for anything that happened."""
        return not self.disagreements and not self.excesses

    def lines(self) -> list[str]:
        """The verdict, a line each."""
        lines = [f"fused and unfused diverge at the same rates: {'no' if self.disagreements else 'yes'}"]
        lines += [f"  {cell} lr {rate:g}: only {variant} diverged" for cell, rate, variant in self.disagreements]
        worst = ", ".join(f"{dtype} {d:.2g} = {u:.2g} u (bound {b:.2g})" for dtype, d, u, b in self.worst)
        lines.append(f"max gradient difference in the first {self.gradient_steps} steps: {worst}")
        for cell, difference, limit in self.excesses:
            lines.append(f"  {cell}: {difference:.2g} exceeds the bound {limit:.2g}: rounding does not explain it")
        return lines + list(self.origin)

    def to_json(self) -> dict:
        """JSON values; floats may still be infinite."""
        return {"passed": self.passed, "lines": self.lines()}


def judge(config: SweepConfig, results: Results) -> Verdict:
    """Judge the cells that are finished."""
    cells = [cell for cell in config.cells() if cell in results]
    disagreements = tuple(item for cell in cells for item in _disagreements(config, results, cell))
    gradients = {cell: results[cell].gradient for cell in cells}
    excesses = tuple((cell, g.max_difference, g.bound) for cell, g in gradients.items() if not g.within_bound)
    worst = []
    for dtype in config.dtypes:
        agreements = [gradient for cell, gradient in gradients.items() if cell.dtype == dtype]
        if agreements:
            top = max(agreements, key=lambda agreement: agreement.max_difference)
            worst.append((dtype, top.max_difference, top.max_difference / top.unit_roundoff, top.bound))
    return Verdict(disagreements, excesses, tuple(worst), config.gradient_steps, tuple(_origin(config, results)))


def _disagreements(config: SweepConfig, results: Results, cell: Cell) -> Iterator[tuple[Cell, float, str]]:
    fused, unfused = results[cell].fused.diverged, results[cell].unfused.diverged
    for rate, a, b in zip(config.learning_rates, fused, unfused, strict=True):
        if (a is None) != (b is None):
            yield cell, rate, "unfused" if a is None else "fused"


def converged(outcome: Outcome, index: int) -> bool:
    """A member converged if it never diverged and classifies most test images (chance is one in ten)."""
    return outcome.diverged[index] is None and outcome.accuracy[index] > 0.5


def describe(outcome: Outcome, index: int) -> str:
    """One member in a few words."""
    if (divergence := outcome.diverged[index]) is not None:
        return ", ".join(f"{kind} at step {step}" for kind, step in divergence.first.items())
    word = "converges" if converged(outcome, index) else "does not converge"
    return f"{word}, accuracy {outcome.accuracy[index]:.3f}"


def _origin(config: SweepConfig, results: Results) -> Iterator[str]:
    """The origin's two rates in its setting, then the rate that failed with only the inputs or optimizer changed."""
    if ORIGIN not in results or not {CONVERGING_RATE, DIVERGING_RATE} <= set(config.learning_rates):
        return
    low, high = (config.learning_rates.index(rate) for rate in (CONVERGING_RATE, DIVERGING_RATE))
    outcomes = {"fused": results[ORIGIN].fused, "unfused": results[ORIGIN].unfused}
    reproduced = all(
        converged(outcome, low) and (bad := outcome.diverged[high]) is not None and bad.kind == "nan"
        for outcome in outcomes.values()
    )
    yield f"origin's observation ({ORIGIN}: converges at 1e-3, NaN at 1e-2) reproduced: {'yes' if reproduced else 'no'}"
    for rate, index in ((CONVERGING_RATE, low), (DIVERGING_RATE, high)):
        yield f"  lr {rate:g}: " + "; ".join(f"{name} {describe(o, index)}" for name, o in outcomes.items())
    others = {
        "standardized inputs instead": dataclasses.replace(ORIGIN, inputs="standardized"),
        "Adam instead": dataclasses.replace(ORIGIN, optimizer="adam"),
    }
    told = [f"{change}: {describe(results[c].fused, high)}" for change, c in others.items() if c in results]
    if told:
        yield f"  lr {DIVERGING_RATE:g} with " + "; with ".join(told)
