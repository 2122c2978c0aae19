"""Which polynomials (`_moments`) are norms, and what is to be said of those that almost are."""

from __future__ import annotations

import dataclasses
import math

from aicf_jax.normalize import _moments as moments
from aicf_jax.normalize._moments import MEAN, MEAN_SQUARE, VARIANCE, Monomial, Poly, Symbol, X

_MOMENTS: Poly = {((MEAN_SQUARE, 1),): 1.0, ((MEAN, 2),): -1.0}
_SQUARE: Poly = {((MEAN_SQUARE, 1),): 1.0}
_VARIANCE: Poly = {((VARIANCE, 1),): 1.0}
#: What stands under the root -> the name of the formula.
FORMULAS = (("centered", _VARIANCE), ("moments", _MOMENTS), ("mean_square", _SQUARE))

#: code -> (expected, found)
NEAR_MISSES = {
    "axes_not_trailing": ("statistics over trailing axes", "statistics over other axes, as of a batch or an image"),
    "statistics_reused": (
        "the statistics and the normalized value are used by the norm only",
        "a norm whose inner values are used elsewhere too",
    ),
    "stopped_statistics": (
        "statistics that are differentiated",
        "a statistic behind stop_gradient: the gradient is another function",
    ),
    "scale_axes": (
        "a scale that varies along the normalized axes only",
        "the reciprocal deviation times a factor that varies along other axes",
    ),
    "eps_outside_root": ("x / sqrt(variance + eps)", "x / (sqrt(variance) + eps)"),
    "ddof": ("the mean of the squared deviations", "their sum divided by N - 1"),
    "sum_of_squares": ("the mean of the squares", "their sum: x divided by its length"),
    "second_moment": ("the variance of what is centered", "the mean square of what is not"),
    "not_centered": ("the mean is subtracted, or the mean square is used", "x divided by its standard deviation"),
    "other_factor": ("no factor but the scale", "a norm times a number"),
    "other_value": (
        "statistics of the value that is normalized",
        "a value times the reciprocal deviation of another",
    ),
    "other_statistic": ("the variance or the mean square plus eps", "another statistic"),
}


@dataclasses.dataclass(frozen=True)
class Norm:
    """``(x - mean) * (variance + eps)^(-1/2) * scale + bias``, without the mean for a root mean square.

    `formula`: one of `FORMULAS`; `clamped`: a variance below 0 counts as 0. `scale`, `bias`: symbols of values.
    """

    formula: str
    clamped: bool
    eps: float
    scale: Symbol | None
    bias: Symbol | None

    @property
    def is_centered(self) -> bool:
        return self.formula != "mean_square"


@dataclasses.dataclass(frozen=True)
class _Parts:
    """``c * (x - mean) * root * scale + bias`` taken apart, the root unknown yet."""

    root: Symbol
    factor: float
    centered: bool
    scale: Symbol | None
    bias: Symbol | None


def norm_of(p: Poly, axes: frozenset[int], wide: frozenset[int], tolerance: float) -> Norm | None:
    """The norm that a polynomial is. `axes`: those of the statistics, `wide`: those of them longer than 1."""
    parts = _parts(p, tolerance)
    if parts is None or not math.isclose(parts.factor, 1.0, rel_tol=tolerance):
        return None
    if parts.scale is not None and parts.scale == parts.bias:
        return None  # one array in two places; the addend stays outside
    if not all(s is None or _runs_along(s, axes, wide) for s in (parts.scale, parts.bias)):
        return None
    found = _statistic(parts.root, tolerance)
    if found is None or parts.centered != (found[0] != "mean_square"):
        return None
    return Norm(*found, parts.scale, parts.bias)


def _runs_along(symbol: Symbol, axes: frozenset[int], wide: frozenset[int]) -> bool:
    varying = frozenset(symbol[2])
    return varying <= axes and bool(varying or not wide)


def _parts(p: Poly, tolerance: float) -> _Parts | None:
    with_x = [(m, c) for m, c in p.items() if any(s == X for s, _ in m)]
    if len(with_x) != 1:
        return None
    ((monomial, c),) = with_x
    exponents = dict(monomial)
    roots = [s for s in exponents if s[0] == "root"]
    values = [s for s in exponents if s[0] == "value"]
    if len(roots) != 1 or len(values) > 1 or set(exponents.values()) != {1} or len(exponents) != 2 + len(values):
        return None
    without = moments.product_of(*(((s, e),) for s, e in monomial if s != X), ((MEAN, 1),))
    for centered, core in ((True, {monomial: c, without: -c}), (False, {monomial: c})):
        rest = moments.plus(p, core, -1.0, tolerance)
        bias = _addend(rest)
        if not rest or bias is not None:
            return _Parts(roots[0], c, centered, values[0] if values else None, bias)
    return None


def _addend(rest: Poly) -> Symbol | None:
    """The value that a polynomial is."""
    if len(rest) != 1:
        return None
    ((monomial, c),) = rest.items()
    if c != 1.0 or len(monomial) != 1 or monomial[0][0][0] != "value" or monomial[0][1] != 1:
        return None
    return monomial[0][0]


def _statistic(root: Symbol, tolerance: float) -> tuple[str, bool, float] | None:
    """``(formula, clamped, eps)`` of what stands under a root."""
    p, eps, clamped = _under(root)
    return next(((name, clamped, eps) for name, q in FORMULAS if moments.equal(p, q, tolerance)), None)


def _under(root: Symbol) -> tuple[dict[Monomial, float], float, bool]:
    """``(statistic, eps, clamped)``."""
    p = moments.inner(root)
    eps = p.pop(moments.ONE, 0.0)
    if len(p) == 1:
        ((monomial, c),) = p.items()
        if c == 1.0 and len(monomial) == 1 and monomial[0][1] == 1 and monomial[0][0][0] == "at_least":
            bounded = monomial[0][0]
            if bounded[2] == 0.0:
                return moments.inner(bounded), eps, True
    return p, eps, False


# -- near misses -----------------------------------------------------------------------------------------


def roots_of(p: Poly) -> set[Symbol]:
    """Reciprocals of statistics among the factors."""
    return {s for m in p for s, e in m if moments.is_reciprocal(s, e)}


def has_x(p: Poly) -> bool:
    """Whether x itself, not only its statistics, is multiplied by the reciprocal of one."""
    return any(any(s == X for s, _ in m) and any(moments.is_reciprocal(s, e) for s, e in m) for m in p)


def almost(p: Poly, length: int, shape: tuple[int, ...], axes: frozenset[int], tolerance: float) -> str | None:
    """The code of a polynomial that resembles a norm and is none; None where nothing resembles one."""
    found = sorted(roots_of(p), key=repr)
    if not found:
        return None
    if moments.contains(p, "stopped"):
        return "stopped_statistics"
    if not has_x(p):
        wide = {d for d, n in enumerate(shape) if n != 1}
        whole = [s for s in moments.symbols(p) if s[0] == "value" and set(s[2]) == wide and not wide <= axes]
        return "other_value" if whole else None
    if found[0][0] == "inverse":
        inner = moments.symbols(moments.inner(found[0]))
        return "eps_outside_root" if any(s[0] == "root" for s in inner) else "other_statistic"
    if any(s[0] == "value" and not set(s[2]) <= axes for s in moments.symbols(p)):
        return "scale_axes"
    return _statistic_code(p, found[0], length, tolerance)


def _statistic_code(p: Poly, root: Symbol, length: int, tolerance: float) -> str:
    under, _, _ = _under(root)
    for name, q in FORMULAS:
        lead = next(iter(q))
        factor = under.get(lead, 0.0)
        if not factor or not moments.equal(under, {m: c * factor for m, c in q.items()}, tolerance):
            continue
        if math.isclose(factor, 1.0, rel_tol=tolerance):
            centered = any(s == MEAN for m in p for s, _ in m)
            if centered == (name != "mean_square"):
                return "other_factor"
            return "second_moment" if centered else "not_centered"
        if math.isclose(factor, length, rel_tol=tolerance):
            return "sum_of_squares"
        if length > 1 and math.isclose(factor, length / (length - 1), rel_tol=tolerance):
            return "ddof"
    return "other_statistic"
