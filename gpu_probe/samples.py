"""Raw samples of probes, as they are measured and as they are kept."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpu_probe import units

#: What a probe is asked for: a value for each of its parameters.
Point = Mapping[str, int | float | str]


def point_key(point: Point) -> str:
    """Text that is equal for equal points."""
    return json.dumps(dict(point), sort_keys=True)


@dataclasses.dataclass(frozen=True)
class Reading:
    """What one execution of a probe's program gives.

    Attributes:
      value: in the probe's unit.
      clock_hz: the clock while it ran, where that can be read.
      counters: what the program or a profiler counted beside it, by name.
    """

    value: float
    clock_hz: float | None = None
    counters: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Sample:
    """One reading with its place: which probe, at which parameters, in which repetition.

    Raises:
      ValueError: naming the attribute, what was expected, what was found.
    """

    probe: str
    point: Point
    unit: str
    repeat: int
    value: float
    clock_hz: float | None = None
    counters: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        units.dimension(self.unit)
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not math.isfinite(self.value):
            raise ValueError(f"Sample({self.probe}, value=...): expected a finite number, found {self.value!r}")
        if type(self.repeat) is not int or self.repeat < 0:
            raise ValueError(f"Sample({self.probe}, repeat=...): expected an index from 0 on, found {self.repeat!r}")


@dataclasses.dataclass(frozen=True)
class Samples:
    """Samples of one machine, in the order they were taken."""

    all: tuple[Sample, ...] = ()

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    def of(self, probe: str, **where: int | float | str) -> Samples:
        """Those of one probe whose parameters have these values."""
        found = (s for s in self.all if s.probe == probe)
        return Samples(tuple(s for s in found if all(s.point.get(k) == v for k, v in where.items())))

    def values(self) -> list[float]:
        """Every value, in order."""
        return [s.value for s in self.all]

    def by(self, parameter: str) -> dict[Any, list[float]]:
        """Values by one parameter, in the order of the parameter."""
        found: dict[Any, list[float]] = {}
        for s in self.all:
            found.setdefault(s.point[parameter], []).append(s.value)
        return dict(sorted(found.items()))

    def counters_by(self, parameter: str, counter: str) -> dict[Any, list[float]]:
        """One counter's values by one parameter, where they were counted."""
        found: dict[Any, list[float]] = {}
        for s in self.all:
            if counter in s.counters:
                found.setdefault(s.point[parameter], []).append(s.counters[counter])
        return dict(sorted(found.items()))

    def as_list(self) -> list[dict[str, Any]]:
        """As they stand in a file."""
        return [{**dataclasses.asdict(s), "point": dict(s.point), "counters": dict(s.counters)} for s in self.all]

    @classmethod
    def from_list(cls, values: Iterable[Mapping[str, Any]]) -> Samples:
        """What `as_list` gave. Raises TypeError or ValueError for anything else."""
        return cls(tuple(Sample(**value) for value in values))
