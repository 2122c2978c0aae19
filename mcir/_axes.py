"""Axis inference: which dimensions of which arrays are the same loop.

A dimension is a tuple of *atoms*, major first: none for a dimension of size one, several for one that a reshape merged.
Atoms are united when an operation puts two dimensions side by side, and split when a reshape cuts one in two.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from mcir.errors import DeriveError

Dim = tuple["Atom", ...]


@dataclasses.dataclass(eq=False)
class Atom:
    """One loop. After `unite` it stands for another atom (`same`), after a split for several (`parts`)."""

    size: int
    same: Atom | None = None
    parts: tuple[Atom, ...] | None = None


def fresh(size: int) -> Dim:
    """A dimension of its own."""
    return () if size == 1 else (Atom(size),)


def resolve(dim: Dim) -> Dim:
    """The atoms a dimension consists of by now."""
    out: list[Atom] = []
    for atom in dim:
        while atom.same is not None:
            atom = atom.same
        out.extend(resolve(atom.parts) if atom.parts is not None else (atom,))
    return tuple(out)


def size_of(dim: Dim) -> int:
    return math.prod(a.size for a in resolve(dim))


def unite(a: Dim, b: Dim) -> Dim:
    """Makes two dimensions of equal size the same loop; returns it.

    Raises DeriveError(code="reshape") when they are cut at places that do not fit.
    """
    if size_of(a) != size_of(b):
        raise DeriveError("shape", "dimensions of one size", f"{size_of(a)} beside {size_of(b)}")
    while True:
        left, right = resolve(a), resolve(b)
        for x, y in zip(left, right, strict=False):
            if x is y:
                continue
            if x.size == y.size:
                y.same = x
            elif x.size > y.size:
                _split(x, y.size)
            else:
                _split(y, x.size)
            break
        else:
            return left


def _split(atom: Atom, major: int) -> None:
    if atom.size % major:
        raise DeriveError("reshape", "dimensions that are cut at the same places", f"{atom.size} cut at {major}")
    atom.parts = (Atom(major), Atom(atom.size // major))


def regroup(dims: Sequence[Dim], sizes: Sequence[int]) -> list[Dim]:
    """Dimensions of a reshaped array: the same atoms in the same order, grouped by the new sizes, cut where needed."""
    atoms = [a for dim in dims for a in resolve(dim)]
    out: list[Dim] = []
    for size in sizes:
        group: list[Atom] = []
        have = 1
        while have < size:
            if not atoms:
                raise DeriveError(
                    "reshape", "as many elements after a reshape as before", f"too few for {tuple(sizes)}"
                )
            atom = atoms.pop(0)
            if have * atom.size > size:
                if size % have or atom.size % (size // have):
                    raise DeriveError("reshape", "a reshape that cuts dimensions evenly", f"{atom.size} cut for {size}")
                _split(atom, size // have)
                atoms[:0] = resolve((atom,))
                continue
            group.append(atom)
            have *= atom.size
        out.append(tuple(group))
    if atoms:
        raise DeriveError("reshape", "as many elements after a reshape as before", f"more than {tuple(sizes)}")
    return out
