"""What an operation on constants is, and operations that change nothing: left behind by spellings, read by nobody.

Exact for every element, with the sign of zero and NaN: ``x + 0`` stays for floats, where it makes 0 of -0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mcir.graph import Value

_FOLDED: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_EXACT = ("int32", "int64", "float32", "float64")


_TURNED = {"le": "ge", "lt": "gt"}


def in_one_form(op: str, args: tuple[int, ...], values: Sequence[Value]) -> tuple[str, tuple[int, ...]]:
    """One spelling of many: operands in order (inputs last in products), ``>`` and ``>=`` only, nothing negated."""
    if op in ("add", "mul", "max", "min", "and", "or") and len(args) == 2:
        return op, tuple(sorted(args))
    if op in _TURNED:
        return _TURNED[op], args[::-1]
    if op == "select_n" and len(args) == 3 and values[args[0]].op == "not":
        return op, (values[args[0]].args[0], args[2], args[1])
    if op == "not" and (turned := negated(args[0], values)) is not None:
        return turned
    if op == "dot":
        return op, tuple(sorted(args, key=lambda a: values[a].op == "input"))
    return op, args


def negated(position: int, values: Sequence[Value]) -> tuple[str, tuple[int, ...]] | None:
    """The comparison of integers that is the opposite of this one."""
    value = values[position]
    if value.op not in ("ge", "gt") or "int" not in values[value.args[0]].dtype:
        return None
    return {"ge": "gt", "gt": "ge"}[value.op], value.args[::-1]


def simplified(op: str, args: Sequence[int], values: Sequence[Value], axes: set[str], dtype: str) -> Any:
    """The position of the argument that the operation gives back, the number it is (a NumPy scalar), or None."""
    same = _unchanged(op, values, dtype)
    if same is not None and set(values[same].axes) == axes and values[same].dtype == dtype:
        return args[same]
    if op in _FOLDED and all(v.op == "constant" and v.dtype in _EXACT for v in values):
        with np.errstate(all="ignore"):
            return _FOLDED[op](*(np.asarray(v.param("value"), v.dtype) for v in values))
    return None


def _unchanged(op: str, values: Sequence[Value], dtype: str) -> int | None:
    """Which argument the operation gives back, if it does."""
    constants = [v.param("value") if v.op == "constant" else None for v in values]
    if op == "select_n" and len(values) == 3:
        if dtype == "bool" and constants[1:] == [False, True]:
            return 0
        if isinstance(constants[0], bool):
            return 2 if constants[0] else 1
        return 1 if values[1] is values[2] else None
    for k in (0, 1) if op in ("and", "or", "add", "mul", "max", "min") else (1,) if op in ("sub", "div") else ():
        if constants[k] is not None and _neutral(op, constants[k], dtype):
            return 1 - k
    return None


def _neutral(op: str, constant: Any, dtype: str) -> bool:
    if op in ("and", "or"):
        return dtype == "bool" and bool(constant) == (op == "and")
    if op in ("max", "min"):
        return constant == (-math.inf if op == "max" else math.inf)
    if op == "add":
        return constant == 0 and "int" in dtype
    if op == "sub":
        return constant == 0 and math.copysign(1.0, constant) > 0
    return constant == 1 and dtype != "bool"
