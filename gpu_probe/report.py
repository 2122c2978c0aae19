"""Maps, samples and comparisons as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from gpu_probe import units
from gpu_probe.compare import Difference
from gpu_probe.probe import Probe
from gpu_probe.property_map import Property, PropertyMap
from gpu_probe.runner import Failure
from gpu_probe.samples import Samples, point_key
from gpu_probe.statistics import summarize


def map_table(found: PropertyMap, methods: bool = False) -> Table:
    """Every property with its interval and source."""
    table = Table(title=f"{found.name} ({found.kind})")
    for column in ("property", "value", "interval", "source", *(("method",) if methods else ())):
        table.add_column(column, overflow="fold", justify="right" if column in ("value", "interval") else "left")
    for name in found:
        p = found[name]
        table.add_row(name, units.text(p.value, p.unit), _interval(p), p.source, *((p.method,) if methods else ()))
    return table


def _interval(p: Property) -> str:
    return "" if p.interval is None else " to ".join(units.text(x, p.unit) for x in p.interval)


def difference_table(differences: Sequence[Difference], title: str, heads: tuple[str, str]) -> Table:
    """Both values, their ratio, and whether they agree."""
    table = Table(title=title)
    for column in ("property", *heads, "ratio", "agree"):
        table.add_column(column, overflow="fold", justify="left" if column == "property" else "right")
    words = {True: "yes", False: "NO", None: "unknown"}
    for d in differences:
        shown = ["missing" if p is None else units.text(p.value, p.unit) for p in (d.first, d.second)]
        ratio = "" if d.ratio is None else f"{d.ratio:.2f}"
        table.add_row(d.name, *shown, ratio, words[d.agrees])
    return table


def probe_table(probes: Sequence[Probe], samples: Samples, failures: Sequence[Failure]) -> Table:
    """How many points, samples and outliers each probe has, and what failed."""
    table = Table(title="samples")
    for column in ("probe", "points", "samples", "outliers", "median spread", "failed"):
        table.add_column(column, justify="left" if column == "probe" else "right")
    for probe in probes:
        by_point: dict[str, list[float]] = {}
        for s in samples.of(probe.name):
            by_point.setdefault(point_key(s.point), []).append(s.value)
        found = [summarize(values) for values in by_point.values()]
        spreads = sorted((s.high - s.low) / s.median for s in found if s.median)
        failed = sum(f.probe == probe.name for f in failures)
        table.add_row(
            probe.name,
            str(len(by_point)),
            str(sum(s.count for s in found)),
            str(sum(len(s.outliers) for s in found)),
            f"{spreads[len(spreads) // 2]:.0%}" if spreads else "",
            str(failed) if failed else "",
        )
    return table


def probe_text(probe: Probe) -> str:
    """What a probe is, as `list` prints it."""
    lines = [f"{probe.name} ({probe.kind}): {probe.measures} [{probe.unit}]"]
    lines += [f"  {name}: {meaning}" for name, meaning in probe.parameters.items()]
    lines += [f"  expected: {probe.expected}", f"  gives: {', '.join(probe.properties)}"]
    return "\n".join([*lines, *(f"  caveat: {c}" for c in probe.caveats)])
