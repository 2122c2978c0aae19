"""The memory flow programs of streamed kernels: their text in colours, and the bytes they move."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import mcir
from aicf_jax.html import lifetime
from aicf_jax.html.markup import Markup, bytes_text, join, short_site, tag
from mcir.traffic import Bytes

if TYPE_CHECKING:
    from aicf_jax.report import Report

_TOKEN = re.compile(
    r"(?P<comment>\#.*)|(?P<type>\b(?:bool|u?int\d+|b?float\d+\w*|key\S*)\[[^\]\n]*\])"
    r"|(?P<keyword>\b(?:program|axis|block|input|output|temporary|tile|stream|while|is|else|unless|low|reduction|over"
    r"|corrected|by|base|load|store|recompute)\b)|(?P<operation>\b[A-Za-z_]\w*(?=\())|(?P<number>(?<![\w.])-?\d[\w.+-]*)"
    r"|(?P<sign>&lt;-|<-|\+=)"
)


def programs(report: Report) -> Markup | None:
    """One section for each different program; what runs it is named. None where no kernel streams."""
    users: dict[str, list[str]] = {}
    for k, f in enumerate(report.fusions):
        for what, text in (("", f.program), (" backward", f.backward_program)):
            if text:
                users.setdefault(text, []).append(f"#{k + 1} {f.op}{what}, {short_site(f.site)}")
    return join(*(_section(text, names) for text, names in users.items())) if users else None


def _section(text: str, names: list[str]) -> Markup:
    head = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"
    shown = tag("pre", coloured(text), class_="code", tabindex=0, aria_label=f"program of {names[0]}")
    try:
        program = mcir.parse(text)
    except mcir.ParseError as error:
        return tag("section", tag("h3", head), shown, tag("p", f"Not counted: {error}.", class_="note"))
    told = tag("div", _traffic(program), lifetime.chart(program, names[0]), class_="beside")
    return tag("section", tag("h3", head), tag("div", shown, told, class_="program"))


def coloured(text: str) -> Markup:
    """A program with an element around each word that has a meaning; its statements have the numbers of the chart."""
    lines, number = [], 0
    for line in text.splitlines():
        number += line.startswith(" ")
        shown = number if line.startswith(" ") else ""
        # Drawn by the style sheet, so that copying the text leaves the numbers out.
        lines.append(tag("span", *_words(line), "\n", class_="line", data_n=shown))
    return join(*lines)


def _words(line: str) -> list[Markup | str]:
    out: list[Markup | str] = []
    at = 0
    for found in _TOKEN.finditer(line):
        out += [line[at : found.start()], tag("span", found.group(), class_=f"t-{found.lastgroup}")]
        at = found.end()
    return [*out, line[at:]]


def _traffic(program: mcir.Program) -> Markup:
    """Bytes between memory and chip, by buffer: a row with a bar each."""
    found = mcir.traffic(program)
    most = max((b.total for _, b in found.buffers), default=0)
    role = {b.name: b.role for b in program.buffers}
    rows = [_row(f"{role[name]} {name}", b, most) for name, b in found.buffers]
    rows.append(_row("all", found.dram, 0))
    head = [
        tag("th", "buffer", scope="col"),
        *(tag("th", h, scope="col", class_="number") for h in ("read", "written")),
        tag("th", "in all", scope="col"),
    ]
    table = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows), class_="traffic")
    least = f"No program of this computation moves fewer than {bytes_text(found.compulsory.total)}."
    work = f"{_count(found.flops)} operations, {found.intensity:.3g} a byte."
    return join(tag("h4", "Memory traffic"), table, tag("p", f"{least} {work}", class_="note"))


def _row(name: str, moved: Bytes, most: int) -> Markup:
    width = f"width:{100 * moved.total / most:.1f}%" if most else None
    bar = tag("span", class_="bar before", style=width) if width else None
    cells = [tag("td", bytes_text(n) if n else "", class_="number") for n in (moved.read, moved.written)]
    return tag("tr", tag("th", name, scope="row"), *cells, tag("td", bar, class_="wide"))


def _count(n: int) -> str:
    for word, size in (("trillion", 10**12), ("billion", 10**9), ("million", 10**6)):
        if n >= size:
            return f"{n / size:.3g} {word}"
    return f"{n:,}"
