"""Units of properties and samples, and what they convert into."""

from __future__ import annotations

from collections.abc import Mapping

#: Unit -> (dimension, how many of the dimension's base unit it is).
UNITS: Mapping[str, tuple[str, float]] = {
    "s": ("time", 1.0),
    "ms": ("time", 1e-3),
    "us": ("time", 1e-6),
    "ns": ("time", 1e-9),
    "B": ("bytes", 1.0),
    "KiB": ("bytes", 2.0**10),
    "MiB": ("bytes", 2.0**20),
    "GiB": ("bytes", 2.0**30),
    "B/s": ("bandwidth", 1.0),
    "GB/s": ("bandwidth", 1e9),
    "TB/s": ("bandwidth", 1e12),
    "FLOP/s": ("operation rate", 1.0),
    "GFLOP/s": ("operation rate", 1e9),
    "TFLOP/s": ("operation rate", 1e12),
    "1/s": ("rate", 1.0),
    "G/s": ("rate", 1e9),
    "Hz": ("frequency", 1.0),
    "MHz": ("frequency", 1e6),
    "GHz": ("frequency", 1e9),
    "cycles": ("cycles", 1.0),
    "count": ("count", 1.0),
    "ratio": ("ratio", 1.0),
    "B/clk/SM": ("bytes per clock", 1.0),
    "FLOP/clk/SM": ("operations per clock", 1.0),
    "1/clk/SM": ("results per clock", 1.0),
}


def dimension(unit: str) -> str:
    """What a unit measures. Raises ValueError for one that is not in `UNITS`."""
    if unit not in UNITS:
        raise ValueError(f"unit: expected one of {', '.join(UNITS)}, found {unit!r}")
    return UNITS[unit][0]


def convert(value: float, unit: str, to: str) -> float:
    """`value` in another unit of the same dimension. Raises ValueError where the dimensions differ."""
    if dimension(unit) != dimension(to):
        raise ValueError(f"unit: expected one of {dimension(unit)} like {unit!r}, found {to!r} ({dimension(to)})")
    return value if unit == to else value * UNITS[unit][1] / UNITS[to][1]


def text(value: float, unit: str) -> str:
    """A value for people: in the largest unit of its dimension that leaves at least 1 before the point."""
    like = sorted((factor, name) for name, (kind, factor) in UNITS.items() if kind == dimension(unit))
    base = abs(value) * UNITS[unit][1]
    factor, name = next((f for f in reversed(like) if base >= f[0]), like[0])
    shown = "" if name in ("count", "ratio") else f" {name}"
    return f"{value * UNITS[unit][1] / factor:.4g}{shown}"
