"""Two maps side by side: do they agree within the spread that they state?"""

from __future__ import annotations

import dataclasses

from gpu_probe import units
from gpu_probe.property_map import Property, PropertyMap
from gpu_probe.staircase import size_class

#: By so much of the larger may two stated values differ that are the same: papers round.
ROUNDING = 0.02


@dataclasses.dataclass(frozen=True)
class Difference:
    """One property of two maps, the second in the first's unit.

    Attributes:
      name: of the property.
      first, second: None where a map lacks it.
      ratio: of the second to the first; None where one is missing or the first is 0.
      agrees: whether they are alike (`alike`); None where that cannot be told.
    """

    name: str
    first: Property | None
    second: Property | None
    ratio: float | None
    agrees: bool | None


def compare(first: PropertyMap, second: PropertyMap) -> list[Difference]:
    """Every property of either map, by name."""
    found = []
    for name in sorted({*first, *second}):
        a, b = first.properties.get(name), second.properties.get(name)
        if a is not None and b is not None:
            b = b.to(a.unit)
            found.append(Difference(name, a, b, b.value / a.value if a.value else None, alike(a, b)))
        else:
            found.append(Difference(name, a, b, None, None))
    return found


def alike(a: Property, b: Property) -> bool | None:
    """Whether two values of one unit agree.

    Two that nobody measured, without intervals, do within `ROUNDING`. Sizes of which one was measured do within one
    class (`size_class`). Other values do where their intervals meet, or a value without one lies in the other's; of two
    values without intervals nothing can be told unless they are equal.
    """
    if "measured" not in (a.source, b.source) and a.interval is None and b.interval is None:
        return abs(a.value - b.value) <= ROUNDING * max(a.value, b.value)
    if units.dimension(a.unit) == "bytes":
        return min(a.value, b.value) > 0 and abs(size_class(a.value) - size_class(b.value)) <= 1
    if a.interval is None and b.interval is None:
        return True if a.value == b.value else None
    (low, high), (least, most) = (p.interval or (p.value, p.value) for p in (a, b))
    return low <= most and least <= high


def against_system(found: PropertyMap) -> list[Difference]:
    """The measured caches of a CPU against what its system states (`device["caches"]`)."""
    differences = []
    for cache in found.device.get("caches", ()):
        for name, key in ((f"l{cache['level']}.size", "bytes"), ("line.size", "line_bytes")):
            stated = Property(cache[key], "B", "datasheet", "as the system describes it")
            own = found.properties.get(name)
            agrees = alike(stated, own.to("B")) if own is not None else None
            ratio = own.to("B").value / stated.value if own is not None else None
            entry = Difference(name, stated, own and own.to("B"), ratio, agrees)
            if name not in [d.name for d in differences]:
                differences.append(entry)
    return differences
