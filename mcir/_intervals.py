"""Interval arithmetic on positions: what a condition can be within a block. False is (0, 0), True (1, 1)."""

from __future__ import annotations

from typing import Any

import numpy as np

Interval = tuple[Any, Any]


def _compare(decide: Any) -> Any:
    return lambda a, b: (decide(a, b)[0].astype(float), decide(a, b)[1].astype(float))


def _product(a: Interval, b: Interval) -> Interval:
    ends = [x * y for x in a for y in b]
    return np.minimum.reduce(ends), np.maximum.reduce(ends)


def equal(a: Interval, b: Interval) -> Interval:
    sure = (a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0])
    possible = (a[0] <= b[1]) & (b[0] <= a[1])
    return sure.astype(float), possible.astype(float)


def negate(a: Interval) -> Interval:
    return 1 - a[1], 1 - a[0]


def _select(p: Interval, no: Interval, yes: Interval) -> Interval:
    low = np.where(p[0] > 0, yes[0], np.where(p[1] <= 0, no[0], np.minimum(no[0], yes[0])))
    high = np.where(p[0] > 0, yes[1], np.where(p[1] <= 0, no[1], np.maximum(no[1], yes[1])))
    return low, high


RULES: dict[str, Any] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _product,
    "neg": lambda a: (-a[1], -a[0]),
    "max": lambda a, b: (np.maximum(a[0], b[0]), np.maximum(a[1], b[1])),
    "min": lambda a, b: (np.minimum(a[0], b[0]), np.minimum(a[1], b[1])),
    "abs": lambda a: (
        np.where((a[0] <= 0) & (a[1] >= 0), 0, np.minimum(abs(a[0]), abs(a[1]))),
        np.maximum(abs(a[0]), abs(a[1])),
    ),
    "ge": _compare(lambda a, b: (a[0] >= b[1], a[1] >= b[0])),
    "gt": _compare(lambda a, b: (a[0] > b[1], a[1] > b[0])),
    "le": _compare(lambda a, b: (a[1] <= b[0], a[0] <= b[1])),
    "lt": _compare(lambda a, b: (a[1] < b[0], a[0] < b[1])),
    "eq": equal,
    "ne": lambda a, b: negate(equal(a, b)),
    "and": lambda a, b: (np.minimum(a[0], b[0]), np.minimum(a[1], b[1])),
    "or": lambda a, b: (np.maximum(a[0], b[0]), np.maximum(a[1], b[1])),
    "not": negate,
    "select_n": _select,
    "convert_element_type": lambda a: a,
}
