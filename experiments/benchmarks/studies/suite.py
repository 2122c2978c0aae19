"""Every program of the suite in every mode: time ratio, temporaries, agreement."""

from __future__ import annotations

from typing import Any

from experiments._io import cores, load_average
from experiments._progress import Progress
from experiments.benchmarks import suite
from experiments.benchmarks.bars import missed_by_program, undecided_by_program
from experiments.benchmarks.discovery import discover
from experiments.benchmarks.measure import measure
from experiments.benchmarks.program import MODES, Program
from experiments.benchmarks.report import print_table, ratio_chart, ratio_text, remark, suite_table
from experiments.benchmarks.results import Results
from experiments.benchmarks.study import Context, Outcome, Study, choose


def cells_of(context: Context) -> dict[str, tuple[Program, str]]:
    """What to measure: `program/mode` -> program and mode, in the order of files. Raises ValueError for nothing."""
    programs = discover(suite, "PROGRAM", Program)
    modes = choose(dict.fromkeys(MODES), context.modes, "mode")
    chosen = [programs[name] for name in choose(programs, context.programs, "program")]
    found = {f"{p.name}/{mode}": (p, mode) for p in chosen for mode in p.modes if mode in modes}
    if not found:
        raise ValueError("no chosen program has a chosen mode")
    return found


def run(context: Context) -> Outcome:
    """Measures what is not finished yet, sharing the time left evenly over it; prints the table, draws the chart.

    A program that raises is recorded as failed and the others go on: one broken program must not hide the rest.
    """
    wanted = cells_of(context)
    results = Results(context.output / "suite.json", "suite", context.config, context.fresh)
    todo = {key: cell for key, cell in wanted.items() if key not in results.entries}
    with Progress("suite", len(todo), context.console) as progress:
        for note in results.notes:
            progress.note(note)
        load = load_average()
        if load is not None and load > cores() / 2:
            progress.note(f"the machine is busy (load {load} on {cores()} cores): ratios will be noisy")
        built: tuple[str, Any] = ("", None)
        for done, (key, (program, mode)) in enumerate(todo.items()):
            progress.start(key)
            try:
                if built[0] != program.name:
                    built = program.name, program.build(context.seed, context.scale)
                seconds = context.left_s() / (len(todo) - done)
                load = load_average()
                entry = measure(program, mode, *built[1], context.fuser, context.sampling, seconds)
            except Exception as error:
                results.put(key, {"error": f"{type(error).__name__}: {error}"}, "failed")
                progress.finish(key, f"failed: {type(error).__name__}: {error}")
                continue
            results.put(key, {**entry, "load_average": load})
            progress.finish(key, f"{ratio_text(entry)} {remark(entry)}".rstrip())
    entries = {key: results.entries[key] for key in wanted}
    chart = context.output / "ratios.png"
    ratio_chart(entries, chart)
    print_table(context.console, suite_table(entries))
    return Outcome(
        missed=tuple(line for key, entry in entries.items() for line in missed_by_program(key, entry)),
        undecided=tuple(line for key, entry in entries.items() for line in undecided_by_program(key, entry)),
        failed=tuple(key for key, entry in entries.items() if entry["status"] == "failed"),
        files=(results.path, chart),
    )


STUDY = Study("suite", "time ratios and temporaries of every program", run, lambda c: list(cells_of(c)), weight=2.0)
