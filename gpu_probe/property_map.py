"""`PropertyMap`: what a machine can do, as values with unit, interval, method and source."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpu_probe import units
from gpu_probe.files import write_json_atomic
from gpu_probe.vocabulary import known

#: Of the files. It changes when a reader of the last would misread this one.
SCHEMA = 1
#: Kinds of device that there are maps of and probes for.
KINDS = ("cpu", "cuda")
#: Where a value comes from: a probe's samples, the vendor's papers, or other properties.
SOURCES = ("measured", "datasheet", "derived")
#: Maps that come with the package.
SHIPPED = Path(__file__).parent / "maps"


class MapError(ValueError):
    """A map cannot be read or used; the message names the file or property, what was expected, what was found."""


@dataclasses.dataclass(frozen=True)
class Property:
    """One value of a machine.

    Attributes:
      value: in `unit`.
      unit: one of `units.UNITS`.
      source: one of `SOURCES`.
      method: how it was found: the procedure of the analysis, or the document and page.
      interval: (low, high) in `unit` that another run is expected to fall into; None where nothing tells.
      probes: names of the probes whose samples it rests on.

    Raises:
      MapError: naming the attribute, what was expected, what was found.
    """

    value: float
    unit: str
    source: str
    method: str
    interval: tuple[float, float] | None = None
    probes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _is_number(self.value):
            raise MapError(f"Property(value=...): expected a finite number, found {self.value!r}")
        if not isinstance(self.unit, str) or self.unit not in units.UNITS:
            raise MapError(f"Property(unit=...): expected one of {', '.join(units.UNITS)}, found {self.unit!r}")
        if self.source not in SOURCES:
            raise MapError(f"Property(source=...): expected one of {', '.join(SOURCES)}, found {self.source!r}")
        if not isinstance(self.method, str) or not self.method:
            raise MapError(f"Property(method=...): expected how the value was found, found {self.method!r}")
        if self.interval is not None:
            found = tuple(self.interval) if isinstance(self.interval, list | tuple) else ()
            if len(found) != 2 or not all(map(_is_number, found)) or not found[0] <= self.value <= found[1]:
                raise MapError(f"Property(interval=...): expected low <= {self.value} <= high, found {self.interval!r}")
            object.__setattr__(self, "interval", found)
        if not isinstance(self.probes, list | tuple) or not all(isinstance(p, str) for p in self.probes):
            raise MapError(f"Property(probes=...): expected names of probes, found {self.probes!r}")
        object.__setattr__(self, "probes", tuple(self.probes))
        if self.source == "measured" and not self.probes:
            raise MapError("Property(probes=...): expected the probes of a measured value, found none")

    def to(self, unit: str) -> Property:
        """The same in another unit of its dimension."""
        low_high = self.interval and tuple(units.convert(x, self.unit, unit) for x in self.interval)
        value = units.convert(self.value, self.unit, unit)
        return dataclasses.replace(self, value=value, unit=unit, interval=low_high)

    def __str__(self) -> str:
        return f"{units.text(self.value, self.unit)} ({self.source})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PropertyMap:
    """Properties of one machine.

    Attributes:
      device: JSON object that describes the machine: at least ``kind`` (``"cpu"`` or ``"cuda"``) and ``name``.
      properties: name -> `Property`, in the order of the names. `vocabulary` says what the usual names mean.
      environment: JSON object about the run that measured it (versions, load); empty for a datasheet.

    Hashable by its content, so that a map can be part of the key of a cache.
    """

    device: Mapping[str, Any]
    properties: Mapping[str, Property]
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "properties", dict(sorted(self.properties.items())))
        problems = self.problems()
        if problems:
            raise MapError(f"property map of {self.device.get('name', 'unnamed device')}: {'; '.join(problems)}")

    def problems(self) -> list[str]:
        """What is wrong with it: no description, a usual name in a unit of another dimension, a 0 that cannot be."""
        found = [f"device: expected {k}, found none" for k in ("kind", "name") if not self.device.get(k)]
        if self.device.get("kind") and self.device["kind"] not in KINDS:
            found.append(f"device.kind: expected {' or '.join(KINDS)}, found {self.device['kind']!r}")
        for name, p in self.properties.items():
            if not isinstance(p, Property):
                found.append(f"{name}: expected a Property, found {p!r}")
            elif (usual := known(name)) is not None and units.dimension(usual.unit) != units.dimension(p.unit):
                found.append(f"{name}: expected a unit like {usual.unit}, found {p.unit}")
            elif p.value < 0:
                found.append(f"{name}: expected no negative value, found {p.value}")
            elif p.value == 0 and usual is not None and not usual.zero:
                found.append(f"{name}: expected a value above 0, found {p.value}; leave out what is not known")
        return found

    @property
    def name(self) -> str:
        """The machine's name."""
        return str(self.device["name"])

    @property
    def kind(self) -> str:
        """``"cpu"`` or ``"cuda"``."""
        return str(self.device["kind"])

    def __contains__(self, name: object) -> bool:
        return name in self.properties

    def __getitem__(self, name: str) -> Property:
        if name not in self.properties:
            raise KeyError(f"{name}: not in the property map of {self.name}, which has {', '.join(self.properties)}")
        return self.properties[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.properties)

    def __len__(self) -> int:
        return len(self.properties)

    def get(self, name: str, unit: str) -> float | None:
        """The value of a property in `unit`, None where it is missing. Raises ValueError for another dimension."""
        found = self.properties.get(name)
        return None if found is None else units.convert(found.value, found.unit, unit)

    def first(self, names: tuple[str, ...], unit: str) -> tuple[str, float] | None:
        """The first of several properties that there is, with its value in `unit`; None where there is none."""
        return next(((n, v) for n in names if (v := self.get(n, unit)) is not None), None)

    @functools.cached_property
    def _content(self) -> str:
        return json.dumps(self.as_dict(), sort_keys=True, allow_nan=False)

    def __hash__(self) -> int:
        return hash(self._content)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, PropertyMap) and self._content == other._content)

    def __repr__(self) -> str:
        return f"PropertyMap({self.name!r}, {len(self)} properties)"

    # -- files ------------------------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """As it stands in a file."""
        return {
            "schema": SCHEMA,
            "device": dict(self.device),
            "environment": dict(self.environment),
            "properties": {name: _property_dict(p) for name, p in self.properties.items()},
        }

    def save(self, path: str | Path) -> None:
        """Writes it as JSON in one step."""
        write_json_atomic(Path(path), self.as_dict())

    @classmethod
    def from_dict(cls, value: Any, where: str = "property map") -> PropertyMap:
        """The map that `as_dict` gave. Raises MapError."""
        if not isinstance(value, dict) or value.get("schema") != SCHEMA:
            schema = value.get("schema") if isinstance(value, dict) else type(value).__name__
            raise MapError(f"{where}: expected an object of schema {SCHEMA}, found {schema!r}")
        for key in ("device", "properties", "environment"):
            if key not in value and key != "environment":
                raise MapError(f"{where}: expected an object {key!r}, found only {', '.join(sorted(value))}")
            if not isinstance(value.get(key, {}), dict):
                raise MapError(f"{where}: {key}: expected an object, found {str(value[key])[:80]!r}")
        try:
            properties = {name: _property(name, p) for name, p in value["properties"].items()}
            return cls(value["device"], properties, value.get("environment", {}))
        except MapError as error:
            raise MapError(f"{where}: {error}") from error

    @classmethod
    def load(cls, source: str | Path) -> PropertyMap:
        """Reads a map: a file, the folder of a run, or the name of one that comes with the package (``"h200"``).

        Raises MapError: there is no such file or shipped map, or it cannot be read.
        """
        path = Path(source)
        if (path / "map.json").is_file():
            path = path / "map.json"
        if path.suffix != ".json" and not path.is_file():
            path = SHIPPED / f"{str(source).lower()}.json"
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, IsADirectoryError):
            expected = f"a file, a folder that has map.json, or one of the shipped maps {', '.join(shipped())}"
            what = f"the folder {str(source)!r} without it" if Path(source).is_dir() else repr(str(source))
            raise MapError(f"property map: expected {expected}, found {what}") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise MapError(f"property map {source}: expected JSON, found text that is none ({error})") from error
        except OSError as error:
            raise MapError(f"property map {source}: cannot be read ({error})") from error
        return cls.from_dict(value, f"property map {source}")


def shipped() -> tuple[str, ...]:
    """Names of the maps that come with the package."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.json")))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _property_dict(p: Property) -> dict[str, Any]:
    return {**dataclasses.asdict(p), "interval": p.interval and list(p.interval), "probes": list(p.probes)}


def _property(name: str, value: Any) -> Property:
    fields = {f.name for f in dataclasses.fields(Property)}
    if not isinstance(value, dict) or not set(value) <= fields:
        raise MapError(f"{name}: expected an object with {', '.join(sorted(fields))}, found {str(value)[:80]}")
    missing = [f.name for f in dataclasses.fields(Property) if f.default is dataclasses.MISSING and f.name not in value]
    if missing:
        raise MapError(f"{name}: expected {', '.join(missing)} too, found only {', '.join(value) or 'nothing'}")
    try:
        return Property(**value)
    except MapError as error:
        raise MapError(f"{name}: {error}") from error
