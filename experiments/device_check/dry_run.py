"""Every case compiled for a GPU that is not there: kernels, temporaries, bytes, and what ours need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pallas_kernels import aot
from pallas_kernels.device_case import DeviceCase


def compile_cases(cases: Mapping[str, DeviceCase], target: str, timeout_s: float) -> dict[str, dict[str, Any]]:
    """``{case: {status, kernel, unfused, ...}}``, with `aot.CompileReport`s as plain data.

    The status is ``"compiled"``; ``"spills"`` where one of our kernels does; ``"failed"`` with an ``error`` where
    something cannot be compiled.
    """
    programs: dict[str, aot.Program] = {}
    for name, case in cases.items():
        avals = case.avals()
        programs[f"{name} kernel"] = aot.Program(case.kernel, avals)
        programs[f"{name} unfused"] = aot.Program(case.unfused, avals)
        for library, options in case.libraries.items():
            programs[f"{name} {library}"] = aot.Program(case.unfused, avals, options)
    reports = aot.compile_all(target, programs, timeout_s=timeout_s)
    return {name: _entry(name, case, reports) for name, case in cases.items()}


def _entry(name: str, case: DeviceCase, reports: Mapping[str, aot.CompileReport | Exception]) -> dict[str, Any]:
    variants = {variant: reports[f"{name} {variant}"] for variant in ("kernel", "unfused", *case.libraries)}
    errors = [f"{variant}: {r}" for variant, r in variants.items() if isinstance(r, Exception)]
    compiled = {variant: r for variant, r in variants.items() if isinstance(r, aot.CompileReport)}
    entry: dict[str, Any] = {variant: r.to_dict() for variant, r in compiled.items()}
    if errors:
        return {"status": "failed", "error": "\n".join(errors), **entry}
    return {"status": "spills" if compiled["kernel"].spill_bytes else "compiled", **entry}
