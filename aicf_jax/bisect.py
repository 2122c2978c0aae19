"""`bisect`: which one rewrite breaks a comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from aicf_jax.errors import FuseError
from aicf_jax.explain import entry, explain
from aicf_jax.fuse import fuse
from aicf_jax.kernels import Kernel
from aicf_jax.pattern import Pattern
from aicf_jax.policy import Policy
from aicf_jax.report import Fusion, Report


@dataclasses.dataclass(frozen=True)
class Bisection:
    """What `bisect` found.

    Attributes:
      fuel: the check fails under ``Policy(fuel=fuel)`` and passes under ``Policy(fuel=fuel - 1)``; None: it passes with
        every rewrite.
      fusion: the rewrite that makes the difference, with its ``op``, ``pattern``, ``kernel`` and ``site``.
      rewrites: how many the program has.
      runs: how often the check was called.
      failure: how it fails at `fuel`: the text of what it raised, ``"the check returned False"``.
    """

    fuel: int | None
    fusion: Fusion | None
    rewrites: int
    runs: int
    failure: str = ""

    def __str__(self) -> str:
        runs = f"{self.runs} {'run' if self.runs == 1 else 'runs'}"
        f = self.fusion
        if f is None:
            return f"the check passes with all {self.rewrites} rewrites ({runs})"
        return (
            f"rewrite {self.fuel} of {self.rewrites} breaks the check: {f.op} at {f.site} "
            f"(pattern {f.pattern}, kernel {f.kernel}, numerics {f.numerics}; {runs})\n"
            f"passes with the first {(self.fuel or 1) - 1}, fails with the first {self.fuel}: {self.failure}"
        )


def bisect(
    target: Any,
    check: Callable[[Any], Any],
    /,
    *args: Any,
    policy: Policy | None = None,
    patterns: Sequence[Pattern] | None = None,
    kernels: Sequence[Kernel] | None = None,
    **kwargs: Any,
) -> Bisection:
    """The rewrite that breaks a comparison, by binary search over ``Policy(fuel=n)``.

    Args:
      target: as for `fuse`, or a fused target (whose own policy, patterns and kernels then hold unless given here).
      check: ``check(fused)``, with the target fused under some fuel, decides: it fails when it returns False (or
        anything false but None) or raises. ``numpy.testing.assert_allclose`` in it will do, and so will a whole
        training run.
      *args: of a call of `target`, as for `explain`: they say which program's rewrites are counted. Shapes are enough.
      policy: as for `fuse`; its fuel is replaced.
      patterns: as for `fuse`.
      kernels: as for `fuse`.
      **kwargs: of the call.

    Returns:
      The first n that the search meets for which the check fails while it passes with n - 1. A check may fail, pass
      and fail again as n grows; there is such an n all the same between a passing 0 and a failing end, and the rewrite
      number n makes the difference there, together with those before it.

    Raises:
      FuseError: the check fails with nothing fused, so that no rewrite is to blame.
      TypeError: the check returned what is neither true nor false.
    """
    context = entry(target, policy, patterns, kernels, fuel=None)[2]
    own = {"patterns": context.patterns, "kernels": context.kernels}
    report = explain(target, *args, policy=context.policy, **own, **kwargs)
    total = rewrites(report)
    runs = 0

    def failure(fuel: int) -> tuple[str, Exception | None] | None:
        nonlocal runs
        runs += 1
        limited = dataclasses.replace(context.policy, fuel=fuel)
        return _failure(check, fuse(target, policy=limited, **own))

    last = failure(total)
    if last is None:
        return Bisection(None, None, total, runs)
    first = last if total == 0 else failure(0)
    if first is not None:
        raise FuseError(
            f"bisect(check=...): expected a check that passes with nothing fused, found: {first[0]}. "
            "No rewrite is to blame: look at the comparison itself"
        ) from first[1]
    passes, fails = 0, total
    while fails - passes > 1:
        middle = (passes + fails) // 2
        found = failure(middle)
        if found is None:
            passes = middle
        else:
            fails, last = middle, found
    fusion = next(f for f in report.fusions if f.rewrite == fails)
    return Bisection(fails, fusion, total, runs, last[0])


def rewrites(report: Report) -> int:
    """How many rewrites a program has: the largest fuel that makes a difference."""
    return max((f.rewrite for f in report.fusions if f.rewrite is not None), default=0)


def _failure(check: Callable[[Any], Any], fused: Any) -> tuple[str, Exception | None] | None:
    """How a check fails, None when it passes."""
    try:
        found = check(fused)
    except Exception as error:
        return f"{type(error).__name__}: {error}", error
    if found is None:
        return None
    try:
        passed = bool(found)
    except Exception as error:
        raise TypeError(f"bisect(check=...): expected it to return True, False or None, found {found!r}") from error
    return None if passed else ("the check returned False", None)
