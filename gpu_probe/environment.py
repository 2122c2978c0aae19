"""Facts about a run, for every package here: versions, cores, load, time."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from typing import Any


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_average() -> float | None:
    """Processes that wanted a core during the last minute, on average; None where the system does not count them."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def environment() -> dict[str, Any]:
    """Facts needed to read a result elsewhere: versions, backend, cores; no host name, user or path."""
    import jax

    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    return {
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")},
        "backend": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "architecture": platform.machine(),
        "cores": cores(),
    }


def now() -> str:
    """The time in UTC to the second, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
