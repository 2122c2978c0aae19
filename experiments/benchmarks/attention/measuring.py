"""One comparison: compile both programs, run what fits into memory, and see whether their values agree."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from experiments.benchmarks.attention import gpt
from experiments.benchmarks.attention.cases import STACK, Case, Sizes
from experiments.benchmarks.attention.peers import PEERS
from experiments.benchmarks.attention.spellings import (
    SPELLINGS,
    attention_args,
    attention_step,
    attention_tolerance,
    jax_attention,
)
from experiments.benchmarks.compare import canonical_hlo, relative_difference
from experiments.benchmarks.fusers import Fuser
from experiments.benchmarks.measure import Compiled, Sampling, agreement, compile_ahead, measure_pair, side
from experiments.benchmarks.report import bytes_text

LONG_CALL_S = 1.0
# of a program that runs without its counterpart, after one call that is not counted
CALLS_ALONE = 3


@dataclass(frozen=True)
class Prepared:
    """Both programs of a case, compiled, with their arguments and the fused operations by name.

    `one_head` is the baseline as a function of `(q, k, v, cotangent)` with any number of heads; None where it has none.
    """

    baseline: Compiled
    candidate: Compiled
    args: tuple[Any, ...]
    tolerance: float
    fusions: dict[str, int]
    one_head: Callable[..., Any] | None = None


def prepare(case: Case, sizes: Sizes, fuser: Fuser, seed: int) -> Prepared:
    """Compiles both programs of a case; runs nothing."""
    if case.baseline == STACK:
        loss, args = gpt.build(sizes.stack, seed)
        baseline = compile_ahead(jax.value_and_grad(loss), args)
        candidate = compile_ahead(jax.value_and_grad(fuser.fuse(loss)), args)
        return Prepared(baseline, candidate, args, gpt.stack_tolerance(sizes.stack), fuser.fusions(loss, args))
    args = attention_args(case.length, sizes.heads, sizes.head_dim, seed)
    if case.baseline in SPELLINGS:
        spelling = attention = SPELLINGS[case.baseline]
        baseline = compile_ahead(attention_step(spelling, case.mode), args)
    else:
        peer = PEERS[case.baseline]
        spelling, attention = jax_attention, peer.attention() if peer.attention else jax_attention
        baseline = peer.compile(case.mode, args)
    return Prepared(
        baseline,
        compile_ahead(attention_step(fuser.fuse(spelling), case.mode), args),
        args,
        attention_tolerance(case.length, sizes.head_dim),
        fuser.fusions(spelling, args[:3]),
        attention_step(attention, case.mode),
    )


def measure_case(
    case: Case, sizes: Sizes, fuser: Fuser, seed: int, sampling: Sampling, seconds: float, budget_bytes: int
) -> dict[str, Any]:
    """The entry of a case, within about `seconds` (compiling included, the fewest pairs in any case).

    It is an entry of the suite plus `baseline`, `length`, `mode`, and:
    `not_run`: what was only compiled because its temporaries exceed `budget_bytes`, in words; None when both ran.
    `compared`: which values were compared, "all", "heads 0 and 7", or "nothing".
    Where either program is not run there is no ratio (None); the other one is timed alone.
    """
    deadline_s = time.perf_counter() + seconds
    prepared = prepare(case, sizes, fuser, seed)
    both = {"baseline": prepared.baseline, "candidate": prepared.candidate}
    large = {name: program for name, program in both.items() if not fits(program, budget_bytes)}
    if large:
        entry = _entry_without_ratio(prepared, large, budget_bytes)
    else:
        chosen = _sampling_for(prepared, sampling)
        entry = measure_pair(
            prepared.baseline, prepared.candidate, prepared.args, prepared.tolerance, chosen, deadline_s
        )
        entry |= {"not_run": None, "compared": "all"}
    return {
        "baseline": case.baseline,
        "length": case.length,
        "mode": case.mode,
        **entry,
        "fusions": prepared.fusions,
    }


def fits(program: Compiled, budget_bytes: int) -> bool:
    """Whether a program may be run; one that does not tell its temporaries may."""
    return program.temporaries_bytes is None or program.temporaries_bytes <= budget_bytes


def _sampling_for(prepared: Prepared, sampling: Sampling) -> Sampling:
    """The sampling, or for calls above a second the fewest pairs; comparing the values has warmed both up by then."""
    started = time.perf_counter()
    jax.block_until_ready(prepared.baseline.run(*prepared.args))
    if time.perf_counter() - started < LONG_CALL_S:
        return sampling
    return replace(sampling, min_pairs=8, warm_calls=0)


def _entry_without_ratio(prepared: Prepared, large: dict[str, Compiled], budget_bytes: int) -> dict[str, Any]:
    """Compiled facts of both programs, times of the one that fits, and its agreement with the baseline by heads."""
    told = [
        f"{name} only compiled: {bytes_text(program.temporaries_bytes or 0)} of temporaries"
        for name, program in large.items()
    ]
    entry: dict[str, Any] = {
        "ratio": None,
        "identical_program": canonical_hlo(prepared.baseline.hlo) == canonical_hlo(prepared.candidate.hlo),
        "max_relative_difference": None,
        "tolerance": prepared.tolerance,
        "agrees": None,
        "not_run": f"{', '.join(told)}, budget {bytes_text(budget_bytes)}",
        "compared": "nothing",
    }
    times_ns: dict[str, list[int]] = {"baseline": [], "candidate": []}
    if "baseline" not in large:
        times_ns["baseline"] = _times_alone(prepared.baseline, prepared.args)[0]
    if "candidate" not in large:
        times_ns["candidate"], result = _times_alone(prepared.candidate, prepared.args)
        entry |= _agreement_by_heads(prepared, result, budget_bytes)
    return {
        **entry,
        "unfused": side(prepared.baseline, times_ns["baseline"]),
        "fused": side(prepared.candidate, times_ns["candidate"]),
    }


def _times_alone(program: Compiled, args: tuple[Any, ...]) -> tuple[list[int], Any]:
    result = jax.block_until_ready(program.run(*args))
    times_ns = []
    for _ in range(CALLS_ALONE):
        started = time.perf_counter_ns()
        result = jax.block_until_ready(program.run(*args))
        times_ns.append(time.perf_counter_ns() - started)
    return times_ns, result


def _agreement_by_heads(prepared: Prepared, result: Any, budget_bytes: int) -> dict[str, Any]:
    """Compares the first and the last head with the baseline run on that head alone: heads know nothing of each other.

    Its temporaries are those of one head. Empty when even these exceed the budget, or there are no heads to take.
    """
    if prepared.one_head is None:
        return {}
    heads = sorted({0, prepared.args[0].shape[2] - 1})

    def of_head(tree: Any, head: int) -> Any:
        return jax.tree.map(lambda leaf: np.asarray(leaf)[:, :, head : head + 1], tree)

    baseline = compile_ahead(prepared.one_head, of_head(prepared.args, 0))
    if not fits(baseline, budget_bytes):
        return {}
    differences = [
        relative_difference(baseline.run(*of_head(prepared.args, head)), of_head(result, head)) for head in heads
    ]
    return {**agreement(max(differences), prepared.tolerance), "compared": f"heads {' and '.join(map(str, heads))}"}
