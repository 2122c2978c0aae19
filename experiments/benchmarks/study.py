"""What a study is, and what it is given."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.benchmarks.fusers import Fuser
from experiments.benchmarks.measure import Sampling


@dataclass(frozen=True)
class Context:
    """One run: options, the fuser, where results go, and the time allowed.

    `deadline_s` is on the clock of `time.perf_counter`; `config` is what decides whether results can be continued.
    `programs` and `modes` are None for all.
    """

    fuser: Fuser
    output: Path
    console: Console
    config: dict[str, Any]
    deadline_s: float
    programs: tuple[str, ...] | None = None
    modes: tuple[str, ...] | None = None
    scale: float = 1.0
    seed: int = 0
    quick: bool = False
    fresh: bool = False
    sampling: Sampling = field(default_factory=Sampling)

    def left_s(self) -> float:
        """Seconds to the deadline, at least 0."""
        return max(0.0, self.deadline_s - time.perf_counter())


@dataclass(frozen=True)
class Outcome:
    """What a study found: bars missed, bars within the noise, and steps that failed, in words; the files it wrote."""

    missed: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Study:
    """A question to answer: `run(context)` measures, prints and writes; `items(context)` names what it would measure.

    `weight` is its share of the time budget, relative to the other studies of the run.
    """

    name: str
    summary: str
    run: Callable[[Context], Outcome]
    items: Callable[[Context], list[str]]
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.weight <= 0:
            raise ValueError(f"weight of {self.name} must be positive, found {self.weight}")


def choose(available: dict[str, Any], wanted: tuple[str, ...] | None, what: str) -> list[str]:
    """The names in `wanted` (all when None) in the order of `available`. Raises ValueError for an unknown name."""
    unknown = sorted(set(wanted or ()) - set(available))
    if unknown:
        raise ValueError(f"unknown {what} {', '.join(unknown)}; there are {', '.join(available)}")
    return [name for name in available if wanted is None or name in wanted]
