"""`compare`: `explain`, and a run in which each fused operation is held against its equations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from aicf_jax.cache import build_plan, prepared
from aicf_jax.explain import entry, report_of
from aicf_jax.fronts.function import trace_call
from aicf_jax.kernels import Kernel
from aicf_jax.pattern import Pattern
from aicf_jax.policy import Policy
from aicf_jax.report import Report
from aicf_jax.verify import measured


def compare(
    target: Any,
    /,
    *args: Any,
    policy: Policy | None = None,
    patterns: Sequence[Pattern] | None = None,
    kernels: Sequence[Kernel] | None = None,
    **kwargs: Any,
) -> Report:
    """The report of a call with the errors it was measured to have: `Fusion.error`, `Report.comparisons`.

    Args:
      target: as for `explain`.
      *args: of the call, with values.
      policy: as for `fuse`.
      patterns: as for `fuse`.
      kernels: as for `fuse`.
      **kwargs: of the call.

    Runs the fused and the unfused program once; each operation that has a kernel also runs its equations on the same
    inputs. What ``Policy(verify=True)`` raises at, this lists: nothing is raised for a difference, and state is not
    written back. To measure a backward, pass the function that takes the gradient.

    Raises:
      TypeError: `target` is not callable.
      Exception: whatever tracing or running the call raises.
    """
    function, name, context = entry(target, policy, patterns, kernels, verify=True)
    traced = trace_call(function, args, kwargs)
    plan = build_plan(traced.jaxpr, context)
    report = report_of(plan, name, context)
    found = measured(plan, prepared(traced.values))
    errors: dict[tuple[str, str], float] = {}
    for c in found:
        errors[c.op, c.site] = max(c.error, errors.get((c.op, c.site), 0.0))
    fusions = tuple(dataclasses.replace(f, error=errors.get((f.op, f.site))) for f in report.fusions)
    return dataclasses.replace(report, fusions=fusions, comparisons=found)
