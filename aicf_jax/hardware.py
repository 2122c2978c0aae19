"""What a property map tells of an operation: seconds by a simple model, and what a kernel needs of the machine.

The model adds what an operation would take if nothing overlapped: bytes over bandwidth, products over the rate of
their dtype, exponentials over theirs, and on a GPU launches times what one takes. Its parts are told apart; a part for
which the map lacks a property is named as missing and is not in the sum.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from aicf_jax.ops import FusedOp
from gpu_probe import units
from gpu_probe.property_map import PropertyMap
from mcir.schedule import BANDWIDTHS

#: What tells each, best first; ``{}`` is a dtype.
RATES = ("gemm.{}", "tensor.{}", "vector.{}")
EXPONENTIALS = ("sfu.exp_rate",)
LAUNCHES = ("launch.graph", "launch.stream")

#: Primitives of one exponential or about as much for each element.
_TRANSCENDENTAL = frozenset({"exp", "exp2", "expm1", "tanh", "logistic", "erf"})


@dataclasses.dataclass(frozen=True)
class Need:
    """What a kernel needs of a machine: a property that is there and at least so much.

    `at_least` is in `unit`; 0 asks for the property alone, as for tensor cores that know a dtype.
    """

    property: str
    at_least: float
    unit: str

    def unmet(self, found: PropertyMap) -> tuple[str, str] | None:
        """What was expected and what was found, None where it is met.

        Of a property that the map lacks nothing can be said, unless the map has others of its family: a map that lists
        tensor cores by dtype lists all there are.
        """
        value = found.get(self.property, self.unit)
        if value is None:
            family = self.property.split(".")[0] + "."
            others = [n for n in found if n.startswith(family)] if not self.at_least else []
            return (f"{self.property} of {found.name}", f"only {', '.join(others)}") if others else None
        if value >= self.at_least:
            return None
        expected = f"{self.property} of at least {units.text(self.at_least, self.unit)}"
        return expected, f"{units.text(value, self.unit)} ({found[self.property].source}, {found.name})"


@dataclasses.dataclass(frozen=True)
class Work:
    """What an operation does, whoever runs it: operations of its products by dtype, and exponentials."""

    products: Mapping[str, int]
    exponentials: int


def work_of(op: FusedOp) -> Work:
    """Counts ``dot_general`` (2 m n k) and `_TRANSCENDENTAL` in the equations; convolutions as products too.

    In full: what a kernel may skip, as tiles that a causal mask hides, is counted.
    """
    products: dict[str, int] = {}
    exponentials = 0
    for eqn in (e for step in op.steps for e in step.body.eqns):
        name, out = eqn.primitive.name, eqn.outvars[0].aval
        if name in _TRANSCENDENTAL:
            exponentials += math.prod(out.shape)
        elif name in ("dot_general", "conv_general_dilated"):
            dtype = str(eqn.invars[0].aval.dtype)
            products[dtype] = products.get(dtype, 0) + 2 * math.prod(out.shape) * _depth(eqn)
    return Work(products, exponentials)


def _depth(eqn: Any) -> int:
    """Terms of each sum of a product or a convolution."""
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
    kernel, (out, *_) = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"].rhs_spec
    return math.prod(kernel) // max(1, kernel[out])


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of one way to run an operation, by part.

    Attributes:
      seconds: part ("memory", "products", ...) -> seconds.
      used: names of the properties, each once.
      missing: names of those that the map lacks.
    """

    seconds: Mapping[str, float]
    used: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def total(self) -> float:
        """Sum of the known parts."""
        return sum(self.seconds.values())


def estimate(op: FusedOp, found: PropertyMap, moved_bytes: int, launches: int) -> Estimate:
    """An operation that moves so many bytes in so many launches."""
    work = work_of(op)
    parts: list[tuple[str, float, str, tuple[str, ...]]] = [("memory", float(moved_bytes), "B/s", BANDWIDTHS)]
    for dtype, flops in work.products.items():
        parts.append(("products", float(flops), "FLOP/s", tuple(n.format(dtype) for n in RATES)))
    if work.exponentials:
        parts.append(("exponentials", float(work.exponentials), "1/s", EXPONENTIALS))
    seconds: dict[str, float] = {}
    used, missing = [], []
    for part, amount, unit, names in parts:
        rate = found.first(names, unit)
        if rate is None or not rate[1]:
            missing.append(" or ".join(names))
            continue
        used.append(rate[0])
        seconds[part] = seconds.get(part, 0.0) + amount / rate[1]
    if found.kind != "cpu":
        one = found.first(LAUNCHES, "s")
        if one is None:
            missing.append(" or ".join(LAUNCHES))
        else:
            used.append(one[0])
            seconds["launches"] = launches * one[1]
    return Estimate(seconds, tuple(dict.fromkeys(used)), tuple(dict.fromkeys(missing)))


def ranking_seconds(found: PropertyMap | None, moved_bytes: int, launches: int) -> float | None:
    """What differs between two ways to run one operation: memory and launches. None without a bandwidth."""
    bandwidth = found.first(BANDWIDTHS, "B/s") if found is not None else None
    if found is None or bandwidth is None or not bandwidth[1]:
        return None
    one = found.first(LAUNCHES, "s") if found.kind != "cpu" else None
    return moved_bytes / bandwidth[1] + (launches * one[1] if one is not None else 0.0)


def text(found: PropertyMap, before: Estimate, after: Estimate, tiles: tuple[tuple[str, ...], tuple[str, ...]]) -> str:
    """For `explain`: both estimates by part, what they rest on, what is missing.

    `tiles` names the properties that tile sizes rest on, and those that are missing for them.
    """
    lines = [f"{found.name}: {_arrow(before.total, after.total)}"]
    for part in before.seconds:
        lines.append(f"{part}: {_arrow(before.seconds[part], after.seconds[part])}")
    lines.append(f"by {_sources(found, before.used)}")
    if tiles[0]:
        lines.append(f"tiles by {_sources(found, tiles[0])}")
    missing = dict.fromkeys((*before.missing, *tiles[1]))
    return "\n".join([*lines, *([f"missing {', '.join(missing)}"] if missing else [])])


def _arrow(before: float, after: float) -> str:
    if before == after:
        return units.text(before, "s")
    return f"{units.text(before, 's')} -> {units.text(after, 's')}"


def _sources(found: PropertyMap, names: tuple[str, ...]) -> str:
    return ", ".join(f"{n} {found[n]}" for n in names) or "nothing"
