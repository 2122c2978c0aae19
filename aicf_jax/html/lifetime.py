"""The buffer-lifetime chart: what is on chip when, and how many bytes that is, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mcir
from aicf_jax.html.markup import Markup, bytes_text, plural, tag
from mcir.lifetime import BufferLifetime, live_bytes
from mcir.text import print_statement

_STEP, _ROW, _LEFT, _PROFILE = 22, 22, 70, 72
#: Statements drawn; later ones are told in words.
MAX_STATEMENTS = 120


def chart(program: mcir.Program, name: str) -> Markup:
    """Above, the bytes on chip during each statement; below, one row for each storage with the values that use it."""
    found = mcir.lifetimes(program)
    head = tag("h4", "What is on chip, statement by statement")
    if not found:
        return tag("p", "Nothing stays on chip.", class_="note")
    live = live_bytes(found)
    shown = tuple(v for v in found if v.first < MAX_STATEMENTS)
    peak = mcir.peak_bytes(program)
    told = (
        f"{plural(len(found), 'value')} in {plural(len(rows(found)), 'storage')}, at most {bytes_text(peak)} at a time"
    )
    drawn = _draw(program, shown, live[:MAX_STATEMENTS], f"Buffer lifetimes of {name}: {told}.")
    box = tag("div", drawn, class_="scroll", role="region", aria_label=f"buffer lifetimes of {name}", tabindex=0)
    rest = len(found) - len(shown)
    left = f" {plural(rest, 'later value')} not drawn." if rest else ""
    return tag("figure", head, box, tag("figcaption", f"{told}.{left}", class_="note"), _table(found))


def rows(found: Sequence[BufferLifetime]) -> list[list[BufferLifetime]]:
    """Values by storage: each row holds a value and, one after the other, those that take its place."""
    row_of: dict[str, int] = {}
    out: list[list[BufferLifetime]] = []
    for v in found:
        row = row_of.get(v.reuses) if v.reuses is not None else None
        if row is None or out[row][-1].name != v.reuses:
            row = len(out)
            out.append([])
        out[row].append(v)
        row_of[v.name] = row
    return out


def _draw(program: mcir.Program, found: Sequence[BufferLifetime], live: Sequence[int], label: str) -> Markup:
    placed = rows(found)
    statements = [print_statement(s).rstrip(":") for _, s in program.statements()][: len(live)]
    width, height = _LEFT + _STEP * len(live) + 10, _PROFILE + 26 + _ROW * len(placed) + 6
    most = max(live, default=0) or 1
    parts = [tag("title", label)]
    for k, n in enumerate(live):
        tall = max(1.0, (_PROFILE - 18) * n / most) if n else 0
        tip = f"statement {k + 1}: {bytes_text(n)}, {statements[k]}" if k < len(statements) else bytes_text(n)
        x = _LEFT + _STEP * k
        parts.append(
            tag("rect", tag("title", tip), x=x + 1, y=round(_PROFILE - tall, 1), width=_STEP - 2, height=round(tall, 1),
                class_="live peak" if n == most else "live")
        )  # fmt: skip
    parts.append(tag("text", bytes_text(most), x=_LEFT - 8, y=24, class_="scale", text_anchor="end"))
    parts.append(tag("text", "0 B", x=_LEFT - 8, y=_PROFILE, class_="scale", text_anchor="end"))
    parts.append(tag("line", x1=_LEFT, x2=width - 10, y1=_PROFILE, y2=_PROFILE, class_="axis"))
    parts += [_mark(k) for k in range(0, len(live), 5 if len(live) > 10 else 1)]
    for r, values in enumerate(placed):
        y = _PROFILE + 26 + _ROW * r
        parts.append(tag("text", bytes_text(values[0].bytes), x=_LEFT - 8, y=y + 14, class_="scale", text_anchor="end"))
        parts += [_bar(v, y, k) for k, v in enumerate(values)]
    return tag("svg", *parts, role="img", aria_label=label, viewBox=f"0 0 {width} {height}", width=width, height=height)


def _mark(k: int) -> Markup:
    x = _LEFT + _STEP * k + _STEP / 2
    return tag("text", k + 1, x=x, y=_PROFILE + 14, class_="scale", text_anchor="middle")


def _bar(v: BufferLifetime, y: int, k: int) -> Markup:
    last = min(v.last, MAX_STATEMENTS - 1)
    x, width = _LEFT + _STEP * v.first, _STEP * (last - v.first + 1)
    taken = f", takes over the storage of {v.reuses}" if v.reuses else ""
    tip = f"{v.name}: {bytes_text(v.bytes)}, statements {v.first + 1} to {v.last + 1}{taken}"
    fits = math.ceil(len(v.name) * 7.0) + 8 <= width
    label = tag("text", v.name, x=x + 5, y=y + 14, class_="value") if fits else None
    shape = tag("rect", x=x + 0.5, y=y + 1, width=width - 1, height=_ROW - 4, rx=3, class_=f"life kind{k % 2}")
    return tag("g", tag("title", tip), shape, label)


def _table(found: Sequence[BufferLifetime]) -> Markup:
    head = [tag("th", h, scope="col") for h in ("value", "bytes", "statements", "takes over")]
    body = [
        tag(
            "tr",
            tag("th", v.name, scope="row"),
            tag("td", f"{v.bytes:,}", class_="number"),
            tag("td", f"{v.first + 1} to {v.last + 1}"),
            tag("td", v.reuses or ""),
        )
        for v in found
    ]
    table = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body))
    return tag("details", tag("summary", "the chart as a table"), table)
