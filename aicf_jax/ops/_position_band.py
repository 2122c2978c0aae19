"""Masks computed from positions, read exactly: which keys a query sees, as limits of how far apart they are."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

#: Types in which positions and their differences are exact.
_EXACT = ("int32", "int64", "float32", "float64")
_NEGATED = {"ge": "lt", "lt": "ge", "gt": "le", "le": "gt"}


class Unidentified(Exception):
    """Something that is not one of the forms that are known exactly; the message says what."""


@dataclasses.dataclass(frozen=True)
class Band:
    """Query i sees key j where ``lower <= j - i <= upper``; None: no such limit."""

    lower: int | None = None
    upper: int | None = None

    def __and__(self, other: Band) -> Band:
        lower = [x for x in (self.lower, other.lower) if x is not None]
        upper = [x for x in (self.upper, other.upper) if x is not None]
        return Band(max(lower, default=None), min(upper, default=None))

    def moved(self, first: int) -> Band:
        """The band of the queries from `first` on, counted from there."""
        return Band(*(None if x is None else x + first for x in (self.lower, self.upper)))


def conditions(graph: Any, v: int, seen: bool) -> list[tuple[int, bool]]:
    """What a predicate being `seen` means, as values that must all be what is given beside them; empty: nothing.

    Raises Unidentified for a predicate that never is.
    """
    value = graph.values[v]
    if value.dtype == "bool" and (known := number(graph, v)) is not None:
        if bool(known) != seen:
            raise Unidentified("a mask that hides all keys")
        return []
    if value.op == "not":
        return conditions(graph, value.args[0], not seen)
    if (value.op == "and") == seen and value.op in ("and", "or"):
        return [c for a in value.args for c in conditions(graph, a, seen)]
    is_zero = value.op in ("ne", "eq") and number(graph, value.args[1]) == 0
    if is_zero or (value.op == "convert_element_type" and value.dtype == "bool"):
        holds = seen == (value.op != "eq")
        if inner := _truths(graph, value.args[0], holds):
            return [c for i in inner for c in conditions(graph, i, holds)]
    if value.op == "select_n" and len(value.args) == 3:
        cases = [number(graph, a) for a in value.args[1:]]
        if None not in cases and bool(cases[0]) != bool(cases[1]):
            return conditions(graph, value.args[0], seen == bool(cases[1]))
    return [(v, seen)]


def band(graph: Any, v: int, query: str, key: str, seen: bool) -> Band:
    """The keys for which a predicate is `seen`. Raises Unidentified where they are no band."""
    found = Band()
    for condition, holds in conditions(graph, v, seen):
        found &= limit(graph, condition, query, key, holds)
    return found


def limit(graph: Any, v: int, query: str, key: str, seen: bool) -> Band:
    """The keys for which one of the `conditions` is `seen`. Raises Unidentified where they are no band."""
    value = graph.values[v]
    if value.op in _NEGATED:
        return _comparison(graph, value, query, key, value.op if seen else _NEGATED[value.op])
    raise Unidentified(f"a mask by {value.op}")


def _truths(graph: Any, v: int, all_hold: bool) -> list[int]:
    """Predicates of which a number is the truth value, or, where all of them hold, the product; none: empty."""
    value = graph.values[v]
    if value.dtype == "bool":
        return [v]
    if value.op == "convert_element_type":
        return _truths(graph, value.args[0], all_hold)
    if value.op == "mul" and all_hold:
        a, b = (_truths(graph, i, all_hold) for i in value.args)
        return [*a, *b] if a and b else []
    return []


def _comparison(graph: Any, value: Any, query: str, key: str, op: str) -> Band:
    """``left op right`` where the difference of both sides is ``+-(j - i) + c``."""
    left, right = (_affine(graph, a) for a in value.args)
    if op in ("le", "lt"):
        left, right = right, left
    slopes = {a: left[0].get(a, 0) - right[0].get(a, 0) for a in {*left[0], *right[0]}}
    slopes = {a: s for a, s in slopes.items() if s}
    c, strict = left[1] - right[1], op in ("gt", "lt")
    if slopes == {key: 1, query: -1}:
        return Band(lower=math.floor(-c) + 1 if strict else math.ceil(-c))
    if slopes == {key: -1, query: 1}:
        return Band(upper=math.ceil(c) - 1 if strict else math.floor(c))
    raise Unidentified("a mask that is no limit on the distance of query and key")


def _affine(graph: Any, v: int) -> tuple[dict[str, float], float]:
    """A value as ``sum of slope * position + constant``."""
    value = graph.values[v]
    if value.dtype not in _EXACT:
        raise Unidentified(f"positions of type {value.dtype}")
    known = number(graph, v)
    if known is not None:
        return {}, float(known)
    if value.op == "iota":
        return {value.param("axis"): 1}, 0.0
    if value.op == "convert_element_type":
        return _affine(graph, value.args[0])
    if value.op in ("add", "sub"):
        (a, c), (b, d) = (_affine(graph, x) for x in value.args)
        sign = 1 if value.op == "add" else -1
        return {x: a.get(x, 0) + sign * b.get(x, 0) for x in {*a, *b}}, c + sign * d
    if value.op == "neg":
        a, c = _affine(graph, value.args[0])
        return {x: -s for x, s in a.items()}, -c
    raise Unidentified(f"positions through {value.op}")


_FUNCTIONS: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative, "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
}  # fmt: skip


def number(graph: Any, v: int) -> float | bool | None:
    """A value that is one known number, None where it is not: constants and a little arithmetic, rounded as written."""
    value = graph.values[v]
    if value.op == "constant":
        return _rounded(value.param("value"), value.dtype)
    if value.op == "convert_element_type":
        known = number(graph, value.args[0])
        return None if known is None else _rounded(known, value.dtype)
    if value.op == "integer_pow" and (known := number(graph, value.args[0])) is not None:
        return _rounded(float(known) ** int(value.param("y")), value.dtype)
    if value.op in _FUNCTIONS:
        known = [number(graph, a) for a in value.args]
        if None not in known:
            return _rounded(_FUNCTIONS[value.op](*map(float, known)), value.dtype)  # pyright: ignore[reportArgumentType]
    return None


def _rounded(x: Any, dtype: str) -> float | bool:
    rounded = np.asarray(x).astype(jnp.dtype(dtype))
    return bool(rounded) if dtype == "bool" else float(rounded)
