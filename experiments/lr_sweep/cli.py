"""Command line: arguments, progress, exit codes."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import aicf_jax
from experiments.lr_sweep import config as config_lib
from experiments.lr_sweep import model as model_lib
from experiments.lr_sweep import report, sweep
from experiments.lr_sweep.config import Cell, ConfigError, SweepConfig
from experiments.lr_sweep.data import NUM_FEATURES
from experiments.lr_sweep.store import CellResult, Store
from experiments.lr_sweep.verdict import Verdict, judge

EXIT_PASSED, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
_EPILOG = """exit codes: 0 fused and unfused agree (members may diverge, alike); 1 they disagree on which rates diverge,
or their gradients differ by more than rounding explains; 2 an argument is unusable; 130 interrupted, run again to
resume."""


def parser() -> argparse.ArgumentParser:
    """Arguments. A flag that is not given leaves the default of the configuration (or of --quick)."""
    default, small = SweepConfig(), config_lib.quick()
    top = argparse.ArgumentParser(
        prog="python -m experiments.lr_sweep",
        description="Train an MLP on digits, fused and unfused, over learning rates x optimizers x dtypes x inputs.",
        epilog=_EPILOG,
    )

    def add(flag: str, text: str, **options):
        field = flag[2:].replace("-", "_")
        value = getattr(default, field)
        shown = " ".join(map(_shown, value if isinstance(value, tuple) else (value,)))
        top.add_argument(flag, default=None, help=f"{text} (default: {shown})", **options)

    many = {"nargs": "+", "metavar": "NAME"}
    add("--learning-rates", "learning rates", nargs="+", type=float, metavar="LR")
    add("--optimizers", f"some of {', '.join(config_lib.OPTIMIZERS)}", **many)
    add("--dtypes", f"compute dtypes, some of {', '.join(config_lib.DTYPES)}", **many)
    add("--inputs", f"pixel scalings, some of {', '.join(config_lib.INPUTS)}", **many)
    add("--steps", "optimizer steps", type=int, metavar="N")
    add("--batch-size", "examples a step, even", type=int, metavar="N")
    add("--seed", "decides split, initial parameters and batches", type=int, metavar="N")
    add("--hidden", "widths of the hidden layers", nargs="+", type=int, metavar="WIDTH")
    add("--activation", " or ".join(config_lib.ACTIVATIONS), metavar="NAME")
    add("--init-scale", "kernels start with variance init_scale / fan_in", type=float, metavar="X")
    add("--loss", " or ".join(config_lib.LOSSES), metavar="NAME")
    add("--momentum", "decay of the momentum optimizer", type=float, metavar="X")
    add("--gradient-steps", "first steps in which gradients are compared", type=int, metavar="N")
    add("--blow-up", "diverged when the loss exceeds this multiple of the first", type=float, metavar="X")
    folder = Path("results") / "lr_sweep"
    top.add_argument(
        "--output", type=Path, default=folder, metavar="DIR", help="folder of results (default: %(default)s)"
    )
    shown = " ".join(map(_shown, (*small.learning_rates, *small.optimizers, *small.inputs)))
    shown = f"{shown}, {small.steps} steps"
    top.add_argument("--quick", action="store_true", help=f"a small sweep of some seconds ({shown}); flags still count")
    again = top.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="keep finished cells of the same sweep (the default)")
    again.add_argument("--fresh", action="store_true", help="train every cell again and replace the results")
    return top


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def parse(argv: Sequence[str] | None) -> tuple[SweepConfig, argparse.Namespace]:
    """Arguments to a configuration; exits with code 2 and the reason if that is impossible."""
    top = parser()
    arguments = top.parse_args(argv)
    names = [field.name for field in dataclasses.fields(SweepConfig)]
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    try:
        return dataclasses.replace(config_lib.quick() if arguments.quick else SweepConfig(), **given), arguments
    except ConfigError as error:
        top.exit(EXIT_USAGE, f"{top.prog}: --{error.argument.replace('_', '-')}: {error.reason}\n")


def make_console() -> Console:
    """The terminal; or, into a pipe or a file, plain lines that are never broken."""
    terminal = sys.stdout.isatty()
    return Console(highlight=False, soft_wrap=not terminal, width=None if terminal else 120)


def main(
    argv: Sequence[str] | None = None,
    *,
    fuse: sweep.Fuse | None = None,
    explain: Callable | None = None,
    console: Console | None = None,
) -> int:
    """Run the command; returns the exit code. `fuse` and `explain` default to those of `aicf_jax`."""
    config, arguments = parse(argv)
    console = console or make_console()
    if fuse is None:
        fuse, explain = aicf_jax.fuse, aicf_jax.explain
    store = Store(arguments.output, config, f"{fuse.__module__}.{fuse.__qualname__}")
    results = {} if arguments.fresh else store.load()
    for note in store.notes:
        console.print(f"[yellow]note:[/] {note}")
    summary = {"fused_operations": count_fusions(config, explain), "verdict": None}
    try:
        _run(config, fuse, store, results, summary, console)
    except KeyboardInterrupt:
        done = f"{len(results)} of {len(config.cells())}"
        console.print(f"interrupted: {done} cells are kept in {store.path}; run the same command again to resume")
        return EXIT_INTERRUPTED
    verdict = judge(config, results)
    store.save(results, summary | {"verdict": verdict.to_json()})
    picture = report.plot(config, results, verdict, arguments.output / report.FILE_NAME)
    _conclude(config, results, verdict, summary["fused_operations"], console)
    console.print(f"wrote {store.path} and {picture}")
    return EXIT_PASSED if verdict.passed else EXIT_FAILED


def count_fusions(config: SweepConfig, explain: Callable | None) -> dict[str, int] | None:
    """How many `gemm_epilogue` operations `explain` sees in the model of each dtype; None without `explain`."""
    if explain is None:
        return None
    counts = {}
    for dtype in config.dtypes:
        model = model_lib.build(config, dtype)
        x = jax.ShapeDtypeStruct((config.batch_size, NUM_FEATURES), jnp.float32)
        variables = jax.eval_shape(lambda model=model: model_lib.init(model, config.seed))
        counts[dtype] = explain(model, variables, x).count("gemm_epilogue")
    return counts


def _run(config: SweepConfig, fuse: sweep.Fuse, store: Store, results: dict, summary: dict, console: Console):
    """Train what is missing, save after each cell, show progress: a line for each cell, and a bar on a terminal."""
    total, finished = len(config.cells()), len(results)
    if finished:
        console.print(f"{finished} of {total} cells are finished already ({store.path})")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("cells", total=total, completed=finished)
        started = time.perf_counter()
        for cell, result in sweep.run(config, fuse, dict(results)):
            results[cell] = result
            store.save(results, summary)
            progress.advance(task)
            seconds, started = time.perf_counter() - started, time.perf_counter()
            progress.console.print(_progress_line(config, cell, result, len(results), total, seconds))


def _progress_line(config: SweepConfig, cell: Cell, result: CellResult, done: int, total: int, seconds: float) -> str:
    return f"{done}/{total} {report.cell_line(cell, config, result)}; {seconds:.1f} s"


def _conclude(config: SweepConfig, results: dict, verdict: Verdict, fusions: dict[str, int] | None, console: Console):
    """Table, what was fused at all, verdict."""
    console.print(report.table(config, results))
    if fusions is not None:
        told = ", ".join(f"{dtype} {count} gemm_epilogue" for dtype, count in fusions.items())
        console.print(f"fused operations in the model: {told}")
        if not all(fusions.values()):
            console.print("[yellow]note:[/] nothing was fused for some dtype, so comparing its variants says nothing")
    for line in verdict.lines():
        console.print(line)
