"""Errors of the framework, and refusals, which are values and never errors."""

from __future__ import annotations

import dataclasses


class FuseError(Exception):
    """`fuse` or `explain` could not do what was asked; the message names the argument and the remedy."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A fused operation, or the whole program, held against its unfused equations on values.

    Attributes:
      op: name of the operation, ``"program"`` for all of it.
      what: the operation with its attributes, and what it ran as.
      result: which result differs most.
      error: largest difference, relative to the largest finite magnitude of the equations' result; infinite where
        shapes, dtypes, or the places of NaN and infinities differ.
      bound: what is accepted.
      site: the user's source line.
    """

    op: str
    what: str
    result: int
    error: float
    bound: float
    site: str

    @property
    def agrees(self) -> bool:
        """Whether the error is within the bound."""
        return self.error <= self.bound

    def __str__(self) -> str:
        verb = "is within" if self.agrees else "exceeds"
        error = f"relative error {self.error:.3g} {verb} the bound {self.bound:.3g}"
        return f"{self.what}, result {self.result}: {error}, at {self.site}"


class VerificationError(FuseError):
    """A fused operation and its unfused equations disagree beyond the bound (``Policy(verify=True)``).

    Attributes:
      comparison: what disagrees. `op`, `error`, `bound` and `site` are its own.
    """

    def __init__(self, comparison: Comparison):
        super().__init__(str(comparison))
        self.comparison = comparison
        self.op, self.error, self.bound, self.site = (
            comparison.op,
            comparison.error,
            comparison.bound,
            comparison.site,
        )

    def __reduce__(self) -> tuple[type, tuple[Comparison]]:
        return type(self), (self.comparison,)


class GraphError(FuseError):
    """`Graph.verify` found a broken invariant. Always a fault of the framework or of a plug-in, never of a model."""


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a region that looks like a pattern was left as written.

    Attributes:
      pattern: the pattern's name.
      stage: where it was turned down: ``"match"``, ``"legality"`` or ``"select"``.
      code: a stable word to test for, e.g. ``"multiple_consumers"``.
      detail: one sentence for a person.
      expected, found: the two sides of the failed condition.
      site: ``file.py:line (function)`` of the user's operation.
      kernel: the kernel that was turned down, empty where it is the pattern or where several were.
    """

    pattern: str
    stage: str
    code: str
    detail: str
    expected: str
    found: str
    site: str
    kernel: str = ""

    def __post_init__(self) -> None:
        if self.stage not in ("match", "legality", "select"):
            raise ValueError(f"Refusal(stage=...): expected 'match', 'legality' or 'select', found {self.stage!r}")
        if not self.code:
            raise ValueError("Refusal(code=...): expected a non-empty code, found ''")

    def __str__(self) -> str:
        where = f"kernel {self.kernel} at {self.site}" if self.kernel else f"at {self.site}"
        return f"{self.pattern}: {self.code} {where} [{self.stage}]: expected {self.expected}, found {self.found}"
