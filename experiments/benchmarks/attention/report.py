"""The attention study for people: a table, and time and temporaries over sequence length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from rich.table import Table
from rich.text import Text

from experiments._io import write_atomic
from experiments.benchmarks.attention.cases import STACK
from experiments.benchmarks.attention.spellings import MODES
from experiments.benchmarks.report import bytes_text

Entries = dict[str, dict[str, Any]]

_TITLES = {"forward": "forward", "grad": "forward and backward"}


def entry_text(entry: dict[str, Any]) -> str:
    """One entry for a log line: its ratio or why there is none, and what a reader should know beside it."""
    ratio = entry["ratio"]
    if ratio is None:
        return remark(entry)
    median = f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}, {ratio['pairs']} pairs)"
    return f"{median} {remark(entry)}".rstrip()


def remark(entry: dict[str, Any]) -> str:
    """What was not run, whether values differ or were compared in part, and the fused operations by name."""
    parts = [entry["not_run"]] if entry["not_run"] else []
    if entry["agrees"] is False:
        parts.append("values differ")
    if entry["compared"] != "all":
        parts.append(f"{entry['compared']} compared")
    if entry["identical_program"]:
        parts.append("identical program")
    parts += [f"{count} {op}" for op, count in entry["fusions"].items()]
    return "; ".join(parts)


def attention_table(entries: Entries, absent: list[str]) -> Table:
    """One row an entry; the caption names the libraries that are not installed."""
    caption = Text("\n".join(absent)) if absent else None
    table = Table(title="fused against jax.jit of the unfused spelling, and against other libraries", caption=caption)
    headings = ("baseline", "length", "mode", "baseline ms", "fused ms", "ratio", "95 % interval")
    for heading in (*headings, "temporaries", "of it", "difference", ""):
        table.add_column(heading, justify="left" if heading in ("baseline", "mode", "") else "right")
    for key, entry in entries.items():
        baseline, length, mode = key.split("/")
        if entry["status"] == "failed":
            table.add_row(baseline, length[1:], mode, *[""] * 7, f"failed: {entry['error']}")
            continue
        ratio = entry["ratio"]
        table.add_row(
            baseline,
            length[1:],
            mode,
            *(_milliseconds(entry[side]["median_ns"]) for side in ("unfused", "fused")),
            f"{ratio['median']:.3f}" if ratio else "",
            f"{ratio['low']:.3f} to {ratio['high']:.3f}" if ratio else "",
            *_temporaries(entry),
            _difference(entry),
            remark(entry),
        )
    return table


def _milliseconds(median_ns: int | None) -> str:
    return "not run" if median_ns is None else f"{median_ns / 1e6:.2f}"


def _temporaries(entry: dict[str, Any]) -> tuple[str, str]:
    """Before and after, and after as a part of before; "unknown" is not zero."""
    before, after = (entry[side]["temporaries_bytes"] for side in ("unfused", "fused"))
    if before is None:
        return f"unknown -> {bytes_text(after)}", ""
    part = f"1/{before / after:.1f}" if 0 < after < before else f"{after / before:.2f}" if before else ""
    return f"{bytes_text(before)} -> {bytes_text(after)}", part


def _difference(entry: dict[str, Any]) -> str:
    """The largest relative difference and what rounding allows."""
    if entry["agrees"] is None:
        return ""
    difference = entry["max_relative_difference"]
    return f"{'inf' if difference is None else f'{difference:.1e}'} of {entry['tolerance']:.1e}"


def attention_chart(entries: Entries, path: Path) -> Path:
    """Writes a PNG: for each mode the time ratio and the temporaries over sequence length, all axes logarithmic."""
    figure = Figure(figsize=(11, 7.6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, len(MODES), squeeze=False, sharex=True, sharey="row")
    measured = [entry for entry in entries.values() if entry["status"] == "measured" and entry["baseline"] != STACK]
    baselines = list(dict.fromkeys(entry["baseline"] for entry in measured))
    for column, mode in enumerate(MODES):
        times, temporaries = grid[0, column], grid[1, column]
        for axes in (times, temporaries):
            _dress(axes, sorted({entry["length"] for entry in measured}))
        for number, baseline in enumerate(baselines):
            chosen = [entry for entry in measured if (entry["baseline"], entry["mode"]) == (baseline, mode)]
            _draw_ratios(times, chosen, baseline, f"C{number}")
            _draw_temporaries(temporaries, chosen, baseline, f"C{number}")
        times.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        times.yaxis.set_major_formatter("{x:g}")
        times.yaxis.set_minor_formatter(NullFormatter())
        times.axhline(1.0, color="0.2", linewidth=0.8)
        times.set_title(_TITLES[mode], fontsize=11)
        temporaries.set_xlabel("sequence length")
        for axes in (times, temporaries):
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=8, frameon=False)
    grid[0, 0].set_ylabel("time of fused / time of baseline")
    grid[1, 0].set_ylabel("temporaries, bytes\ndashed: baseline, solid: fused")
    write_atomic(path, lambda temporary: figure.savefig(temporary, dpi=110))
    return path


def _draw_ratios(axes: Axes, entries: list[dict[str, Any]], label: str, color: str) -> None:
    """Medians with their intervals; a length at which either was not run has no point."""
    ratios = [(entry["length"], entry["ratio"]) for entry in entries if entry["ratio"] is not None]
    if not ratios:
        return
    medians = [ratio["median"] for _, ratio in ratios]
    low = [ratio["median"] - ratio["low"] for _, ratio in ratios]
    high = [ratio["high"] - ratio["median"] for _, ratio in ratios]
    lengths = [length for length, _ in ratios]
    axes.errorbar(lengths, medians, yerr=[low, high], color=color, marker="o", markersize=4, capsize=2, label=label)


def _draw_temporaries(axes: Axes, entries: list[dict[str, Any]], label: str, color: str) -> None:
    """Both programs; no point for zero bytes, which a logarithmic axis lacks, nor for an unknown number."""
    for side, style in (("unfused", "--"), ("fused", "-")):
        found = [(entry["length"], entry[side]["temporaries_bytes"]) for entry in entries]
        found = [(length, count) for length, count in found if count]
        if found:
            lengths, counts = zip(*found, strict=True)
            axes.plot(lengths, counts, style, color=color, marker="o", markersize=4, label=f"{label}, {side}")


def _dress(axes: Axes, lengths: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    if lengths:
        axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.grid(True, which="major", color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
