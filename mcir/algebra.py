"""What may be streamed, and why: the algebra behind online reductions.

A stream sees a reduction's final value only after its last tile. A value that is computed from one (a *row value*: it
does not vary along the stream) can still be streamed when the row value can be taken out of the sum again:

- ``sum_j f w_j = f sum_j w_j``: factors distribute over sums (division by the softmax denominator, before or after PV);
- ``exp(x_j + r) = exp(x_j) exp(r)``: exp turns shifts into factors, so the maximum, a log-sum-exp or any other row
  value in the exponent can be taken out;
- what is left, ``exp(x_j)``, is kept relative to the *running* maximum of x and corrected when that grows
  (`mcir.monoid.Rescaled`);
- ``sum_j (x_j - mean)^2`` is the second moment, whose monoid carries the mean (`mcir.monoid.Moments`).

`Forms` gives each value of the stream its form: plain, affine in row values, an exponential of that, or a squared
deviation. No spelling of softmax is known here; all of them have the same form.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from mcir.graph import ComputationGraph, Value

_LN2 = math.log(2.0)
_TRANSPARENT_ROW = ("convert_element_type",)


@dataclasses.dataclass(frozen=True)
class Affine:
    """``scale x + sum of coefficient r`` over row values r; x is plain."""

    x: int
    scale: float
    rows: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Exp:
    """``W exp(base x) exp(sum of c r) product of f^k``, with W what `linear` makes of the exponential.

    `linear` lists linear operations on it in order: ``(value position, argument position)``: that operation of the
    graph, applied to the running representation in place of this argument.

    `guards` are the choices among them of 0 over a value that already had its factors: ``(predicate, whether the value
    is chosen where that is true)``. Where nothing is chosen the sum is 0, even if the factors are NaN or infinite.
    """

    x: int
    base: float
    rows: tuple[tuple[int, float], ...]
    factors: tuple[tuple[int, int], ...]
    linear: tuple[tuple[int, int], ...]
    guards: tuple[tuple[int, bool], ...] = ()


@dataclasses.dataclass(frozen=True)
class Squared:
    """``(x - r)^2`` with r a row value."""

    x: int
    row: int


Form = Affine | Exp | Squared


class Forms:
    """Forms of the values that vary along the streamed axis and depend on reductions over it.

    Args:
      graph: the computation graph.
      axis: the streamed axis.
      pending: positions of reductions over it whose final values are not known yet.
    """

    def __init__(self, graph: ComputationGraph, axis: str, pending: set[int]):
        self.graph, self.axis, self.pending = graph, axis, pending
        self._depends = [False] * len(graph.values)
        self._forms: dict[int, Form | None] = {}
        for i, value in enumerate(graph.values):
            self._depends[i] = i in pending or any(self._depends[a] for a in value.args)

    def depends(self, position: int) -> bool:
        """Whether a value needs the final value of a pending reduction."""
        return self._depends[position]

    def is_row(self, position: int) -> bool:
        """A value that is the same all along the stream."""
        return self.axis not in self.graph.values[position].axes

    def of(self, position: int) -> Form | None:
        """The form of a value that varies along the stream and depends on pending reductions; None: none is known."""
        if position not in self._forms:
            self._forms[position] = self._form(self.graph.values[position], position)
        return self._forms[position]

    # -- rules ------------------------------------------------------------------------------------------
    def _form(self, value: Value, position: int) -> Form | None:
        if self.is_row(position) or not self.depends(position):
            return None
        rule = getattr(self, f"_{value.op}", None)
        return rule(value, position) if rule is not None else None

    def _affine(self, position: int) -> Affine | None:
        """A plain value or one with an affine form, as that."""
        if not self.is_row(position) and not self.depends(position):
            return Affine(position, 1.0, ())
        found = self.of(position)
        return found if isinstance(found, Affine) else None

    def _shift(self, value: Value, sign: float) -> Affine | None:
        a, b = value.args
        if self.is_row(a) and not self.is_row(b):
            inner = self._affine(b)
            return inner and Affine(inner.x, sign * inner.scale, ((a, 1.0), *_scaled(inner.rows, sign)))
        if self.is_row(b) and not self.is_row(a):
            inner = self._affine(a)
            return inner and Affine(inner.x, inner.scale, (*inner.rows, (b, sign)))
        return None

    def _add(self, value: Value, position: int) -> Form | None:
        return self._shift(value, 1.0)

    def _sub(self, value: Value, position: int) -> Form | None:
        return self._shift(value, -1.0)

    def _neg(self, value: Value, position: int) -> Form | None:
        inner = self.of(value.args[0])
        return Affine(inner.x, -inner.scale, _scaled(inner.rows, -1.0)) if isinstance(inner, Affine) else None

    def _exp(self, value: Value, position: int, base: float = 1.0) -> Form | None:
        inner = self.of(value.args[0])
        if not isinstance(inner, Affine) or inner.scale * base <= 0:
            return None
        return Exp(inner.x, inner.scale * base, _scaled(inner.rows, base), (), ())

    def _exp2(self, value: Value, position: int) -> Form | None:
        return self._exp(value, position, _LN2)

    def _mul(self, value: Value, position: int) -> Form | None:
        for k in (0, 1):
            inner, other = self.of(value.args[k]), value.args[1 - k]
            constant = self.constant(other)
            if isinstance(inner, Affine) and constant is not None:
                return Affine(inner.x, inner.scale * constant, _scaled(inner.rows, constant))
            if isinstance(inner, Affine) and isinstance(self.of(other), Affine) and value.args[0] == value.args[1]:
                return self._square(value, position)
            if isinstance(inner, Exp):
                if self.is_row(other) and self.depends(other):
                    return dataclasses.replace(inner, factors=(*inner.factors, (other, 1)))
                if not self.depends(other):
                    return dataclasses.replace(inner, linear=(*inner.linear, (position, k)))
        return None

    def _div(self, value: Value, position: int) -> Form | None:
        inner, other = self.of(value.args[0]), value.args[1]
        constant = self.constant(other)
        if isinstance(inner, Affine) and constant:
            return Affine(inner.x, inner.scale / constant, _scaled(inner.rows, 1 / constant))
        if isinstance(inner, Exp) and self.is_row(other) and self.depends(other):
            return dataclasses.replace(inner, factors=(*inner.factors, (other, -1)))
        if isinstance(inner, Exp) and not self.depends(other):
            return dataclasses.replace(inner, linear=(*inner.linear, (position, 0)))
        return None

    def _select_n(self, value: Value, position: int) -> Form | None:
        predicate, *cases = value.args
        if self.depends(predicate) or len(cases) != 2:
            return None
        for k in (0, 1):
            inner = self.of(cases[k])
            if isinstance(inner, Exp) and self.constant(cases[1 - k]) == 0:
                normalized = inner.factors or len(inner.rows) > 1
                guards = (*inner.guards, (predicate, k == 1)) if normalized else inner.guards
                return dataclasses.replace(inner, linear=(*inner.linear, (position, k + 1)), guards=guards)
        return None

    def _convert_element_type(self, value: Value, position: int) -> Form | None:
        inner = self.of(value.args[0])
        if isinstance(inner, Exp):
            return dataclasses.replace(inner, linear=(*inner.linear, (position, 0)))
        return inner if isinstance(inner, Affine) else None

    def _square(self, value: Value, position: int) -> Form | None:
        inner = self.of(value.args[0])
        if isinstance(inner, Affine) and inner.scale == 1.0 and len(inner.rows) == 1 and inner.rows[0][1] == -1.0:
            return Squared(inner.x, inner.rows[0][0])
        return None

    def _integer_pow(self, value: Value, position: int) -> Form | None:
        return self._square(value, position) if value.param("y") == 2 else None

    # -- row values -------------------------------------------------------------------------------------
    def constant(self, position: int) -> float | None:
        """The number a value is, None when it is none."""
        value = self.graph.values[position]
        if value.op == "convert_element_type":
            return self.constant(value.args[0])
        return float(value.param("value")) if value.op == "constant" else None

    def row(self, position: int) -> int:
        """A row value seen through what does not change it.

        Those are widening conversions, ``max(-inf, r)``, and the guard ``where(isfinite(r), r, 0)``, which the running
        maximum has built in (`mcir.operations.shifted_exp`).
        """
        values = self.graph.values
        while True:
            value = values[position]
            if value.op == "max" and -math.inf in (constants := [self.constant(a) for a in value.args]):
                position = value.args[1 - constants.index(-math.inf)]
            elif value.op == "convert_element_type" and _widens(values[value.args[0]].dtype, value.dtype):
                position = value.args[0]
            elif value.op == "select_n" and self._is_guard(value):
                position = value.args[2]
            else:
                return position

    def _is_guard(self, value: Value) -> bool:
        predicate, if_false, if_true = value.args if len(value.args) == 3 else (0, 0, 0)
        test = self.graph.values[predicate]
        return test.op == "is_finite" and test.args[0] == if_true and self.constant(if_false) == 0

    def exponent(self, position: int) -> dict[tuple[str, int], float]:
        """A row value in an exponent, as a sum: ``("row", r): c`` stands for c r, ``("log", f): c`` for c log f."""
        position = self.row(position)
        value = self.graph.values[position]
        if not self.depends(position):
            return {("row", position): 1.0}
        if value.op in ("add", "sub"):
            second = 1.0 if value.op == "add" else -1.0
            return merged([(self.exponent(value.args[0]), 1.0), (self.exponent(value.args[1]), second)])
        if value.op == "neg":
            return merged([(self.exponent(value.args[0]), -1.0)])
        if value.op == "log":
            return {("log", self.positive(value.args[0])): 1.0}
        if value.op in ("mul", "div"):
            for k in (0, 1) if value.op == "mul" else (0,):
                c = self.constant(value.args[1 - k])
                if c:
                    return merged([(self.exponent(value.args[k]), c if value.op == "mul" else 1 / c)])
        return {("row", position): 1.0}

    def positive(self, position: int) -> int:
        """A row value that is a sum of exponentials, seen through `abs`."""
        value = self.graph.values[position]
        while value.op == "abs" or (value.op == "convert_element_type" and self.row(position) != position):
            position = value.args[0]
            value = self.graph.values[position]
        return position

    def is_mean(self, position: int, x: int, over: tuple[str, ...]) -> bool:
        """Whether a row value is the mean of x over these axes."""
        value = self.graph.values[self.row(position)]
        n = math.prod(self.graph.axes[a] for a in over)
        for k in (0, 1) if value.op == "mul" else (0,) if value.op == "div" else ():
            total = self.graph.values[value.args[k]]
            c = self.constant(value.args[1 - k])
            if c is None or total.op != "reduce_sum" or total.args != (x,) or total.param("over") != over:
                continue
            if np.isclose(c, n if value.op == "div" else 1 / n, rtol=1e-6):
                return True
        return False


def merged(parts: list[tuple[dict[Any, float], float]]) -> dict[Any, float]:
    """Weighted sum of sums; what cancels is dropped."""
    out: dict[Any, float] = {}
    for part, weight in parts:
        for key, c in part.items():
            out[key] = out.get(key, 0.0) + weight * c
    return {k: c for k, c in out.items() if abs(c) > 1e-12}


def _scaled(rows: tuple[tuple[int, float], ...], by: float) -> tuple[tuple[int, float], ...]:
    return tuple((r, c * by) for r, c in rows)


def _widens(before: str, after: str) -> bool:
    order = ["bfloat16", "float16", "float32", "float64"]
    return before in order and after in order and order.index(after) >= max(order.index(before), 2)
