"""A run for people: table, texts and picture, all from its record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from experiments._io import write_atomic
from experiments.benchmarks.report import bytes_text
from experiments.text_lm.config import PROMPT_LENGTH
from experiments.text_lm.train import VARIANTS

FILE_NAME = "text_lm.png"
# the last steps whose mean stands for "the loss at the end"
LAST = 10

Record = dict[str, Any]


def table(record: Record) -> Table:
    """Losses, time and temporaries of both variants, and fused over unfused."""
    view = Table(title="the same model, data and initial values")
    for name in ("", *VARIANTS, "fused / unfused"):
        view.add_column(name, justify="right" if name else "left")
    losses = _columns(record["history"]["losses"])
    view.add_row("training loss, first step", *(f"{losses[name][0]:.4f}" for name in VARIANTS), "")
    ends = {name: losses[name][-LAST:] for name in VARIANTS}
    view.add_row(f"training loss, last {len(ends['fused'])}", *(f"{_mean(ends[name]):.4f}" for name in VARIANTS), "")
    validation = (float(record["validation"][name]) for name in VARIANTS)
    view.add_row("validation loss", *(f"{value:.4f}" for value in validation), "")
    steps, ratio = record["steps"], record["ratio"]
    told = f"{ratio['median']:.3f}"
    if "low" in ratio:
        told += f" ({ratio['low']:.3f} to {ratio['high']:.3f})"
    view.add_row("ms / step", *(f"{steps[name]['median_ns'] / 1e6:.1f}" for name in VARIANTS), told)
    sizes = (bytes_text(steps[name]["temporaries_bytes"]) for name in VARIANTS)
    part = record["temporaries_ratio"]
    view.add_row("temporaries of a step", *sizes, "" if part is None else f"{part:.3f}")
    view.add_row("compilation, s", *(f"{steps[name]['compile_s']:.1f}" for name in VARIANTS), "")
    return view


def fusion_line(fusions: dict[str, int] | None) -> str | None:
    """The fused operations of the model by name; None where nobody was asked."""
    if fusions is None:
        return None
    told = ", ".join(f"{count} {op}" for op, count in fusions.items())
    return f"fused operations in the model: {told or 'none, so comparing the variants says nothing'}"


def sample_lines(record: Record) -> list[str]:
    """The texts, prompt and continuation apart; one of the unfused model only where it differs."""
    lines = []
    for number, text in enumerate(record["samples"]["fused"]):
        other = record["samples"]["unfused"][number]
        alike = "and the unfused model the same" if other == text else "the unfused model differs"
        lines += [f"-- text {number + 1}: prompt {text[:PROMPT_LENGTH]!r}, the fused model goes on ({alike}):"]
        lines += [text[PROMPT_LENGTH:]]
        if other != text:
            lines += ["-- the unfused model:", other[PROMPT_LENGTH:]]
    return lines


def plot(record: Record, path: Path) -> Path:
    """Loss over steps (fused line, unfused markers, validation), and below the difference with its bound."""
    figure = Figure(figsize=(8, 7), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    losses = _columns(record["history"]["losses"])
    steps = range(len(losses["fused"]))
    every = max(1, len(steps) // 60)
    top.plot(steps, losses["fused"], color="C0", label="fused, training")
    top.plot(
        steps, losses["unfused"], "o", markevery=every, color="C1", markerfacecolor="none", label="unfused, training"
    )
    done = [row[0] - 1 for row in record["history"]["validation"]]
    held_out = _columns([row[1:] for row in record["history"]["validation"]])
    top.plot(done, held_out["fused"], "s-", color="C2", linewidth=0.8, label="fused, validation")
    top.plot(done, held_out["unfused"], "x", color="C3", label="unfused, validation")
    top.set_ylabel("cross-entropy, nats / character")
    curve = record["curve"]
    # a logarithmic axis has no zero: steps without any difference leave a gap
    shown = [value if 0 < value < float("inf") else None for value in map(float, curve["differences"])]
    bottom.plot(steps, [float("nan") if value is None else value for value in shown], ".", color="C0", label="found")
    bottom.plot(steps, list(map(float, curve["bounds"])), "--", color="C3", linewidth=1, label="rounding allows")
    bottom.set_yscale("log")
    bottom.set_ylabel("|fused - unfused|")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.grid(True, which="major", color="0.9", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    write_atomic(path, lambda temporary: figure.savefig(temporary, dpi=110))
    return path


def _columns(rows: list[list[float]]) -> dict[str, list[float]]:
    """Pairs to a list for each variant; numbers that are not finite may come as text."""
    return {name: [float(row[place]) for row in rows] for place, name in enumerate(VARIANTS)}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
