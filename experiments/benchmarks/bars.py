"""The bars of the suite and of rewriting, and which of them a result misses."""

from __future__ import annotations

from typing import Any

RATIO_BAR = 1.03
REWRITE_BAR = 0.15


def missed_by_program(key: str, entry: dict[str, Any]) -> list[str]:
    """Bars that a suite entry misses, in words: time ratio, temporaries, agreement of values; or that it failed.

    A program that compiles to the very same instructions cannot be slower, so its ratio is noise and misses nothing.
    """
    if entry["status"] == "failed":
        return [f"{key}: failed, {entry['error']}"]
    missed = []
    ratio = entry["ratio"]
    if ratio["median"] > RATIO_BAR and not entry["identical_program"]:
        spread = f"{ratio['low']:.3f} to {ratio['high']:.3f}"
        missed.append(f"{key}: {ratio['median']:.3f}x the time of unfused ({spread}), allowed {RATIO_BAR}x")
    fused, unfused = entry["fused"]["temporaries_bytes"], entry["unfused"]["temporaries_bytes"]
    if fused > unfused:
        missed.append(f"{key}: {fused} bytes of temporaries, unfused {unfused}")
    if not entry["agrees"]:
        difference = entry["max_relative_difference"]
        found = "structure, dtype or non-finite places differ" if difference is None else f"differs by {difference:.2g}"
        missed.append(f"{key}: {found}, allowed {entry['tolerance']:.2g}")
    return missed


def undecided_by_program(key: str, entry: dict[str, Any]) -> list[str]:
    """Says so when the interval of the ratio holds the bar: whichever side the median is on, the next run may differ.

    The bar itself is on the median and is judged by `missed_by_program`.
    """
    if entry["status"] == "failed" or entry["identical_program"]:
        return []
    ratio = entry["ratio"]
    if not ratio["low"] <= RATIO_BAR <= ratio["high"]:
        return []
    return [f"{key}: ratio {ratio['low']:.3f} to {ratio['high']:.3f} holds {RATIO_BAR}; a larger --budget narrows it"]


def missed_by_rewriting(key: str, entry: dict[str, Any]) -> list[str]:
    """Bars that a rewriting entry misses: the fraction of jit's time, and work left for a second call.

    Under jit the second call runs no Python at all; eagerly the user's Python runs again by design, so that
    closed-over values are current, but nothing is rewritten.
    """
    if entry["status"] == "failed":
        return [f"{key}: failed, {entry['error']}"]
    missed = []
    if entry["fraction"] > REWRITE_BAR:
        missed.append(f"{key}: rewriting takes {entry['fraction']:.1%} of jit's time, allowed {REWRITE_BAR:.0%}")
    for call, work in entry["second_calls"].items():
        if work["rewrites"]:
            missed.append(f"{key}: second {call} call builds {work['rewrites']} plans, allowed 0")
        if call.startswith("jitted") and work["traces"]:
            missed.append(f"{key}: second {call} call traces {work['traces']} times, allowed 0")
    return missed
