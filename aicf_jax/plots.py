"""`Report.plot`: a report as a matplotlib figure, for notebooks. The only module here that needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mcir

if TYPE_CHECKING:
    from aicf_jax.report import Report

#: Fusions and programs drawn; the title says how many are not.
MAX_FUSIONS, MAX_PROGRAMS = 40, 4
_BEFORE, _AFTER = "#8a94a6", "#0f8a70"


def plot(report: Report) -> Any:
    """Bars of bytes before and after for each fusion; below, the buffer lifetimes of each streamed program.

    Raises:
      ImportError: matplotlib is not there; the message names the extra.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Report.plot() needs matplotlib, which is in the extra `experiments`: pip install 'aicf-jax[experiments]'"
        ) from error
    programs = [p for text, name in _programs(report) if (p := _parsed(text, name)) is not None]
    shown = report.fusions[:MAX_FUSIONS]
    heights = [1.2 + 0.45 * max(1, len(shown)), *(1.0 + 0.2 * len(mcir.lifetimes(p)) for _, p in programs)]
    figure = Figure(figsize=(9.0, sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    _bytes(axes[0], report, shown)
    for ax, (name, program) in zip(axes[1:], programs, strict=True):
        _lifetimes(ax, name, program)
    return figure


def _programs(report: Report) -> list[tuple[str, str]]:
    """Each different program once, with the name of what runs it first; no more than are drawn."""
    found: dict[str, str] = {}
    for f in report.fusions:
        for text, name in ((f.program, f.op), (f.backward_program, f"{f.op} backward")):
            if text:
                found.setdefault(text, f"{name}, {f.site}")
    return list(found.items())[:MAX_PROGRAMS]


def _parsed(text: str, name: str) -> tuple[str, mcir.Program] | None:
    """A kernel may print a program of another kind: it has no lifetimes here."""
    try:
        return name, mcir.parse(text)
    except mcir.ParseError:
        return None


def _bytes(ax: Any, report: Report, shown: Any) -> None:
    rest = len(report.fusions) - len(shown)
    ax.set_title(f"{report.target}: bytes between memory and chip" + (f" ({rest} more fusions)" if rest else ""))
    if not shown:
        ax.text(0.5, 0.5, "no fusions", ha="center", va="center", transform=ax.transAxes)
        ax.set_axis_off()
        return
    places = range(len(shown))
    ax.barh([p - 0.2 for p in places], [f.bytes_before for f in shown], 0.38, color=_BEFORE, label="one kernel each")
    ax.barh([p + 0.2 for p in places], [f.bytes_after for f in shown], 0.38, color=_AFTER, label="one kernel in all")
    ax.set_yticks(list(places), [f"#{k + 1} {f.op}" for k, f in enumerate(shown)])
    ax.invert_yaxis()
    ax.set_xlabel("bytes")
    ax.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4))
    ax.legend(frameon=False)


def _lifetimes(ax: Any, name: str, program: mcir.Program) -> None:
    found = mcir.lifetimes(program)
    ax.set_title(f"{name}: on chip, at most {mcir.peak_bytes(program):,} bytes", fontsize="medium", wrap=True)
    for k, v in enumerate(found):
        ax.broken_barh([(v.first + 0.5, v.last - v.first + 1)], (k - 0.4, 0.8), color=_BEFORE if v.reuses else _AFTER)
    ax.set_yticks(range(len(found)), [v.name for v in found], fontsize="x-small")
    ax.invert_yaxis()
    ax.set_xlabel("statement (grey: takes over the storage of another value)")
