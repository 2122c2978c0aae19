"""Finds the modules of a folder, in sorted order, by the one constant that each exports."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Protocol, TypeVar


class Named(Protocol):
    """Anything with a name: what a discovered constant must have."""

    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Named)


def discover(package: ModuleType, constant: str, kind: type[T]) -> dict[str, T]:
    """The `constant` of every module in `package` by its name, in the sorted order of the files.

    Modules whose name starts with an underscore are helpers and are passed over.

    Raises TypeError for a module without the constant or with one of another type, ValueError when two modules export
    the same name.
    """
    found: dict[str, T] = {}
    origin: dict[str, str] = {}
    for name in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
        if name.startswith("_"):
            continue
        module = importlib.import_module(f"{package.__name__}.{name}")
        value = getattr(module, constant, None)
        if not isinstance(value, kind):
            raise TypeError(f"{module.__name__} must export {constant}: {kind.__name__}, found {value!r}")
        if value.name in found:
            raise ValueError(f"{constant} name {value.name!r} in both {origin[value.name]} and {module.__name__}")
        found[value.name], origin[value.name] = value, module.__name__
    return found
