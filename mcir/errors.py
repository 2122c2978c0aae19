"""What this package raises."""

from __future__ import annotations


class MCIRError(Exception):
    """Base of all errors of this package."""


class DeriveError(MCIRError):
    """A computation graph that cannot be made a memory flow graph.

    Attributes:
      code: a short name of the reason, e.g. ``"primitive"``, ``"reshape"``, ``"axis_twice"``.
      expected, found: in words.
    """

    def __init__(self, code: str, expected: str, found: str):
        super().__init__(f"[{code}] expected {expected}, found {found}")
        self.code, self.expected, self.found = code, expected, found


class VerifyError(MCIRError):
    """A program that breaks a rule of the language; the message names the statement and the rule."""


class ParseError(MCIRError):
    """Text that is not a program; the message names line, what was expected and what was found."""
