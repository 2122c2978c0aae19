"""The tables of fusions and of refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from aicf_jax.errors import Refusal
from aicf_jax.html.markup import Markup, breakable, bytes_text, plural, short_site, tag

if TYPE_CHECKING:
    from aicf_jax.report import Fusion, Report


def fusions(report: Report) -> Markup:
    """One row a fusion, its backward behind a click."""
    most_bytes = max((f.bytes_before for f in report.fusions), default=0)
    most_launches = max((f.launches_before for f in report.fusions), default=0)
    head = ("#", "operation", "pattern", "kernel", "numerics", "memory traffic", "launches", "source line")
    rows = [
        (
            tag("td", k + 1, class_="number"),
            tag("th", f.op, tag("div", f.result, class_="note"), _attributes(f), _backward(f), scope="row"),
            tag("td", breakable(f.pattern)),
            tag("td", breakable(_kernel(f))),
            tag("td", f.numerics),
            tag("td", _bars(f.bytes_before, f.bytes_after, most_bytes, bytes_text)),
            tag("td", _bars(f.launches_before, f.launches_after, most_launches, "{:,}".format)),
            tag("td", _site(f.site)),
        )
        for k, f in enumerate(report.fusions)
    ]
    return _table("fusions", head, rows, "No part of this program was fused.")


def refusals(report: Report) -> Markup:
    """One row a refusal."""
    head = ("code", "pattern", "expected", "found", "stage", "source line")
    counted: dict[Refusal, int] = {}
    for r in report.refusals:
        counted[r] = counted.get(r, 0) + 1
    rows = [
        (
            tag("th", breakable(r.code), tag("div", f"{n} times", class_="note") if n > 1 else None, scope="row"),
            tag("td", breakable(r.pattern)),
            tag("td", breakable(r.expected)),
            tag("td", breakable(r.found)),
            tag("td", r.stage),
            tag("td", _site(r.site)),
        )
        for r, n in counted.items()
    ]
    return _table("refusals", head, rows, "Nothing that resembles a pattern was turned down.")


def _table(name: str, head: Iterable[str], rows: list[Iterable[Markup]], empty: str) -> Markup:
    if not rows:
        return tag("p", empty, class_="empty")
    table = tag(
        "table",
        tag("thead", tag("tr", *(tag("th", h, scope="col") for h in head))),
        tag("tbody", *(tag("tr", *row) for row in rows)),
    )
    return tag("div", table, class_="scroll", role="region", aria_label=f"table of {name}", tabindex=0)


def _kernel(f: Fusion) -> str:
    return "left to XLA" if f.kernel == "xla" else f.kernel


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


def _site(site: str) -> Markup:
    return tag("span", breakable(short_site(site)), title=site, class_="site")


def _bars(before: int, after: int, most: int, text: Callable[[int], Any]) -> Markup:
    """Two bars under each other, of one scale for the whole table."""

    def bar(n: int, kind: str) -> Markup:
        width = f"width:{100 * n / most if most else 0:.1f}%"
        label = tag("span", f"{kind} ", class_="hidden")
        return tag("div", tag("span", class_=f"bar {kind}", style=width), label, tag("b", text(n)), class_="bars")

    return tag("div", bar(before, "before"), bar(after, "after"))
