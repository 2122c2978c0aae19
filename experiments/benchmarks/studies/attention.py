"""Causal attention over sequence lengths, and a GPT block stack: time, temporaries and agreement of fused programs."""

from __future__ import annotations

from experiments._io import load_average
from experiments._progress import Progress
from experiments.benchmarks.attention import memory, peers, tiles
from experiments.benchmarks.attention.cases import FULL, QUICK, STACK, STACK_MODE, Case, Sizes, all_cases, baselines
from experiments.benchmarks.attention.measuring import measure_case
from experiments.benchmarks.attention.report import attention_chart, attention_table, entry_text
from experiments.benchmarks.attention.spellings import MODES, SPELLINGS
from experiments.benchmarks.bars import goals_of_stack, missed_by_attention, undecided_by_attention
from experiments.benchmarks.report import print_table
from experiments.benchmarks.results import Results
from experiments.benchmarks.study import Context, Outcome, Study, choose


def sizes_of(context: Context) -> Sizes:
    """The sizes of a run."""
    return QUICK if context.quick else FULL


def cases_of(context: Context) -> dict[str, Case]:
    """What to measure by key, in the order of `all_cases`. Raises ValueError for an unknown name and for nothing."""
    cases = all_cases(sizes_of(context))
    names = choose(baselines(), context.programs, "baseline")
    modes = choose((*MODES, STACK_MODE), context.modes, "mode")
    lengths = choose(dict.fromkeys(case.length for case in cases), context.lengths, "length")
    found = {c.key: c for c in cases if c.baseline in names and c.mode in modes and c.length in lengths}
    if not found:
        raise ValueError("no chosen baseline has a chosen mode and length; leave one of the filters out")
    return found


def measure_missing(context: Context, wanted: dict[str, Case], results: Results) -> None:
    """Measures what has no entry yet, sharing the time left evenly over it; a case that raises is recorded as failed.

    `own` tells a comparison with the same program unfused from one with another library.
    """
    todo = {key: case for key, case in wanted.items() if key not in results.entries}
    budget_bytes = memory.budget_bytes()
    with Progress("attention", len(todo), context.console) as progress:
        for note in [*results.notes, *peers.absent()]:
            progress.note(note)
        for done, (key, case) in enumerate(todo.items()):
            progress.start(key)
            own = case.baseline in (*SPELLINGS, STACK)
            load = load_average()
            try:
                entry = measure_case(
                    case,
                    sizes_of(context),
                    context.fuser,
                    context.seed,
                    context.sampling,
                    context.left_s() / (len(todo) - done),
                    budget_bytes,
                )
            except Exception as error:
                results.put(key, {"error": f"{type(error).__name__}: {error}", "own": own}, "failed")
                progress.finish(key, f"failed: {type(error).__name__}: {error}")
                continue
            results.put(key, {**entry, "own": own, "load_average": load})
            progress.finish(key, entry_text(entry))


def items(context: Context) -> list[str]:
    """Keys of what would be measured."""
    return list(tiles.cases_of(context, sizes_of(context)) if context.hardware is not None else cases_of(context))


def run(context: Context) -> Outcome:
    """Measures what is not finished yet; prints the table, draws the chart. With ``--map``: as `tiles.run`."""
    if context.hardware is not None:
        return tiles.run(context, sizes_of(context), context.hardware)
    wanted = cases_of(context)
    config = {**context.config, "peers": peers.versions()}
    results = Results(context.output / "attention.json", "attention", config, context.fresh)
    measure_missing(context, wanted, results)
    entries = {key: results.entries[key] for key in wanted}
    chart = attention_chart(entries, context.output / "attention.png")
    print_table(context.console, attention_table(entries, peers.absent()))
    return Outcome(
        missed=tuple(line for key, entry in entries.items() for line in missed_by_attention(key, entry)),
        undecided=tuple(line for key, entry in entries.items() for line in undecided_by_attention(key, entry)),
        goals=tuple(line for key, entry in entries.items() for line in goals_of_stack(key, entry)),
        failed=tuple(key for key, entry in entries.items() if entry["status"] == "failed" and entry["own"]),
        files=(results.path, chart),
    )


# the lightest: its long calls overrun any share, so the other studies go first
STUDY = Study("attention", "causal attention, GPT stack", run, items, weight=0.5, own_names=True)
