"""Cost of rewriting the 24-layer transformer, against what jit spends on it, and what a second call still does."""

from __future__ import annotations

from typing import Any

from experiments._progress import Progress
from experiments.benchmarks import rewrite_cost
from experiments.benchmarks.bars import missed_by_rewriting
from experiments.benchmarks.report import print_table, rewrite_table
from experiments.benchmarks.results import Results
from experiments.benchmarks.study import Context, Outcome, Study
from experiments.benchmarks.suite.transformer_24 import PROGRAM

KEY = f"{PROGRAM.name}/value_and_grad"
MIN_ROUNDS, MAX_ROUNDS = 3, 9


def rounds_of(context: Context, progress: Progress) -> dict[str, Any]:
    """The entry of the model: second calls first, then rounds of fresh runs until the time is used up.

    At least three rounds (one when quick) and at most nine.
    """
    progress.start(f"{KEY}: second calls")
    target, args = PROGRAM.build(context.seed, context.scale)
    calls = rewrite_cost.second_calls(PROGRAM, target, args, context.fuser)
    rounds: list[rewrite_cost.Round] = []
    least, most = (1, 1) if context.quick else (MIN_ROUNDS, MAX_ROUNDS)
    while len(rounds) < least or (len(rounds) < most and context.left_s() > 0):
        progress.start(f"{KEY}: round {len(rounds) + 1}")
        fused_first = len(rounds) % 2 == 1
        rounds.append(rewrite_cost.measure_round(PROGRAM, target, args, context.fuser, fused_first))
    return rewrite_cost.summarize(rounds, calls)


def run(context: Context) -> Outcome:
    """Measures unless it is finished already; prints the table. A failure is recorded and other studies go on."""
    results = Results(context.output / "rewrite.json", "rewrite", context.config, context.fresh)
    with Progress("rewrite", 1, context.console) as progress:
        for note in results.notes:
            progress.note(note)
        if KEY not in results.entries:
            try:
                entry = rounds_of(context, progress)
            except Exception as error:
                results.put(KEY, {"error": f"{type(error).__name__}: {error}"}, "failed")
                progress.finish(KEY, f"failed: {type(error).__name__}: {error}")
            else:
                results.put(KEY, entry)
                progress.finish(KEY, f"{entry['fraction']:.1%} of jit's time, {len(entry['rounds'])} rounds")
    entry = results.entries[KEY]
    failed = (KEY,) if entry["status"] == "failed" else ()
    if not failed:
        print_table(context.console, rewrite_table(KEY, entry))
    return Outcome(missed=tuple(missed_by_rewriting(KEY, entry)), failed=failed, files=(results.path,))


STUDY = Study("rewrite", "cost of rewriting a 24-layer model", run, lambda _: [KEY])
