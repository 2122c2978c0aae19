"""What a study is, and what it is given."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from experiments.benchmarks.fusers import Fuser
from experiments.benchmarks.measure import Sampling
from gpu_probe.property_map import PropertyMap


@dataclass(frozen=True)
class Context:
    """One run: options, the fuser, where results go, and the time allowed.

    `deadline_s` is on the clock of `time.perf_counter`; `config` is what decides whether results can be continued.
    `programs`, `modes` and `lengths` are None for all. `hardware` is the property map of ``--map``.
    """

    fuser: Fuser
    output: Path
    console: Console
    config: dict[str, Any]
    deadline_s: float
    programs: tuple[str, ...] | None = None
    modes: tuple[str, ...] | None = None
    lengths: tuple[int, ...] | None = None
    scale: float = 1.0
    seed: int = 0
    quick: bool = False
    fresh: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    hardware: PropertyMap | None = None

    def left_s(self) -> float:
        """Seconds to the deadline, at least 0."""
        return max(0.0, self.deadline_s - time.perf_counter())


@dataclass(frozen=True)
class Outcome:
    """What a study found, in words: bars missed, bars not decided, goals, steps that failed; and the files it wrote.

    A goal is a bar of later work: it is told and never missed.
    """

    missed: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()
    goals: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Study:
    """A question to answer: `run(context)` measures, prints and writes; `items(context)` names what it would measure.

    `weight` is its share of the time budget, relative to the other studies of the run. With `own_names`, its programs
    and modes are not those of the suite: where some are chosen by name, it takes part only if it is asked for itself.
    """

    name: str
    summary: str
    run: Callable[[Context], Outcome]
    items: Callable[[Context], list[str]]
    weight: float = 1.0
    own_names: bool = False

    def __post_init__(self) -> None:
        if self.weight <= 0:
            raise ValueError(f"weight of {self.name} must be positive, found {self.weight}")


Name = TypeVar("Name", str, int)


def choose(available: Iterable[Name], wanted: tuple[Name, ...] | None, what: str) -> list[Name]:
    """The names in `wanted` (all when None) in the order of `available`. Raises ValueError for an unknown name."""
    available = list(available)
    unknown = sorted(set(wanted or ()) - set(available))
    if unknown:
        raise ValueError(f"unknown {what} {', '.join(map(str, unknown))}; there are {', '.join(map(str, available))}")
    return [name for name in available if wanted is None or name in wanted]
