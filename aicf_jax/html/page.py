"""The page and the fragment: all parts in order, with their style."""

from __future__ import annotations

import functools
from importlib import resources
from typing import TYPE_CHECKING

from aicf_jax.html import graph, program, tables
from aicf_jax.html.headline import headline
from aicf_jax.html.markup import Markup, join, tag

if TYPE_CHECKING:
    from aicf_jax.report import Report

#: Class of the element all styles are limited to, so that a fragment changes nothing around it.
SCOPE = "aicf-report"


@functools.cache
def style() -> Markup:
    """The style sheet. It is part of every page: nothing is loaded from anywhere."""
    text = resources.files("aicf_jax.html").joinpath("style.css").read_text(encoding="utf-8")
    return tag("style", Markup(text))


def page(report: Report) -> str:
    """One HTML document."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        # Without it a browser asks the server the page came from for an icon.
        tag("link", rel="icon", href="data:,"),
        tag("title", f"{report.target}: what was fused"),
        style(),
    )
    body = tag("body", tag("main", *_parts(report), class_=f"{SCOPE} page"))
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def fragment(report: Report) -> str:
    """The page's content as one element, for a notebook."""
    return tag("div", style(), *_parts(report), class_=SCOPE)


def _parts(report: Report) -> list[Markup]:
    drawn, streamed = graph.graphs(report), program.programs(report)
    parts = [
        headline(report),
        _section(f"Fusions ({len(report.fusions)})", tables.fusions(report)),
        _section(f"Refusals ({len(report.refusals)})", tables.refusals(report)),
        _section("Before and after", drawn) if drawn else _section("Before and after", _no_graph(report)),
    ]
    if streamed:
        parts.append(_section("Memory flow programs", streamed))
    return parts


def _no_graph(report: Report) -> Markup:
    why = "The program runs as written." if report.failure else "The program has no operations."
    return tag("p", why, class_="empty")


def _section(title: str, content: Markup) -> Markup:
    return tag("section", tag("h2", title), join(content))
