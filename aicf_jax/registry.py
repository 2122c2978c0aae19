"""Discovery: every module of a folder exports one constant; a new file is all that an addition needs."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any


def discover(package: ModuleType | str, constant: str) -> list[Any]:
    """The `constant` of each public module of a package, in the sorted order of the module names.

    Raises:
      TypeError: a module without the constant, named.
    """
    package = importlib.import_module(package) if isinstance(package, str) else package
    found = []
    for name in sorted(info.name for info in pkgutil.iter_modules(package.__path__) if not info.name.startswith("_")):
        module = importlib.import_module(f"{package.__name__}.{name}")
        if not hasattr(module, constant):
            raise TypeError(f"{module.__name__}: expected a constant {constant}, found none")
        found.append(getattr(module, constant))
    return found


def unique(items: list[Any], key: str) -> list[Any]:
    """`items` unchanged. Raises ValueError when two have the same attribute `key`."""
    seen: dict[Any, Any] = {}
    for item in items:
        name = getattr(item, key)
        if name in seen:
            raise ValueError(f"two entries with {key}={name!r}: {seen[name]!r} and {item!r}")
        seen[name] = item
    return items
