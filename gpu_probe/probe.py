"""`Probe`: one question to a machine, and how its answer is generated, executed and read.

A probe lists points, ``generate`` compiles a program for one point, ``execute`` of that program gives one reading (the
runner warms up, repeats and shuffles), and ``analyze`` makes properties of all samples of the probe.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gpu_probe import units
from gpu_probe.property_map import KINDS, Property
from gpu_probe.samples import Point, Reading, Samples


class DeviceError(RuntimeError):
    """There is no such device here, or it cannot be used; the message is one sentence for the user."""


class Unsupported(DeviceError):
    """The device has nothing of the kind that a point asks for, which is no failure: the point has no value there."""


@dataclasses.dataclass(frozen=True)
class Target:
    """The machine that programs are generated for.

    Attributes:
      kind: one of `KINDS`.
      name: of the machine.
      facts: JSON object for `PropertyMap.device`: what is known of the machine without probing it.
      present: whether programs can be executed here; False when they are only compiled for it.
      handle: what the probes of this kind need to compile and launch; None for a CPU.
    """

    kind: str
    name: str
    facts: Mapping[str, Any]
    present: bool = True
    handle: Any = None

    def description(self) -> dict[str, Any]:
        """For `PropertyMap.device`."""
        return {"kind": self.kind, "name": self.name, **self.facts}


class Program(Protocol):
    """What `Probe.generate` returns."""

    @property
    def source(self) -> str:
        """The program as text, for people: CUDA C++, or the jaxpr."""
        ...

    def execute(self) -> Reading:
        """Runs it once and returns what it measured, in the probe's unit."""
        ...


@dataclasses.dataclass(frozen=True)
class Probe:
    """One probe. Each module of `gpu_probe.probes` exports one as ``PROBE``.

    Attributes:
      name: unique over all kinds of device, e.g. ``"cpu_pointer_chase"``.
      kind: of device, one of `KINDS`.
      measures: what a sample is, in words.
      unit: of a sample's value.
      parameters: parameter -> what it is, in words.
      expected: the shape that the result should have over the parameters, and why.
      caveats: what makes its results wrong or hard to read.
      points: ``points(quick) -> parameters`` to measure.
      generate: ``generate(point, target) -> Program``, compiled. Raises `Unsupported` where the target
        has nothing of the kind.
      analyze: ``analyze(samples) -> {name: Property}`` of all samples of this probe; pure, and empty where the samples
        do not tell.
      properties: names of the properties that `analyze` may give, as in `vocabulary`.
      plot: ``plot(samples, axes)`` draws its samples on matplotlib axes; None where a table says it all.

    Raises:
      ValueError: naming the attribute, what was expected, what was found.
    """

    name: str
    kind: str
    measures: str
    unit: str
    parameters: Mapping[str, str]
    expected: str
    caveats: tuple[str, ...]
    points: Callable[[bool], Sequence[Point]]
    generate: Callable[[Point, Target], Program]
    analyze: Callable[[Samples], Mapping[str, Property]]
    properties: tuple[str, ...]
    plot: Callable[[Samples, Any], None] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"Probe({self.name!r}, kind=...): expected one of {', '.join(KINDS)}, found {self.kind!r}")
        units.dimension(self.unit)
        for quick in (False, True):
            for point in self.points(quick):
                if set(point) != set(self.parameters):
                    expected, found = ", ".join(sorted(self.parameters)), ", ".join(sorted(point))
                    raise ValueError(f"Probe({self.name!r}, points=...): expected {expected}, found {found}")
