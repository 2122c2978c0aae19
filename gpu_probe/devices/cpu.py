"""The CPU that this process runs on."""

from __future__ import annotations

import platform
from pathlib import Path

from gpu_probe.environment import cores
from gpu_probe.probe import DeviceError, Target

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_CPUINFO = Path("/proc/cpuinfo")
_SCALING = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq")


def connect(name: str | None = None, compile_only: bool = False) -> Target:
    """This machine. Raises DeviceError for a name: no other can be compiled for."""
    if name is not None:
        raise DeviceError(
            f"expected no name of a machine for kind cpu, which is always the one at hand, found {name!r}"
        )
    facts = {"architecture": platform.machine(), "cores": cores(), "caches": caches()}
    return Target("cpu", model_name(), facts, present=not compile_only)


def model_name(cpuinfo: Path = _CPUINFO) -> str:
    """What the processor calls itself, else its architecture."""
    return _cpuinfo("model name", cpuinfo) or platform.processor() or platform.machine() or "unknown CPU"


def _cpuinfo(key: str, path: Path) -> str:
    """The first value of a key, empty where there is none."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in found if name.strip() == key), "")


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


def clock_hz(scaling: Path = _SCALING, cpuinfo: Path = _CPUINFO) -> float | None:
    """The clock of the first core now. A virtual machine may tell its nominal clock; None where nothing is told."""
    try:
        return float(scaling.read_text(encoding="ascii")) * 1e3
    except (OSError, ValueError):
        told = _cpuinfo("cpu MHz", cpuinfo)
        return float(told) * 1e6 if told else None
