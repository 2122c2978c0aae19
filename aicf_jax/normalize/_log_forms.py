"""The algebra softmax is recognized with: values as ``a x + C`` or ``exp(a x + C)``, C constant along one axis.

Around an ``exp`` every value of interest is *log-affine* in one value x along one axis, or the exponential of that.
The terms of C are the row maximum of x, symbolic log-sums ``L_a = log sum exp(a x)``, numbers, and values from
elsewhere that do not vary along the axis. Then softmax is one form, ``exp(a x - L_a)``, however it was spelled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping

Dims = tuple[int | None, ...]
#: The two domains: the value is the affine form itself, or its exponential.
LOG, EXP = "log", "exp"
#: The numeric term.
ONE = ("one",)


def row_max(mask: Hashable, stopped: bool = False) -> Hashable:
    """The term for the maximum of x along the axis (of what the mask keeps).

    One behind stop_gradient does not cancel with one that is differentiated.
    """
    return ("max", mask, stopped)


def log_sum(slope: float, mask: Hashable) -> Hashable:
    """The term ``log sum exp(slope x)`` along the axis (of what the mask keeps)."""
    return ("log_sum", slope, mask)


@dataclasses.dataclass(frozen=True)
class Form:
    """``slope * x + sum(coefficient * term)``, or the exponential of it.

    Attributes:
      domain: `LOG` or `EXP`.
      slope: coefficient of x; 0 for values that are constant along the axis ("row constants").
      terms: row constants and their coefficients, none of them 0.
      dims: for each dimension of the value the dimension of x it is, None where it does not vary. Those of a function
        of x are a permutation.
      mask: which elements of x take part, None for all; what is left out is -inf (0 in the `EXP` domain).
      guarded: a row maximum that is not finite was replaced by 0.
      zeroed: what the mask leaves out was set to 0 after the normalization as well.
      loose: what the mask leaves out is some number yet, and must be left out before anything is reduced.
    """

    domain: str
    slope: float
    terms: Mapping[Hashable, float]
    dims: Dims
    mask: Hashable = None
    guarded: bool = False
    zeroed: bool = False
    loose: bool = False

    def is_softmax(self, tolerance: float) -> bool:
        """``exp(a x - L_a)``."""
        return not self.loose and self._is_exp_with({log_sum(self.slope, self.mask): -1.0}, tolerance)

    def is_shifted(self, tolerance: float) -> bool:
        """``exp(a (x - max x))``: the unnormalized weights."""
        return any(self._is_exp_with({row_max(self.mask, s): -self.slope}, tolerance) for s in (False, True))

    def _is_exp_with(self, terms: Mapping[Hashable, float], tolerance: float) -> bool:
        if self.domain != EXP or self.slope == 0 or self.terms.keys() != terms.keys():
            return False
        return all(math.isclose(self.terms[t], c, rel_tol=tolerance) for t, c in terms.items())

    def normalizes(self, weights: Form, tolerance: float) -> int:
        """+1 when this row constant is the sum of the weights, -1 when it is its reciprocal, 0 otherwise."""
        if self.domain != EXP or self.slope:
            return 0
        expected = {log_sum(weights.slope, weights.mask): 1.0, **weights.terms}
        for sign in (1, -1):
            difference = merged(self.terms, expected, -sign, tolerance)
            if not difference:
                return sign
        return 0


def stopped(form: Form) -> Form | None:
    """A row constant as a constant of differentiation: only maxima and numbers have such a form."""
    if form.slope or form.domain != LOG:
        return None
    terms: dict[Hashable, float] = {}
    for term, c in form.terms.items():
        if term == ONE:
            terms[term] = c
        elif isinstance(term, tuple) and term[0] == "max":
            held = row_max(term[1], stopped=True)
            terms[held] = terms.get(held, 0.0) + c
        else:
            return None
    return dataclasses.replace(form, terms={t: c for t, c in terms.items() if c})


@dataclasses.dataclass(frozen=True)
class Guard:
    """A truth value about a row maximum: `keeps` is what it is where the maximum may be used."""

    form: Form
    keeps: bool
    guarded: bool


def merged(
    left: Mapping[Hashable, float], right: Mapping[Hashable, float], sign: float, tolerance: float
) -> dict[Hashable, float]:
    """``left + sign * right``, what cancels up to rounding left out."""
    out = dict(left)
    for term, coefficient in right.items():
        before, change = out.get(term, 0.0), sign * coefficient
        if math.isclose(before, -change, rel_tol=tolerance, abs_tol=0.0):
            out.pop(term, None)
        else:
            out[term] = before + change
    return out


def snapped(slope: float, tolerance: float) -> float:
    """1 where a coefficient is 1 up to rounding, as ``log2(e) * ln(2)`` is."""
    return 1.0 if math.isclose(slope, 1.0, rel_tol=tolerance) else slope


def scaled(form: Form, factor: float, tolerance: float) -> Form | None:
    """The form times a number (its power, in the `EXP` domain)."""
    if not math.isfinite(factor) or factor == 0:
        return None
    terms = {term: c * factor for term, c in form.terms.items()}
    return dataclasses.replace(form, slope=snapped(form.slope * factor, tolerance), terms=terms)


def shifted(form: Form, number: float, tolerance: float) -> Form | None:
    """The form plus a number."""
    if not math.isfinite(number):
        return None
    return dataclasses.replace(form, terms=merged(form.terms, {ONE: number} if number else {}, 1.0, tolerance))


def combined(left: Form, right: Form, sign: float, tolerance: float) -> Form | None:
    """``left + sign * right`` (product or quotient in the `EXP` domain); None where the two do not line up."""
    dims = _common(left.dims, right.dims)
    if dims is None or left.domain != right.domain:
        return None
    slope = left.slope + sign * right.slope
    if left.slope and right.slope and (left.mask != right.mask or slope == 0):
        return None
    return Form(
        left.domain,
        snapped(slope, tolerance),
        merged(left.terms, right.terms, sign, tolerance),
        dims,
        left.mask if left.slope else right.mask,
        left.guarded or right.guarded,
        (left.zeroed and bool(left.slope)) or (right.zeroed and bool(right.slope)),
        (left.loose and bool(left.slope)) or (right.loose and bool(right.slope)),
    )


def _common(left: Dims, right: Dims) -> Dims | None:
    """Dimensions of an elementwise result; None when one operand has another dimension in the same place."""
    if len(left) != len(right):
        return None
    if any(a is not None and b is not None and a != b for a, b in zip(left, right, strict=True)):
        return None
    return tuple(b if a is None else a for a, b in zip(left, right, strict=True))
