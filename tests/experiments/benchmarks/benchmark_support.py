"""The programs of the suite, how small they are built, and what one that was measured leaves in the results."""

from __future__ import annotations

from experiments.benchmarks import suite
from experiments.benchmarks.discovery import discover
from experiments.benchmarks.program import Program

PROGRAMS = discover(suite, "PROGRAM", Program)
TINY = 0.05


def entry(**changes):
    result = {
        "status": "measured",
        "ratio": {"median": 1.0, "low": 0.99, "high": 1.01, "q1": 0.98, "q3": 1.02, "pairs": 16, "stopped": "time"},
        "identical_program": False,
        "unfused": {"median_ns": 10, "compile_s": 1.0, "temporaries_bytes": 100},
        "fused": {"median_ns": 10, "compile_s": 1.0, "temporaries_bytes": 100},
        "max_relative_difference": 0.0,
        "tolerance": 1e-3,
        "agrees": True,
        "fusions": {},
    }
    return {**result, **changes}
