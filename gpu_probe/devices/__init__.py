"""Kinds of device, one file each: a module named after the kind has ``connect(name, compile_only) -> Target``."""

from __future__ import annotations

import importlib
import pkgutil

from gpu_probe.probe import DeviceError, Target


def kinds() -> tuple[str, ...]:
    """The kinds there are."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")))


def connect(kind: str, name: str | None = None, compile_only: bool = False) -> Target:
    """The device of a kind that is here, or with `compile_only` a described one that need not be (``"h200"``).

    Raises:
      DeviceError: there is none, or it cannot be used.
    """
    if kind not in kinds():
        raise DeviceError(f"expected a device of kind {' or '.join(kinds())}, found {kind!r}")
    return importlib.import_module(f"{__name__}.{kind}").connect(name, compile_only)
