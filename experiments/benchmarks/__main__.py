"""Command line: `python -m experiments.benchmarks [study] [options]`."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from experiments._io import environment, source_digest
from experiments.benchmarks import studies
from experiments.benchmarks.discovery import discover
from experiments.benchmarks.fusers import FUSERS, identity
from experiments.benchmarks.measure import Sampling
from experiments.benchmarks.study import Context, Outcome, Study
from gpu_probe.property_map import PropertyMap
from pallas_kernels.command_line import positive

OUTPUT = Path("results/benchmarks")
BUDGET_S = 220.0
QUICK_BUDGET_S = 40.0
QUICK_SCALE = 0.25
# the packages whose code the numbers are about, and this one
PACKAGES = ("gpu_probe", "mcir", "pallas_kernels", "aicf_jax", "experiments/benchmarks")


def parser(found: dict[str, Study]) -> argparse.ArgumentParser:
    """The options; each study is a choice of the first argument."""
    result = argparse.ArgumentParser(
        prog="python -m experiments.benchmarks",
        description="Ratios of fused programs against jax.jit of the unfused ones, side by side in one run.",
        epilog="studies: " + "; ".join(f"{study.name}: {study.summary}" for study in found.values()),
    )
    names = ("all", *found)
    budget_help = (
        f"time for the whole run, compiling included (default: {BUDGET_S:.0f}, quick {QUICK_BUDGET_S:.0f}); "
        "every program gets its fewest pairs even when it is used up"
    )
    programs_help = "only these programs of the suite, or baselines of the attention study"
    map_help = (
        "only attention: tiles by this property map (a path, or the name of a shipped one) against the default's; "
        "`python -m gpu_probe run` makes one"
    )
    lengths_help = "only these sequence lengths of the attention study"
    fuse_help = "what to compare with plain jit; identity shows the noise of the measurement (default: %(default)s)"
    result.add_argument("study", nargs="?", default="all", choices=names, help="what to run (default: all)")
    result.add_argument("--programs", nargs="+", metavar="NAME", help=programs_help)
    result.add_argument("--modes", nargs="+", metavar="MODE", help="only these modes, such as forward")
    result.add_argument("--lengths", nargs="+", type=int, metavar="N", help=lengths_help)
    result.add_argument("--map", metavar="MAP", help=map_help)
    result.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR", help="for JSON and PNG: %(default)s")
    result.add_argument("--budget", type=positive, metavar="SECONDS", help=budget_help)
    result.add_argument("--quick", action="store_true", help="small sizes and few pairs: does it run, not how fast")
    result.add_argument("--fresh", action="store_true", help="measure again what an earlier run has finished")
    result.add_argument("--fuse", choices=tuple(FUSERS), default="aicf_jax", help=fuse_help)
    result.add_argument("--check", action="store_true", help="exit with 1 and name it when a bar is missed")
    result.add_argument("--list", action="store_true", help="name what would be measured, and stop")
    return result


def configuration(options: argparse.Namespace, sampling: Sampling, scale: float, seed: int) -> dict[str, Any]:
    """Everything on which a number depends; results of another configuration are not continued.

    The filters are left out: measuring one program today and the rest tomorrow fills the same file.
    """
    root = Path(__file__).resolve().parents[2]
    return {
        "environment": environment(),
        "sources": source_digest(root / package for package in PACKAGES),
        "fuse": options.fuse,
        "budget_s": options.budget,
        "sampling": asdict(sampling),
        "scale": scale,
        "seed": seed,
    }


def _hardware(source: str | None) -> PropertyMap | None:
    """The map of ``--map``. Raises ValueError: there is none, or it is of no CPU, which the study runs on."""
    found = PropertyMap.load(source) if source else None
    if found is not None and found.kind != "cpu":
        raise ValueError(
            f"--map: expected a map of a CPU, whose tiles the study measures, found {source!r} of kind {found.kind}; "
            "`python -m gpu_probe run` makes one"
        )
    return found


def context_of(options: argparse.Namespace, console: Console) -> Context:
    """The context of a run; its deadline is set for each study.

    Raises:
      RuntimeError: the fuser is not there.
      ValueError: the property map is not there, or is of no CPU.
    """
    quick = options.quick
    options.budget = options.budget or (QUICK_BUDGET_S if quick else BUDGET_S)
    sampling = Sampling(tolerance=0.1, max_pairs=32) if quick else Sampling()
    scale, seed = (QUICK_SCALE if quick else 1.0), 0
    return Context(
        # naming what would be measured needs no fuser
        fuser=identity() if options.list else FUSERS[options.fuse](),
        output=options.output,
        console=console,
        config={} if options.list else configuration(options, sampling, scale, seed),
        deadline_s=0.0,
        programs=tuple(options.programs) if options.programs else None,
        modes=tuple(options.modes) if options.modes else None,
        lengths=tuple(options.lengths) if options.lengths else None,
        scale=scale,
        seed=seed,
        quick=quick,
        fresh=options.fresh,
        sampling=sampling,
        hardware=_hardware(options.map),
    )


def run_all(chosen: Sequence[Study], context: Context, budget_s: float) -> list[Outcome]:
    """Runs the studies in turn; each may use its share of the time that its predecessors left."""
    end_s = time.perf_counter() + budget_s
    outcomes = []
    for position, study in enumerate(chosen):
        left_s = max(0.0, end_s - time.perf_counter())
        share = study.weight / sum(other.weight for other in chosen[position:])
        outcomes.append(study.run(replace(context, deadline_s=time.perf_counter() + left_s * share)))
    return outcomes


def verdict(outcomes: Sequence[Outcome], check: bool, console: Console) -> int:
    """Prints the files, goals, and bars not decided and missed, by name.

    Returns 1 when something failed or, with `check`, a bar is missed; otherwise 0.
    """
    for outcome in outcomes:
        for path in outcome.files:
            console.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)
    for line in [line for outcome in outcomes for line in outcome.goals]:
        console.print(f"goal: {line}", markup=False, highlight=False, soft_wrap=True)
    for line in [line for outcome in outcomes for line in outcome.undecided]:
        console.print(f"not decided: {line}", markup=False, highlight=False, soft_wrap=True)
    missed = [line for outcome in outcomes for line in outcome.missed]
    for line in missed:
        console.print(f"bar missed: {line}", markup=False, highlight=False, soft_wrap=True)
    if not missed:
        console.print("every bar is met", highlight=False)
    return int(any(outcome.failed for outcome in outcomes) or (check and bool(missed)))


@contextlib.contextmanager
def no_compilation_cache() -> Iterator[None]:
    """Switches jax's cache on disk off: a program read back from it would seem to be compiled in no time."""
    before = getattr(jax.config, "jax_enable_compilation_cache")  # noqa: B009 - a flag pyright does not know
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Runs the command line; returns 0, 1 (failed, or bar missed with --check), 2 (wrong use) or 130 (interrupted)."""
    console = console or Console()
    found = discover(studies, "STUDY", Study)
    options = parser(found).parse_args(arguments)
    # the heaviest first: what overruns its share (a busy machine) then takes from the smaller part
    by_weight = sorted(found.values(), key=lambda study: -study.weight)
    chosen = by_weight if options.study == "all" else [found[options.study]]
    if options.map and options.study != "attention":
        print("python -m experiments.benchmarks: --map is for the study attention: name it", file=sys.stderr)
        return 2
    if options.study == "all" and (options.programs or options.modes):
        chosen = [study for study in chosen if not study.own_names]
    try:
        context = context_of(options, console)
        items = {study.name: study.items(context) for study in chosen}
    except (RuntimeError, ValueError) as error:
        print(f"python -m experiments.benchmarks: {error}", file=sys.stderr)
        return 2
    if options.list:
        for name, keys in items.items():
            for key in keys:
                console.print(f"{name} {key}", highlight=False)
        return 0
    try:
        with no_compilation_cache():
            outcomes = run_all(chosen, context, options.budget)
        return verdict(outcomes, options.check, console)
    except KeyboardInterrupt:
        console.print("interrupted; the same command continues after the finished programs", highlight=False)
        return 130


if __name__ == "__main__":
    sys.exit(main())
