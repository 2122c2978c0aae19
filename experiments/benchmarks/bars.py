"""The bars of the suite, of rewriting and of attention, and which of them a result misses."""

from __future__ import annotations

from typing import Any

RATIO_BAR = 1.03
REWRITE_BAR = 0.15

# Causal attention, forward and backward at one length: ratio of times (three times as fast) and of temporaries.
ATTENTION_LENGTH = 4096
ATTENTION_RATIO_BAR = 1 / 3
ATTENTION_TEMPORARIES_BAR = 1 / 25
TORCH_RATIO_BAR = 1.15
# Every mode at a length whose unfused programs hardly fit into any machine.
LONG_LENGTH = 16384
LONG_BYTES_BAR = 300_000_000
# The block stack: goals until everything but its attention is fused as well.
STACK_RATIO_GOAL = 1 / 1.5
STACK_TEMPORARIES_GOAL = 1 / 4


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
    return missed + _disagreement(key, entry)


def _disagreement(key: str, entry: dict[str, Any]) -> list[str]:
    """Says so when values were compared and differ; where nothing was compared, `agrees` is None."""
    if entry["agrees"] is not False:
        return []
    difference = entry["max_relative_difference"]
    found = "structure, dtype or non-finite places differ" if difference is None else f"differs by {difference:.2g}"
    return [f"{key}: {found}, allowed {entry['tolerance']:.2g}"]


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


def attention_ratio_bar(entry: dict[str, Any]) -> float | None:
    """The largest ratio of times that an attention entry may have; None where a peer is only shown."""
    at_bar = entry["length"] == ATTENTION_LENGTH and entry["mode"] == "grad"
    if entry["baseline"] in ("flax", "jax_nn"):
        return ATTENTION_RATIO_BAR if at_bar else RATIO_BAR
    if entry["baseline"] == "torch":
        return TORCH_RATIO_BAR if at_bar else None
    return RATIO_BAR if entry["baseline"] == "gpt_stack" else None


def missed_by_attention(key: str, entry: dict[str, Any]) -> list[str]:
    """Bars that an attention entry misses, in words.

    Forward and backward at `ATTENTION_LENGTH` against flax's and jax's spelling: a third of the time and 1/25 of the
    temporaries; against PyTorch 1.15 times its time. At `LONG_LENGTH` less than 0.3 GB of temporaries. Everywhere else
    but against peers: the bars of any program. A ratio that was not measured misses nothing (see
    `undecided_by_attention`); a peer that fails is no fault of the fused program.
    """
    if entry["status"] == "failed":
        return [f"{key}: failed, {entry['error']}"] if entry["own"] else []
    missed = []
    bar, ratio = attention_ratio_bar(entry), entry["ratio"]
    if bar is not None and ratio is not None and ratio["median"] > bar and not _is_noise(bar, entry):
        spread = f"{ratio['low']:.3f} to {ratio['high']:.3f}"
        missed.append(f"{key}: {ratio['median']:.3f}x the time of {entry['baseline']} ({spread}), allowed {bar:.3f}x")
    if entry["own"]:
        missed += _missed_temporaries(key, entry)
    return missed + _disagreement(key, entry)


def _is_noise(bar: float, entry: dict[str, Any]) -> bool:
    """Whether the ratio says nothing about a bar of "not slower": the two programs are the same."""
    return bar >= 1 and entry["identical_program"]


def _missed_temporaries(key: str, entry: dict[str, Any]) -> list[str]:
    fused, unfused = entry["fused"]["temporaries_bytes"], entry["unfused"]["temporaries_bytes"]
    allowed = unfused
    if entry["baseline"] != "gpt_stack":
        if entry["length"] == ATTENTION_LENGTH and entry["mode"] == "grad":
            allowed = int(unfused * ATTENTION_TEMPORARIES_BAR)
        elif entry["length"] == LONG_LENGTH:
            allowed = min(unfused, LONG_BYTES_BAR)
    if fused <= allowed:
        return []
    return [f"{key}: {fused} bytes of temporaries, allowed {allowed}, unfused {unfused}"]


def undecided_by_attention(key: str, entry: dict[str, Any]) -> list[str]:
    """Names a bar that this run cannot judge: a ratio not measured, an interval that holds the bar, a failed peer."""
    if entry["status"] == "failed":
        return [] if entry["own"] else [f"{key}: the peer failed, {entry['error']}"]
    bar, ratio = attention_ratio_bar(entry), entry["ratio"]
    if bar is None or _is_noise(bar, entry):
        return []
    if ratio is None:
        return [f"{key}: no ratio, {entry['not_run']}"]
    if not ratio["low"] <= bar <= ratio["high"]:
        return []
    return [f"{key}: ratio {ratio['low']:.3f} to {ratio['high']:.3f} holds {bar:.3f}; a larger --budget narrows it"]


def goals_of_stack(key: str, entry: dict[str, Any]) -> list[str]:
    """How the block stack stands to its goals; nothing is missed by them."""
    if entry["status"] == "failed" or entry["baseline"] != "gpt_stack" or entry["ratio"] is None:
        return []
    fused, unfused = entry["fused"]["temporaries_bytes"], entry["unfused"]["temporaries_bytes"]
    faster, part = 1 / entry["ratio"]["median"], fused / unfused if unfused else 1.0
    return [
        f"{key}: {faster:.2f} times as fast, goal {1 / STACK_RATIO_GOAL:.2g}",
        f"{key}: {part:.2f} of the temporaries, goal {STACK_TEMPORARIES_GOAL:.2g}",
    ]
