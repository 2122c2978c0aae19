"""Mean and variance of a batch norm that are used further, as for running averages."""

from __future__ import annotations

from collections.abc import Sequence

from aicf_jax.normalize import _moments as moments
from aicf_jax.normalize._moments import MEAN, MEAN_SQUARE, VARIANCE, Poly
from aicf_jax.normalize._norm_region import Form, NormRegion

_MOMENTS: Poly = {((MEAN_SQUARE, 1),): 1.0, ((MEAN, 2),): -1.0}


def statistics_of(region: NormRegion, members: Sequence[int], position: int) -> list[tuple[int, str]] | None:
    """``(value, kind)`` of the values between x and the result at a position that others use too.

    Kinds are ``"mean"``, ``"variance"`` and ``"clamped"``, a variance that is no less than 0. None where one is
    something else, or was broadcast along the axes.
    """
    graph, inside, found = region.graph, set(members), []
    for p in members:
        vid = graph.nodes[p].outputs[0]
        if p == position or (set(region.users(p)) <= inside and vid not in graph.escaping):
            continue
        kind = _kind(region.forms[vid].poly, region.tolerance)
        if kind is None or not _is_compact(region, vid, region.forms[vid]):
            return None
        found.append((vid, kind))
    return found


def _kind(p: Poly, tolerance: float) -> str | None:
    if moments.equal(p, moments.power(MEAN), tolerance):
        return "mean"
    for q in (moments.power(VARIANCE), _MOMENTS):
        if moments.equal(p, q, tolerance):
            return "variance"
        if moments.equal(p, moments.power(moments.at_least(q, 0.0)), tolerance):
            return "clamped"
    return None


def _is_compact(region: NormRegion, vid: int, form: Form) -> bool:
    """Whether there is one number for each that the statistic has, in the order of the dimensions of x."""
    shape = region.graph.values[vid].aval.shape
    present = [d for d in form.dims if d is not None]
    wide = [d for d, n in enumerate(region.shape) if n != 1 and d not in region.axes]
    counted = all(n == 1 for n, d in zip(shape, form.dims, strict=True) if d is None)
    return counted and [d for d in present if d in wide] == wide
