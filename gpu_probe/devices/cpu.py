"""The CPU that this process runs on."""

from __future__ import annotations

import platform
from pathlib import Path

from gpu_probe.environment import cores
from gpu_probe.probe import DeviceError, Target

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_CPUINFO = Path("/proc/cpuinfo")


def connect(name: str | None = None, compile_only: bool = False) -> Target:
    """This machine. Raises DeviceError for a name: no other can be compiled for."""
    if name is not None:
        raise DeviceError(
            f"expected no name of a machine for kind cpu, which is always the one at hand, found {name!r}"
        )
    facts = {"architecture": platform.machine(), "cores": cores(), "caches": caches()}
    return Target("cpu", model_name(), facts, present=not compile_only)


def model_name(path: Path = _CPUINFO) -> str:
    """What the processor calls itself, else its architecture."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "unknown CPU"


def caches(folder: Path = _CACHES) -> list[dict[str, int | str]]:
    """Level, bytes and line of each cache for data, as the system describes them; empty where it does not."""
    found: list[dict[str, int | str]] = []
    for index in sorted(folder.glob("index*")):
        try:
            level, kind, size, line, shared = (
                (index / n).read_text(encoding="ascii").strip()
                for n in ("level", "type", "size", "coherency_line_size", "shared_cpu_list")
            )
            entry = {"level": int(level), "bytes": _bytes(size), "line_bytes": int(line), "shared_by": shared}
        except (OSError, ValueError):
            continue
        if kind != "Instruction":
            found.append(entry)
    return sorted(found, key=lambda c: c["level"])


def _bytes(text: str) -> int:
    """``32K`` and the like."""
    unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:].upper(), 1)
    return int(text.rstrip("KkMmGg")) * unit
