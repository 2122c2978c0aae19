"""The algebra norms are recognized with: polynomials in x, its mean and mean square, and roots of such.

Every value around a norm is a sum of products of *symbols*: x itself, the row statistics ``m = E[x]``, ``q = E[x^2]``
and ``v = E[(x - m)^2]``, a reciprocal root ``r = (v + eps)^(-1/2)``, and values from elsewhere (scale, bias). Means are
taken symbol by symbol, so ``(x - m) r``, ``x r - m r`` and ``(x - m) / sqrt(v + eps)`` are one polynomial. v is told
from ``q - m^2``: the two are one number and two ways to compute it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from aicf_jax.normalize._log_forms import merged

Symbol = tuple[Any, ...]
#: Symbols and their exponents, none of them 0, in a fixed order; the empty product is 1.
Monomial = tuple[tuple[Symbol, int], ...]
Poly = Mapping[Monomial, float]
#: A polynomial as part of a symbol: hashable, equal up to rounding.
Key = tuple[tuple[Monomial, float], ...]

X: Symbol = ("x",)
MEAN: Symbol = ("mean",)
MEAN_SQUARE: Symbol = ("mean_square",)
VARIANCE: Symbol = ("variance",)
ONE: Monomial = ()

#: Products and sums with more terms than this are not followed.
TERMS = 8


def key(p: Poly) -> Key:
    """The polynomial as a part of a symbol. Twelve digits are more than any literal of a program has in float32."""
    return tuple(sorted(((m, float(f"{c:.12g}")) for m, c in p.items()), key=repr))


def root(p: Poly) -> Symbol:
    """The factor ``p^(-1/2)``."""
    return ("root", key(p))


def inverse(p: Poly) -> Symbol:
    """``1 / p`` of a sum."""
    return ("inverse", key(p))


def at_least(p: Poly, bound: float) -> Symbol:
    """The factor ``max(p, bound)``."""
    return ("at_least", key(p), bound)


def stopped(p: Poly) -> Symbol:
    """The factor p as a constant of differentiation."""
    return ("stopped", key(p))


def value(source: int, varying: frozenset[int]) -> Symbol:
    """A value from elsewhere: its VID before it was broadcast, the dimensions of x along which it varies."""
    return ("value", source, varying)


def power(symbol: Symbol, exponent: int = 1) -> Poly:
    return {((symbol, exponent),): 1.0}


def number(c: float) -> Poly:
    return {ONE: c} if c else {}


def as_number(p: Poly) -> float | None:
    """The number that a polynomial without symbols is."""
    return p.get(ONE, 0.0) if p.keys() <= {ONE} else None


def symbols(p: Poly) -> set[Symbol]:
    return {s for m in p for s, _ in m}


def product_of(*monomials: Monomial) -> Monomial:
    exponents: dict[Symbol, int] = {}
    for monomial in monomials:
        for symbol, e in monomial:
            exponents[symbol] = exponents.get(symbol, 0) + e
    return tuple(sorted(((s, e) for s, e in exponents.items() if e), key=repr))


def plus(a: Poly, b: Poly, sign: float, tolerance: float) -> Poly:
    """``a + sign * b``, what cancels up to rounding left out."""
    return merged(a, b, sign, tolerance)  # pyright: ignore[reportReturnType, reportArgumentType]


def times(a: Poly, b: Poly, tolerance: float) -> Poly | None:
    out: Poly = {}
    for m, c in a.items():
        for n, d in b.items():
            out = plus(out, {product_of(m, n): c * d}, 1.0, tolerance)
    return out if len(out) <= TERMS and all(map(math.isfinite, out.values())) else None


def reciprocal(p: Poly) -> Poly | None:
    """``1 / p``: of a product each symbol's, of a sum a symbol of its own; None for 0."""
    if len(p) != 1:
        return power(inverse(p)) if p else None
    ((monomial, c),) = p.items()
    return {tuple((s, -e) for s, e in monomial): 1 / c}


def half_power(p: Poly, exponent: float) -> Poly | None:
    """``p^(k/2)`` for odd k, as a power of the reciprocal root."""
    if as_number(p) is not None or not p:
        return None
    return power(root(p), round(-2 * exponent))


def raised(p: Poly, exponent: float, tolerance: float) -> Poly | None:
    """``p^exponent`` for whole and half exponents."""
    if 2 * exponent != round(2 * exponent) or not 0 < abs(exponent) <= 4:
        return None
    if exponent != round(exponent):
        return half_power(p, exponent)
    base = p if exponent > 0 else reciprocal(p)
    out = base
    for _ in range(round(abs(exponent)) - 1):
        out = out and times(out, base or {}, tolerance)
    return out


def centered_square(p: Poly, tolerance: float) -> float | None:
    """The c where p is ``c (x - m)^2``."""
    c = p.get(((X, 2),), 0.0)
    square = {product_of(((X, 2),)): c, product_of(((X, 1),), ((MEAN, 1),)): -2 * c, product_of(((MEAN, 2),)): c}
    return c if c and equal(p, square, tolerance) else None


def expectation(p: Poly, tolerance: float) -> Poly | None:
    """The mean along the row. What varies along it besides x and x^2 has none that is known."""
    c = centered_square(p, tolerance)
    if c is not None:
        return {((VARIANCE, 1),): c}
    out: Poly = {}
    for monomial, c in p.items():
        moment: dict[int, Monomial] = {0: (), 1: ((MEAN, 1),), 2: ((MEAN_SQUARE, 1),)}
        degree = dict(monomial).get(X, 0)
        rest = tuple(pair for pair in monomial if pair[0] != X)
        if degree not in moment or any(not is_row(s) for s, _ in rest):
            return None
        out = plus(out, {product_of(rest, moment[degree]): c}, 1.0, tolerance)
    return out


def is_row(symbol: Symbol) -> bool:
    """Whether a symbol is a statistic of the row, and nothing from elsewhere."""
    if symbol in (MEAN, MEAN_SQUARE, VARIANCE):
        return True
    return _is_nested(symbol) and all(map(is_row, symbols(inner(symbol))))


def equal(a: Poly, b: Poly, tolerance: float) -> bool:
    return a.keys() == b.keys() and all(math.isclose(a[m], b[m], rel_tol=tolerance) for m in a)


def contains(p: Poly, *kinds: str) -> bool:
    """Whether a symbol of one of these kinds occurs, also inside of others."""
    return any(s[0] in kinds or (_is_nested(s) and contains(inner(s), *kinds)) for s in symbols(p))


def inner(symbol: Symbol) -> dict[Monomial, float]:
    """The polynomial inside of a symbol."""
    return dict(symbol[1])


def _is_nested(symbol: Symbol) -> bool:
    return symbol[0] in ("root", "inverse", "at_least", "stopped")


def is_reciprocal(symbol: Symbol, exponent: int) -> bool:
    """Whether a factor is the reciprocal of a statistic or of its root, however guarded."""
    if symbol[0] == "stopped":
        return contains(power(symbol), "root", "inverse")
    return symbol[0] in ("root", "inverse") or (symbol[0] == "at_least" and exponent < 0)
