"""Errors of the framework, and refusals, which are values and never errors."""

from __future__ import annotations

import dataclasses


class FuseError(Exception):
    """`fuse` or `explain` could not do what was asked; the message names the argument and the remedy."""


class VerificationError(FuseError):
    """A fused operation and its unfused equations disagree beyond the bound (``Policy(verify=True)``)."""


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
    """

    pattern: str
    stage: str
    code: str
    detail: str
    expected: str
    found: str
    site: str

    def __post_init__(self) -> None:
        if self.stage not in ("match", "legality", "select"):
            raise ValueError(f"Refusal(stage=...): expected 'match', 'legality' or 'select', found {self.stage!r}")
        if not self.code:
            raise ValueError("Refusal(code=...): expected a non-empty code, found ''")

    def __str__(self) -> str:
        return (
            f"{self.pattern}: {self.code} at {self.site} [{self.stage}]: expected {self.expected}, found {self.found}"
        )
