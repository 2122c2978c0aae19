"""How arguments and attributes that do not fit are refused: what it is, what was expected, what was found."""

from __future__ import annotations


def expect(function: str, name: str, ok: bool, expected: str, found: object) -> None:
    """Raises ValueError unless `ok`, naming the argument of a function, what was expected, what was found."""
    if not ok:
        raise ValueError(f"{function}({name}=...): expected {expected}, found {found!r}")


def expect_attribute(owner: object, name: str, ok: bool, expected: str) -> None:
    """The same for an attribute of an object that checks itself."""
    expect(type(owner).__name__, name, ok, expected, getattr(owner, name))
