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


def band(graph: Any, v: int, query: str, key: str, seen: bool) -> Band:
    """The keys for which a predicate is `seen`. Raises Unidentified where they are no band."""
    value = graph.values[v]
    if value.dtype == "bool" and (known := number(graph, v)) is not None:
        if bool(known) != seen:
            raise Unidentified("a mask that hides all keys")
        return Band()
    if value.op == "not":
        return band(graph, value.args[0], query, key, not seen)
    if (value.op == "and") == seen and value.op in ("and", "or"):
        a, b = (band(graph, a, query, key, seen) for a in value.args)
        return a & b
    if value.op in ("ne", "eq") and number(graph, value.args[1]) == 0 and (inner := _truth(graph, value)) is not None:
        return band(graph, inner, query, key, seen == (value.op == "ne"))
    if value.op == "convert_element_type" and value.dtype == "bool" and (inner := _truth(graph, value)) is not None:
        return band(graph, inner, query, key, seen)
    if value.op == "select_n" and len(value.args) == 3:
        cases = [number(graph, a) for a in value.args[1:]]
        if None not in cases and bool(cases[0]) != bool(cases[1]):
            return band(graph, value.args[0], query, key, seen == bool(cases[1]))
    if value.op in _NEGATED:
        return _comparison(graph, value, query, key, value.op if seen else _NEGATED[value.op])
    raise Unidentified(f"a mask by {value.op}")


def _truth(graph: Any, value: Any) -> int | None:
    """The predicate that a value's first argument is as a number, if it is one."""
    inner = value.args[0]
    while graph.values[inner].dtype != "bool":
        if graph.values[inner].op != "convert_element_type":
            return None
        (inner,) = graph.values[inner].args
    return inner


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
