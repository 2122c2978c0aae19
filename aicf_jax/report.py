"""`Report`: what `explain` found, as values, text, JSON and a page."""

from __future__ import annotations

import dataclasses
import html
import json
from typing import Any

from aicf_jax.errors import Refusal


@dataclasses.dataclass(frozen=True)
class Fusion:
    """One fused operation.

    Attributes:
      op: name, e.g. ``"gemm_epilogue"``.
      pattern: the pattern that found it.
      kernel: what it runs as on the target (or on the default backend); ``"xla"``: its own equations.
      kernels: (platform, kernel) for every platform a choice was made for.
      numerics: class of the rewrite, see `Policy`.
      site: the user's source line.
      attrs: attributes, e.g. ``"activation=relu has_bias=1"``.
      result: type of the result.
      bytes_before, bytes_after: bytes between memory and chip, one kernel per operation as written against one in all.
      launches_before, launches_after: kernel launches, counted the same way. What XLA fuses by itself is not
        subtracted.
      backward: the derived composite backward as text.
      program, backward_program: the memory flow programs (`mcir`) of the kernels that operation and backward run as,
        empty where they are left to XLA.
    """

    op: str
    pattern: str
    kernel: str
    kernels: tuple[tuple[str, str], ...]
    numerics: str
    site: str
    attrs: str
    result: str
    bytes_before: int
    bytes_after: int
    launches_before: int
    launches_after: int
    backward: str
    program: str = ""
    backward_program: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """Fusions and refusals of one program and of the programs inside it.

    Attributes:
      target: name of what was explained.
      fusions, refusals: in program order; a nested program counts once for each place it is called from.
      program: the rewritten program as text.
      peak_bytes_before, peak_bytes_after: largest sum of bytes alive, by the lifetimes of the execution plans.
      failure: why the program runs unfused as a whole, None when it does not.
    """

    target: str
    fusions: tuple[Fusion, ...]
    refusals: tuple[Refusal, ...]
    program: str
    peak_bytes_before: int
    peak_bytes_after: int
    failure: str | None = None

    def count(self, op: str) -> int:
        """Number of fused operations of this name."""
        return sum(f.op == op for f in self.fusions)

    def to_json(self) -> str:
        """Everything but the program text as a JSON object."""
        data = dataclasses.asdict(self)
        del data["program"]
        data["fusions"] = [{**f, "kernels": dict(f["kernels"])} for f in data["fusions"]]
        return json.dumps(data, indent=2)

    def __str__(self) -> str:
        head = f"{self.target}: {_plural(len(self.fusions), 'fusion')}, {_plural(len(self.refusals), 'refusal')}"
        lines = [head]
        if self.failure:
            lines.append(f"runs unfused: {self.failure}")
        for f in self.fusions:
            lines += ["", *_fusion_lines(f)]
        for r in self.refusals:
            lines += ["", *_refusal_lines(r)]
        return "\n".join(lines)

    def to_html(self) -> str:
        """One self-contained page: a table of fusions and one of refusals. Needs no network."""
        fused = [
            [
                f.op,
                f.attrs,
                f.kernel,
                _arrow(f.bytes_before, f.bytes_after),
                _arrow(f.launches_before, f.launches_after),
            ]
            + [f.site, f.backward]
            for f in self.fusions
        ]
        refused = [[r.pattern, r.code, r.stage, r.expected, r.found, r.site] for r in self.refusals]
        tables = _table("Fused", ["operation", "attributes", "kernel", "bytes", "launches", "site", "backward"], fused)
        tables += _table("Refused", ["pattern", "code", "stage", "expected", "found", "site"], refused)
        return _PAGE.format(title=html.escape(self.target), tables=tables)


def _plural(n: int, word: str) -> str:
    return f"{n} {word}{'' if n == 1 else 's'}"


def _arrow(before: int, after: int) -> str:
    return f"{before} -> {after}"


def _fusion_lines(f: Fusion) -> list[str]:
    return [
        f"fused   {f.op}  {f.attrs}  {f.result}",
        f"        at {f.site}",
        f"        pattern {f.pattern}, kernel {f.kernel}, numerics {f.numerics}",
        f"        bytes {_arrow(f.bytes_before, f.bytes_after)}, "
        f"launches {_arrow(f.launches_before, f.launches_after)}",
        *_block("backward", f.backward),
        *_block("program", f.program),
        *_block("backward program", f.backward_program),
    ]


def _block(head: str, text: str) -> list[str]:
    """Lines of a longer text, the first behind its name."""
    lines = text.splitlines()
    if len(head) > 8 or any(line.startswith(" ") for line in lines):
        return [f"        {head}", *(f"          {line}" for line in lines)] if lines else []
    return [f"        {'' if i else head:8} {line}" for i, line in enumerate(lines)]


def _refusal_lines(r: Refusal) -> list[str]:
    return [
        f"refused {r.pattern}  {r.code}  [{r.stage}]",
        f"        at {r.site}",
        f"        expected {r.expected}",
        f"        found    {r.found}",
    ]


def _table(title: str, head: list[str], rows: list[list[Any]]) -> str:
    def row(cells: list[Any], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(c))}</{tag}>" for c in cells) + "</tr>"

    return f"<h2>{title} ({len(rows)})</h2><table>{row(head, 'th')}{''.join(row(r, 'td') for r in rows)}</table>"


_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>
body{{font:14px/1.4 system-ui,sans-serif;margin:2rem}}table{{border-collapse:collapse}}
td,th{{border:1px solid #ccc;padding:.3rem .6rem;text-align:left;vertical-align:top;white-space:pre-wrap}}
th{{background:#f3f3f3}}</style><h1>{title}</h1>{tables}</html>
"""
