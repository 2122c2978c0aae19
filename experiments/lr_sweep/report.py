"""What a reader sees: a table of all members and a picture of all cells."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter
from rich.table import Table

from experiments.lr_sweep.config import Cell, SweepConfig
from experiments.lr_sweep.store import CellResult, Results
from experiments.lr_sweep.train import Outcome
from experiments.lr_sweep.verdict import Verdict

FILE_NAME = "sweep.png"
_COLORS = {"float32": "#1f77b4", "bfloat16": "#d9730d"}
_WIDTHS = {"float32": 3.2, "bfloat16": 1.4}  # the narrow line is drawn on the wide one, so both stay visible
_MARKERS = {"float32": "o", "bfloat16": "D"}


def table(config: SweepConfig, results: Results) -> Table:
    """One row a member. A single value stands for both variants; where they differ it is fused | unfused."""
    title = "fused | unfused where they differ; the others are alike to the digits shown"
    view = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for name in ("inputs", "optimizer", "dtype"):
        view.add_column(name, no_wrap=True)
    for name in ("lr", "test loss", "accuracy", "diverged @ step", "grad diff"):
        view.add_column(name, justify="right", no_wrap=True)
    for cell in config.cells():
        if cell not in results:
            continue
        for index, rate in enumerate(config.learning_rates):
            names = (cell.inputs, cell.optimizer, cell.dtype) if index == 0 else ("", "", "")
            last = index == len(config.learning_rates) - 1
            view.add_row(*names, f"{rate:g}", *_row(results[cell], index), end_section=last)
    return view


def _row(result: CellResult, index: int) -> tuple[str, ...]:
    pair = (result.fused, result.unfused)
    return (
        _pair(f"{outcome.loss[index]:.3g}" for outcome in pair),
        _pair(f"{outcome.accuracy[index]:.3f}" for outcome in pair),
        _pair(_when(outcome, index) for outcome in pair),
        f"{result.gradient.per_rate[index]:.1e}",
    )


def _pair(texts: Iterable[str]) -> str:
    fused, unfused = texts
    return fused if fused == unfused else f"{fused} | {unfused}"


def _when(outcome: Outcome, index: int) -> str:
    divergence = outcome.diverged[index]
    return "-" if divergence is None else f"{divergence.kind} @ {divergence.first[divergence.kind]}"


def cell_line(cell: Cell, config: SweepConfig, result: CellResult) -> str:
    """A cell in one line, for logs."""
    best = max(range(len(config.learning_rates)), key=lambda index: result.fused.accuracy[index])
    gradient = result.gradient
    return (
        f"{cell}: best accuracy {result.fused.accuracy[best]:.3f} at lr {config.learning_rates[best]:g}; "
        f"diverged fused {_rates(config, result.fused)}, unfused {_rates(config, result.unfused)}; "
        f"gradient difference {gradient.max_difference:.1e} (bound {gradient.bound:.1e})"
    )


def _rates(config: SweepConfig, outcome: Outcome) -> str:
    rates = [f"{rate:g}" for rate, bad in zip(config.learning_rates, outcome.diverged, strict=True) if bad is not None]
    return "{" + ", ".join(rates) + "}"


def plot(config: SweepConfig, results: Results, verdict: Verdict, path: Path) -> Path:
    """Accuracy and loss over the learning rate, a column for each optimizer, two rows for each input scaling.

    Fused is the line, unfused the marker on it; a cross marks a member that diverged (fused x, unfused +).
    """
    rows = [(inputs, metric) for inputs in config.inputs for metric in ("accuracy", "loss")]
    size = (4.2 * len(config.optimizers) + 0.8, 2.35 * len(rows) + 1.9)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(rows), len(config.optimizers), squeeze=False, sharex=True, sharey="row")
    for row, (inputs, metric) in enumerate(rows):
        for column, optimizer in enumerate(config.optimizers):
            axes = grid[row, column]
            for dtype in config.dtypes:
                if (result := results.get(Cell(inputs, optimizer, dtype))) is not None:
                    _draw(axes, config, dtype, metric, result)
            _dress(axes, config, metric)
            if row % 2 == 0:
                axes.set_title(f"{optimizer}, {inputs} inputs", fontsize=11)
            if column == 0:
                axes.set_ylabel(f"test {metric}")
            if row == len(rows) - 1:
                axes.set_xlabel("learning rate")
    figure.align_ylabels(grid[:, 0])
    figure.suptitle("\n".join(line for line in verdict.lines() if not line.startswith(" ")), fontsize=10)
    figure.legend(handles=_legend(config), loc="outside lower center", ncols=len(config.dtypes) + 2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def _draw(axes: Axes, config: SweepConfig, dtype: str, metric: str, result: CellResult):
    rates, color = config.learning_rates, _COLORS[dtype]
    fused = _alive(result.fused, metric)
    axes.plot(rates, fused, color=color, linewidth=_WIDTHS[dtype], alpha=0.75)
    unfused = _alive(result.unfused, metric)
    size = 7.5 if dtype == "float32" else 4.5
    axes.plot(rates, unfused, _MARKERS[dtype], color=color, markerfacecolor="none", markersize=size)
    # Diverged members have no meaningful value: they are marked on the frame (accuracy: bottom, loss: top). A dtype
    # keeps its own height, so its crosses do not hide the other's.
    height = 0.06 + 0.09 * config.dtypes.index(dtype)
    height = height if metric == "accuracy" else 1 - height
    for outcome, marker in ((result.fused, "x"), (result.unfused, "+")):
        bad = [rate for rate, divergence in zip(rates, outcome.diverged, strict=True) if divergence is not None]
        level = [height] * len(bad)
        axes.plot(bad, level, marker, color=color, markersize=8, transform=axes.get_xaxis_transform())


def _alive(outcome: Outcome, metric: str) -> list[float]:
    """Values of the members that did not diverge, NaN for the others, which leaves a gap in a line."""
    values = outcome.loss if metric == "loss" else outcome.accuracy
    return [value if bad is None else math.nan for value, bad in zip(values, outcome.diverged, strict=True)]


def _dress(axes: Axes, config: SweepConfig, metric: str):
    axes.set_xscale("log")
    axes.set_xlim(config.learning_rates[0] / 1.6, config.learning_rates[-1] * 1.6)
    axes.grid(True, which="major", color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    if metric == "accuracy":
        axes.set_ylim(-0.03, 1.03)
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())


def _legend(config: SweepConfig) -> list[Line2D]:
    handles = []
    for dtype in config.dtypes:
        style = {"linewidth": _WIDTHS[dtype], "marker": _MARKERS[dtype], "markerfacecolor": "none"}
        handles.append(Line2D([], [], color=_COLORS[dtype], label=f"{dtype}: fused line, unfused marker", **style))
    handles.append(Line2D([], [], color="0.3", linestyle="", marker="x", label="fused diverged"))
    handles.append(Line2D([], [], color="0.3", linestyle="", marker="+", label="unfused diverged"))
    return handles
