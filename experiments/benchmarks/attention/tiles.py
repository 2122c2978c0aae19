"""Attention with tiles from a property map against attention with the fixed default, side by side."""

from __future__ import annotations

import time
from typing import Any

from rich.table import Table

import aicf_jax
import mcir
from experiments._progress import Progress
from experiments.benchmarks.attention.cases import Sizes
from experiments.benchmarks.attention.spellings import (
    MODES,
    attention_args,
    attention_step,
    attention_tolerance,
    jax_attention,
)
from experiments.benchmarks.measure import compile_ahead, measure_pair
from experiments.benchmarks.report import bytes_text, print_table
from experiments.benchmarks.results import Results
from experiments.benchmarks.study import Context, Outcome, choose
from gpu_probe.property_map import PropertyMap


def cases_of(context: Context, sizes: Sizes) -> dict[str, tuple[int, str]]:
    """Key -> (length, mode). Raises ValueError for an unknown length or mode."""
    lengths = choose(sizes.lengths, context.lengths, "length")
    return {f"s{n}/{mode}": (n, mode) for n in lengths for mode in choose(MODES, context.modes, "mode")}


def run(context: Context, sizes: Sizes, found: PropertyMap) -> Outcome:
    """Measures what is not finished yet and prints the table."""
    wanted = cases_of(context, sizes)
    config = {**context.config, "map": found.as_dict()}
    results = Results(context.output / "attention_tiles.json", "attention_tiles", config, context.fresh)
    todo = {key: case for key, case in wanted.items() if key not in results.entries}
    with Progress("attention tiles", len(todo), context.console) as progress:
        for note in results.notes:
            progress.note(note)
        for done, (key, (length, mode)) in enumerate(todo.items()):
            progress.start(key)
            try:
                share_s = context.left_s() / (len(todo) - done)
                entry = measure_case(length, mode, sizes, found, context, share_s)
            except Exception as error:
                results.put(key, {"error": f"{type(error).__name__}: {error}"}, "failed")
                progress.finish(key, f"failed: {type(error).__name__}: {error}")
                continue
            results.put(key, entry)
            progress.finish(key, f"{entry['ratio']['median']:.3f} of the default's time")
    entries = {key: results.entries[key] for key in wanted}
    print_table(context.console, table(entries, found))
    return Outcome(
        missed=tuple(line for key, entry in entries.items() for line in missed(key, entry)),
        failed=tuple(key for key, entry in entries.items() if entry["status"] == "failed"),
        files=(results.path,),
    )


def measure_case(
    length: int, mode: str, sizes: Sizes, found: PropertyMap, context: Context, seconds: float
) -> dict[str, Any]:
    """A suite entry whose "unfused" is fused with the default's tiles, with the tiles of both."""
    started_s = time.perf_counter()
    args = attention_args(length, sizes.heads, sizes.head_dim, context.seed)
    policies = {"default": aicf_jax.Policy(), "map": aicf_jax.Policy(hardware=found)}
    before, after = (
        compile_ahead(attention_step(aicf_jax.fuse(jax_attention, policy=policy), mode), args)
        for policy in policies.values()
    )
    tolerance = attention_tolerance(length, sizes.head_dim)
    entry = measure_pair(before, after, args, tolerance, context.sampling, started_s + seconds)
    return {
        **entry,
        "length": length,
        "mode": mode,
        "tiles": {n: tiles(p, args[:3], mode) for n, p in policies.items()},
    }


def tiles(policy: aicf_jax.Policy, args: tuple[Any, ...], mode: str) -> str:
    """The blocks of the axes that are cut, as ``i 512 j 256``; backward behind forward. "xla" where nothing streams."""
    (fusion,) = aicf_jax.explain(jax_attention, *args, policy=policy).fusions
    texts = [fusion.program, *([fusion.backward_program] if mode == "grad" else [])]
    return ", ".join(_blocks(text) if text else "xla" for text in texts)


def _blocks(text: str) -> str:
    axes = mcir.parse(text).axes
    return " ".join(f"{a.name} {a.block}" for a in axes if a.block < a.size) or "whole"


def missed(key: str, entry: dict[str, Any]) -> list[str]:
    """Tiles of the map are to be at least as fast; a ratio whose interval holds 1 is."""
    if entry["status"] == "failed":
        return [f"{key}: failed, {entry['error']}"]
    ratio, found = entry["ratio"], []
    if ratio["low"] > 1 and not entry["identical_program"]:
        found.append(f"{key}: {ratio['median']:.3f}x the time of the default's tiles, allowed 1x")
    return found + ([] if entry["agrees"] else [f"{key}: values differ"])


def table(entries: dict[str, dict[str, Any]], found: PropertyMap) -> Table:
    """One row a case."""
    result = Table(title=f"attention: tiles by the map of {found.name} against the default's")
    for heading in (
        "case",
        "default tiles",
        "map tiles",
        "default ms",
        "map ms",
        "ratio",
        "95 % interval",
        "temporaries",
    ):
        result.add_column(heading, justify="left" if "tiles" in heading or heading == "case" else "right")
    for key, entry in entries.items():
        if entry["status"] == "failed":
            result.add_row(key, f"failed: {entry['error']}")
            continue
        ratio, before, after = entry["ratio"], entry["unfused"], entry["fused"]
        result.add_row(
            key,
            *entry["tiles"].values(),
            *(f"{side['median_ns'] / 1e6:.2f}" for side in (before, after)),
            "same program" if entry["identical_program"] else f"{ratio['median']:.3f}",
            f"{ratio['low']:.3f} to {ratio['high']:.3f}",
            " -> ".join(bytes_text(side["temporaries_bytes"] or 0) for side in (before, after)),
        )
    return result
