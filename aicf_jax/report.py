"""`Report`: what `explain` found, as values, text, JSON, a page and plots."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from aicf_jax import html, plots
from aicf_jax.errors import Comparison, Refusal
from aicf_jax.outline import Outline


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
      bytes_before, bytes_after: bytes between memory and chip, one kernel per operation as written against what the
        chosen kernel moves (`Kernel.moved_bytes`), or one kernel in all where it is left to XLA.
      launches_before, launches_after: kernel launches, counted the same way (`Kernel.launches`). What XLA fuses by
        itself is not subtracted.
      backward: the derived composite backward as text.
      program, backward_program: the memory flow programs (`mcir`) of the kernels that operation and backward run as,
        empty where they are left to XLA.
      rewrite: its number in the order in which rewrites are made, from 1 (``Policy(fuel=n)`` makes the first n); None
        for what an inner `fuse` has made. An inner program that is called from several places is rewritten once.
      bound: largest difference from its equations, relative to the largest magnitude of the result, that
        ``Policy(verify=True)`` accepts.
      error: the largest such difference that `aicf_jax.compare` has measured; None where nothing was measured, because
        nothing was run or because the operation runs as its own equations.
      hardware: what the policy's property map tells: seconds as written and as it runs, what they rest on, what the map
        lacks. Empty without a map for the platform.
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
    rewrite: int | None = None
    bound: float = 0.0
    error: float | None = None
    hardware: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """Fusions and refusals of one program and of the programs inside it.

    Attributes:
      target: name of what was explained.
      fusions, refusals: in program order; a nested program counts once for each place it is called from.
      program: the rewritten program as text.
      peak_bytes_before, peak_bytes_after: largest sum of bytes alive, by the lifetimes of the execution plans.
      failure: why the program runs unfused as a whole, None when it does not.
      outlines: the program, and those inside it that hold fusions, as `to_html` draws them.
      comparisons: what `aicf_jax.compare` has measured, of operations first and of the program last.
      hardware: what is to be known of the policy's property map: that it is of another kind of device and was not used,
        or of another machine than the target. Empty where there is nothing to say.
    """

    target: str
    fusions: tuple[Fusion, ...]
    refusals: tuple[Refusal, ...]
    program: str
    peak_bytes_before: int
    peak_bytes_after: int
    failure: str | None = None
    outlines: tuple[Outline, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    hardware: str = ""

    def count(self, op: str) -> int:
        """Number of fused operations of this name."""
        return sum(f.op == op for f in self.fusions)

    @property
    def bytes_before(self) -> int:
        """Sum over the fusions."""
        return sum(f.bytes_before for f in self.fusions)

    @property
    def bytes_after(self) -> int:
        """Sum over the fusions."""
        return sum(f.bytes_after for f in self.fusions)

    @property
    def launches_before(self) -> int:
        """Sum over the fusions."""
        return sum(f.launches_before for f in self.fusions)

    @property
    def launches_after(self) -> int:
        """Sum over the fusions."""
        return sum(f.launches_after for f in self.fusions)

    def to_json(self) -> str:
        """Everything but the program text and its outlines as a JSON object."""
        data = dataclasses.asdict(dataclasses.replace(self, outlines=()))
        del data["program"], data["outlines"]
        data["fusions"] = [{**f, "kernels": dict(f["kernels"])} for f in data["fusions"]]
        return json.dumps(data, indent=2)

    def __str__(self) -> str:
        head = f"{self.target}: {_plural(len(self.fusions), 'fusion')}, {_plural(len(self.refusals), 'refusal')}"
        lines = [head]
        if self.failure:
            lines.append(f"runs unfused: {self.failure}")
        if self.hardware:
            lines.append(f"hardware: {self.hardware}")
        for f in self.fusions:
            lines += ["", *_fusion_lines(f)]
        for r in self.refusals:
            lines += ["", *_refusal_lines(r)]
        lines += ["", *(f"compared {c}" for c in self.comparisons)] if self.comparisons else []
        return "\n".join(lines)

    def to_html(self) -> str:
        """One self-contained page that needs no network: what was fused and refused, drawings, programs, lifetimes."""
        return html.page(self)

    def _repr_html_(self) -> str:
        """The page's content, for notebooks."""
        return html.fragment(self)

    def plot(self) -> Any:
        """A matplotlib ``Figure``: bytes before and after, and buffer lifetimes of what streams.

        Raises:
          ImportError: matplotlib is not there; it is in the extra ``experiments``.
        """
        return plots.plot(self)


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
        *_block("hardware", f.hardware),
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
        *([f"        {r.detail.removesuffix(f': {r.found}')}"] if r.stage == "select" else []),  # names the kernel
        f"        expected {r.expected}",
        f"        found    {r.found}",
    ]
