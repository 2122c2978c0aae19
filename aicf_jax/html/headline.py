"""What a report says at a glance: how much was fused, what it saves, what was turned down."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from aicf_jax.html.markup import Markup, bytes_text, plural, saved, tag

if TYPE_CHECKING:
    from aicf_jax.report import Report


_MODEL = (
    "Traffic and launches compare one kernel per operation with what the chosen kernel counts, or with one in all "
    "where it is left to XLA: a model, no measurement."
)


def headline(report: Report) -> Markup:
    """Four numbers, each with what it means, and a warning where the program runs unfused."""
    kinds = ", ".join(f"{n} {op}" for op, n in Counter(f.op for f in report.fusions).most_common())
    codes = ", ".join(f"{n} {code}" for code, n in Counter(r.code for r in report.refusals).most_common(4))
    tiles = tag(
        "dl",
        _tile("fusions", f"{len(report.fusions):,}", kinds or "nothing was fused"),
        _tile("refusals", f"{len(report.refusals):,}", codes or "nothing was turned down"),
        _pair("memory traffic", report.bytes_before, report.bytes_after, bytes_text),
        _pair("kernel launches", report.launches_before, report.launches_after, "{:,}".format),
        class_="tiles",
    )
    return tag("header", tag("h1", report.target), _failure(report), _hardware(report), tiles, _note(report))


def _tile(name: str, value: str | Markup, note: str) -> Markup:
    return tag("div", tag("dt", name), tag("dd", value, class_="big"), tag("dd", note, class_="note"), class_="tile")


def _pair(name: str, before: int, after: int, text: object) -> Markup:
    if not before:
        return _tile(name, "–", "of the fused operations")
    write = text if callable(text) else str
    value = tag("span", f"{write(before)} ", tag("span", "→", aria_label="to"), f" {write(after)}", class_="pair")
    return _tile(name, value, f"of the fused operations, {saved(before, after)}")


def _failure(report: Report) -> Markup | None:
    if not report.failure:
        return None
    return tag("p", tag("strong", "Runs unfused: "), report.failure, class_="warning", role="alert")


def _hardware(report: Report) -> Markup | None:
    return tag("p", tag("strong", "Hardware: "), report.hardware, class_="note") if report.hardware else None


def _note(report: Report) -> Markup:
    xla = sum(f.kernel == "xla" for f in report.fusions)
    parts = []
    if report.fusions:
        parts.append(_MODEL)
    if xla:
        parts.append(f"{plural(xla, 'fusion is', 'fusions are')} left to XLA: the equations run as written.")
    if report.peak_bytes_before:
        before, after = bytes_text(report.peak_bytes_before), bytes_text(report.peak_bytes_after)
        peak = f"{before} before, {after} after" if before != after else f"{before} before and after"
        parts.append(f"Largest sum of values alive at a time: {peak}.")
    return tag("p", " ".join(parts), class_="note")
