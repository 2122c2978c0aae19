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

#: A run is noisy where a probe's median spread is above this.
NOISY = 1.0


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


def spreads_of(probe: Probe, samples: Samples) -> list[float]:
    """The range of each point's samples over their median, ascending."""
    found = [summarize(values) for values in _by_point(probe, samples).values()]
    return sorted((s.high - s.low) / s.median for s in found if s.median)


def _by_point(probe: Probe, samples: Samples) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for s in samples.of(probe.name):
        found.setdefault(point_key(s.point), []).append(s.value)
    return found


def noise(probes: Sequence[Probe], samples: Samples, load: float | None, cores: int) -> str | None:
    """One line about a run that something disturbed, and what to do; None where nothing tells of that.

    Told by a load average above the number of cores, or by samples half of whose points spread over more than
    `NOISY` of their median.
    """
    causes = [f"load average {load} on {cores} cores"] if load is not None and load > cores else []
    wide = [p.name for p in probes if (found := spreads_of(p, samples)) and found[len(found) // 2] > NOISY]
    causes += [f"median spread above {NOISY:.0%} of {', '.join(wide)}"] if wide else []
    if not causes:
        return None
    return f"warning: a noisy run ({'; '.join(causes)}): stop what else runs here, and measure again with --fresh"


def probe_table(probes: Sequence[Probe], samples: Samples, failures: Sequence[Failure]) -> Table:
    """How many points, samples and outliers each probe has, and what failed."""
    table = Table(title="samples")
    for column in ("probe", "points", "samples", "outliers", "median spread", "failed"):
        table.add_column(column, justify="left" if column == "probe" else "right")
    for probe in probes:
        found = [summarize(values) for values in _by_point(probe, samples).values()]
        spreads = spreads_of(probe, samples)
        failed = sum(f.probe == probe.name for f in failures)
        table.add_row(
            probe.name,
            str(len(found)),
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
