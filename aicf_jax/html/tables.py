"""The tables of fusions and of refusals. Equal rows are one row that says how many there are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aicf_jax.errors import Refusal
from aicf_jax.html.markup import Markup, bytes_text, join, place, plural, tag

if TYPE_CHECKING:
    from aicf_jax.report import Fusion, Report

#: A cell: what it holds, and attributes of its element.
Cell = tuple[Any, dict[str, Any]]


def fusions(report: Report) -> Markup:
    """One row for all fusions that are equal but for their number, their backward behind a click."""
    most_bytes = max((f.bytes_before for f in report.fusions), default=0)
    most_launches = max((f.launches_before for f in report.fusions), default=0)
    same: dict[Fusion, list[int]] = {}
    for k, f in enumerate(report.fusions):
        same.setdefault(dataclasses.replace(f, rewrite=None), []).append(k + 1)
    head = ("operation", "#", "pattern", "kernel", "numerics", "memory traffic", "launches", "source line")
    rows: list[Sequence[Cell]] = [
        (
            (_operation(f), {}),
            (_numbers(numbers), {}),
            (f.pattern, {"class_": "word"}),
            ("left to XLA" if f.kernel == "xla" else f.kernel, {"class_": "word"}),
            (_numerics(f), {}),
            (_bars(f.bytes_before, f.bytes_after, most_bytes, bytes_text), {}),
            (_bars(f.launches_before, f.launches_after, most_launches, "{:,}".format), {}),
            (place(f.site), {}),
        )
        for f, numbers in same.items()
    ]
    return _table("fusions", head, rows, "No part of this program was fused.")


def refusals(report: Report) -> Markup:
    """One row for all equal refusals."""
    head = ("code", "pattern, kernel", "expected", "found", "stage", "source line")
    counted: dict[Refusal, int] = {}
    for r in report.refusals:
        counted[r] = counted.get(r, 0) + 1
    rows: list[Sequence[Cell]] = [
        (
            (tag("div", tag("span", r.code, class_="word"), _times(n)), {}),
            (join(tag("div", r.pattern), tag("div", r.kernel) if r.kernel else None), {"class_": "word"}),
            (r.expected, {}),
            (r.found, {}),
            (r.stage, {}),
            (place(r.site), {}),
        )
        for r, n in counted.items()
    ]
    return _table("refusals", head, rows, "Nothing that resembles a pattern was turned down.")


def _table(name: str, head: Sequence[str], rows: Sequence[Sequence[Cell]], empty: str) -> Markup:
    """A table. On a narrow screen rows become cards, hence the labels, and the roles that `display` would undo."""
    if not rows:
        return tag("p", empty, class_="empty")
    top = tag("tr", *(tag("th", h, scope="col", role="columnheader") for h in head), role="row")
    body = []
    for row in rows:
        (first, attributes), *rest = row
        cells = [tag("th", first, scope="row", role="rowheader", **attributes)]
        cells += [
            tag("td", tag("div", content), role="cell", data_label=label, **more)
            for label, (content, more) in zip(head[1:], rest, strict=True)
        ]
        body.append(tag("tr", *cells, role="row"))
    parts = tag("thead", top, role="rowgroup"), tag("tbody", *body, role="rowgroup")
    table = tag("table", *parts, role="table", class_="cards")
    return tag("div", table, class_="scroll", role="region", aria_label=f"table of {name}", tabindex=0)


def _operation(f: Fusion) -> Markup:
    return tag("div", f.op, tag("div", f.result, class_="note"), _attributes(f), _backward(f), _estimate(f))


def _numbers(numbers: Sequence[int]) -> Markup:
    rest = tag("div", f"and {len(numbers) - 1} more", class_="note", title=", ".join(map(str, numbers)))
    return tag("div", f"{numbers[0]}", rest if len(numbers) > 1 else None, class_="word")


def _times(n: int) -> Markup | None:
    return tag("div", f"{n} times", class_="note") if n > 1 else None


def _numerics(f: Fusion) -> Markup:
    error = None if f.error is None else tag("div", f"error {f.error:.1e}", class_="note word")
    return tag("div", f.numerics, error, tag("div", f"bound {f.bound:.1e}", class_="note word"))


def _attributes(f: Fusion) -> Markup | None:
    """The attributes that say something: neither zero nor ``none``."""
    pairs = [a.split("=", 1) for a in f.attrs.split() if "=" in a]
    told = [f"{name} {value}" if value != "1" else name for name, value in pairs if value not in ("0", "0.0", "none")]
    return tag("div", ", ".join(told), class_="note") if told else None


def _backward(f: Fusion) -> Markup | None:
    if not f.backward:
        return None
    lines = plural(len(f.backward.splitlines()), "line")
    return tag("details", tag("summary", f"backward ({lines})"), tag("pre", f.backward))


def _estimate(f: Fusion) -> Markup | None:
    """What the property map of the policy tells, where there is one: the sum, its parts behind a click."""
    if not f.hardware:
        return None
    total, *parts = f.hardware.splitlines()
    return tag("details", tag("summary", f"on {total}"), tag("pre", "\n".join(parts)))


def _bars(before: int, after: int, most: int, text: Callable[[int], Any]) -> Markup:
    """Two bars under each other, of one scale for the whole table."""

    def bar(n: int, kind: str) -> Markup:
        width = f"width:{100 * n / most if most else 0:.1f}%"
        label = tag("span", f"{kind} ", class_="hidden")
        filled = tag("span", tag("span", class_=f"bar {kind}", style=width), class_="track")
        return tag("div", filled, label, tag("b", text(n)), class_="bars")

    return tag("div", bar(before, "before"), bar(after, "after"))
