"""The probes, one file each: every module of this folder exports one as ``PROBE``, and is found by being here."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from gpu_probe.probe import Probe


@functools.cache
def probes(kind: str | None = None) -> tuple[Probe, ...]:
    """The probes for a kind of device (all by default), by file name.

    Importing one needs nothing but the core dependencies; what it compiles and launches with is imported by `generate`.

    Raises:
      TypeError: a module has no ``PROBE``.
      ValueError: two probes have one name.
    """
    found: dict[str, Probe] = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        if module.name.startswith("_"):
            continue
        probe = getattr(importlib.import_module(f"{__name__}.{module.name}"), "PROBE", None)
        if not isinstance(probe, Probe):
            raise TypeError(f"gpu_probe.probes.{module.name}: expected a Probe named PROBE, found {probe!r}")
        if probe.name in found:
            raise ValueError(f"gpu_probe.probes.{module.name}: expected a new name, found {probe.name!r} again")
        found[probe.name] = probe
    return tuple(p for p in found.values() if kind in (None, p.kind))
