"""Results for people: tables and a chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments._io import write_atomic
from experiments.benchmarks.bars import RATIO_BAR, REWRITE_BAR
from pallas_kernels.aot.report import bytes_text


def remark(entry: dict[str, Any]) -> str:
    """What a reader should know beside the numbers: same program, wrong values, or the fused operations."""
    if not entry["agrees"]:
        return "values differ"
    if entry["identical_program"]:
        return "identical program"
    return ", ".join(f"{count} {op}" for op, count in entry["fusions"].items())


def ratio_text(entry: dict[str, Any]) -> str:
    """Median and interval of the ratio, for a log line."""
    ratio = entry["ratio"]
    return f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}, {ratio['pairs']} pairs)"


def suite_table(entries: dict[str, dict[str, Any]]) -> Table:
    """One row a measured entry, one line a failed one."""
    table = Table(title="fused against jax.jit of the unfused program")
    for heading in ("program", "mode", "unfused ms", "fused ms", "ratio", "95 % interval", "IQR", "temporaries", ""):
        table.add_column(heading, justify="left" if heading in ("program", "mode", "") else "right")
    for key, entry in entries.items():
        program, mode = key.split("/")
        if entry["status"] == "failed":
            table.add_row(program, mode, *[""] * 6, f"failed: {entry['error']}")
            continue
        ratio = entry["ratio"]
        before, after = (entry[side]["temporaries_bytes"] for side in ("unfused", "fused"))
        table.add_row(
            program,
            mode,
            f"{entry['unfused']['median_ns'] / 1e6:.2f}",
            f"{entry['fused']['median_ns'] / 1e6:.2f}",
            f"{ratio['median']:.3f}",
            f"{ratio['low']:.3f} to {ratio['high']:.3f}",
            f"{ratio['q3'] - ratio['q1']:.3f}",
            bytes_text(before) if before == after else f"{bytes_text(before)} -> {bytes_text(after)}",
            remark(entry),
        )
    return table


def rewrite_table(key: str, entry: dict[str, Any]) -> Table:
    """Seconds in jit, seconds added by rewriting, and what a second call still does."""
    table = Table(title=f"rewriting {key}")
    table.add_column("measure")
    table.add_column("value", justify="right")
    low, high = entry["fraction_extremes"]
    table.add_row("jit of the unfused model: trace, lower, compile", f"{entry['jit_s']:.2f} s")
    table.add_row("added by fusing before compilation", f"{entry['rewriting_s']:.2f} s")
    table.add_row(f"fraction (bar {REWRITE_BAR:.0%})", f"{entry['fraction']:.1%} ({low:.1%} to {high:.1%})")
    for call, work in entry["second_calls"].items():
        table.add_row(f"second {call} call", f"{work['rewrites']} rewrites, {work['traces']} traces")
    return table


def print_table(console: Console, table: Table) -> None:
    """Prints `table`, in a log at full width: a log has no edge to wrap at."""
    if not console.is_terminal:
        console = Console(file=console.file, width=500, force_terminal=False)
    console.print(table)


def _color(entry: dict[str, Any]) -> str:
    if entry["identical_program"]:
        return "0.7"
    return "C1" if entry["ratio"]["median"] > RATIO_BAR else "C0"


def ratio_chart(entries: dict[str, dict[str, Any]], path: Path) -> None:
    """Writes a PNG: a bar for the ratio of each measured entry with its interval, the bar line, and 1."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = {key: entry for key, entry in reversed(entries.items()) if entry["status"] == "measured"}
    ratios = [entry["ratio"] for entry in measured.values()]
    medians = [ratio["median"] for ratio in ratios]
    errors = [
        [ratio["median"] - ratio["low"] for ratio in ratios],
        [ratio["high"] - ratio["median"] for ratio in ratios],
    ]
    colors = [_color(entry) for entry in measured.values()]
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.28 * len(measured)), layout="constrained")
    try:
        axes.barh(list(measured), medians, xerr=errors, color=colors, ecolor="0.2", capsize=2)
        axes.axvline(1.0, color="0.2", linewidth=0.8)
        axes.axvline(RATIO_BAR, color="C3", linestyle="--", linewidth=1, label=f"bar {RATIO_BAR}")
        axes.set_xlabel("time of fused / time of unfused: median of pairs, 95 % interval\ngrey: identical program")
        # from 0, so that lengths compare as the ratios do
        axes.set_xlim(0.0, 1.1 * max([RATIO_BAR, *(ratio["high"] for ratio in ratios)]))
        axes.margins(y=0.01)
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False)
        write_atomic(path, lambda temporary: figure.savefig(temporary, dpi=120))
    finally:
        pyplot.close(figure)
