"""Executes probes: warm, repeated, in random order, kept on disk as it goes, so that a run can be continued."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_probe.environment import environment, load_average, now
from gpu_probe.files import load_json, write_json_atomic
from gpu_probe.probe import Probe, Program, Target, Unsupported
from gpu_probe.property_map import Property, PropertyMap
from gpu_probe.samples import Point, Sample, Samples, point_key

SCHEMA = 1
#: Repetitions of each point.
REPEATS, QUICK_REPEATS = 9, 5
#: Samples are written to disk no more often than this.
WRITE_EVERY_S = 2.0


@dataclasses.dataclass(frozen=True)
class Failure:
    """A point that could not be measured, and why."""

    probe: str
    point: Point
    error: str


class Session:
    """The samples of one run on disk: ``samples.json`` in the folder of the run.

    Another configuration (machine, points, seed) is no continuation: its file is set aside, and `notes` says so.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], fresh: bool = False):
        self.path, self.config = path, dict(config)
        self.notes: list[str] = []
        self.samples: list[Sample] = []
        self.started, self._written = now(), 0.0
        if fresh:
            return
        value, note = load_json(path, self._problem)
        self.notes += [note] if note else []
        if value is not None:
            self.samples, self.started = list(Samples.from_list(value["samples"])), value["started"]
            self.notes += [f"{len(self.samples)} samples kept from an earlier run"] if self.samples else []

    def _problem(self, value: Any) -> str | None:
        if not isinstance(value, dict) or value.get("schema") != SCHEMA:
            return f"expected samples of schema {SCHEMA}"
        if value.get("config") != json.loads(json.dumps(self.config)):
            return "it is of another machine, other points or another seed"
        try:
            Samples.from_list(value["samples"])
        except (KeyError, TypeError, ValueError) as error:
            return str(error)
        return None

    def add(self, sample: Sample) -> None:
        """Keeps a sample, on disk within `WRITE_EVERY_S`."""
        self.samples.append(sample)
        if time.monotonic() - self._written >= WRITE_EVERY_S:
            self.write()

    def write(self, **more: Any) -> None:
        """Writes all samples in one step."""
        taken = {"schema": SCHEMA, "config": self.config, "started": self.started, "written": now()}
        write_json_atomic(self.path, {**taken, **more, "samples": Samples(tuple(self.samples)).as_list()})
        self._written = time.monotonic()


def load_samples(path: Path) -> Samples:
    """The samples of a finished or interrupted run. Raises OSError or ValueError."""
    return Samples.from_list(json.loads(path.read_text(encoding="utf-8"))["samples"])


def configuration(target: Target, probes: Sequence[Probe], quick: bool, repeats: int, seed: int) -> dict[str, Any]:
    """What makes two runs the same run."""
    points = {p.name: [point_key(x) for x in p.points(quick)] for p in probes}
    return {"target": target.description(), "points": points, "repeats": repeats, "seed": seed}


def measure(
    target: Target,
    probes: Sequence[Probe],
    session: Session,
    quick: bool = False,
    advance: Callable[[str], None] = lambda step: None,
) -> list[Failure]:
    """Takes every sample that the session lacks.

    Each repetition visits all points of all probes in an order of its own, so that what changes while a run lasts
    (clock, neighbours, temperature) is part of the spread of each value and no trend along a parameter. Each visit
    executes the program once without counting, then once for the sample. Programs are generated at their first visit
    and kept. A point that raises is visited no more, and one that the target has
    nothing for is no failure.
    """
    points = [(probe, point) for probe in probes for point in probe.points(quick)]
    known = {(s.probe, point_key(s.point), s.repeat) for s in session.samples}
    programs: dict[tuple[str, str], Program] = {}
    failures: dict[tuple[str, str], Failure] = {}
    absent: set[tuple[str, str]] = set()
    for repeat in range(session.config["repeats"]):
        order = list(points)
        random.Random(f"{session.config['seed']} {repeat}").shuffle(order)
        for probe, point in order:
            key = (probe.name, point_key(point))
            advance(f"{probe.name} {_text(point)}")
            if key in failures or key in absent or (*key, repeat) in known:
                continue
            try:
                if key not in programs:
                    programs[key] = probe.generate(point, target)
                session.add(_sample(probe, point, repeat, programs[key]))
            except Unsupported:
                absent.add(key)
            except Exception as error:
                failures[key] = Failure(probe.name, point, f"{type(error).__name__}: {error}")
    session.write(failures=[dataclasses.asdict(f) for f in failures.values()], environment=facts(target))
    return list(failures.values())


def visits(probes: Sequence[Probe], repeats: int, quick: bool) -> int:
    """How often `measure` calls `advance`."""
    return repeats * sum(len(p.points(quick)) for p in probes)


def _sample(probe: Probe, point: Point, repeat: int, program: Program) -> Sample:
    program.execute()
    reading = program.execute()
    return Sample(probe.name, point, probe.unit, repeat, reading.value, reading.clock_hz, reading.counters)


def _text(point: Point) -> str:
    return " ".join(f"{k}={v}" for k, v in point.items())


def facts(target: Target) -> dict[str, Any]:
    """The environment of a map."""
    return {**environment(), "load_average": load_average(), "measured": now()}


def analyze(target: Target, probes: Sequence[Probe], samples: Samples) -> PropertyMap:
    """The map of all that the samples tell. Raises ValueError where two probes give one property."""
    found: dict[str, Property] = {}
    for probe in probes:
        own = samples.of(probe.name)
        for name, value in probe.analyze(own).items() if len(own) else ():
            if name in found:
                raise ValueError(f"{probe.name}: expected properties that no other probe gives, found {name} again")
            found[name] = value
    return PropertyMap(target.description(), found, facts(target))
