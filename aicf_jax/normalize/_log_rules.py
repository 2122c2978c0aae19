"""What each primitive does to forms (`_log_forms`): the whole algebra, one rule for each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from aicf_jax.graph import Node
from aicf_jax.normalize._constants import SAME_VALUE, constant, is_float
from aicf_jax.normalize._log_forms import EXP, LOG, Form, Guard, combined, log_sum, row_max, scaled, shifted, stopped
from aicf_jax.normalize.bias import unit_reshape

if TYPE_CHECKING:
    from aicf_jax.normalize._log_region import LogRegion


def _sum(region: LogRegion, node: Node, sign: float) -> Form | None:
    a, b = region.operands(node)
    if isinstance(a, Form) and isinstance(b, Form):
        return combined(a, b, sign, region.tolerance) if a.domain == LOG else None
    if isinstance(a, Form) and isinstance(b, float):
        return shifted(a, sign * b, region.tolerance) if a.domain == LOG else None
    if isinstance(a, float) and isinstance(b, Form) and b.domain == LOG:
        turned = scaled(b, sign, region.tolerance)
        return turned and shifted(turned, a, region.tolerance)
    return None


def _product(region: LogRegion, node: Node, sign: int) -> Form | None:
    """``a * b`` and ``a / b`` (sign -1)."""
    a, b = region.operands(node)
    if isinstance(a, Form) and isinstance(b, Form):
        return combined(a, b, sign, region.tolerance) if a.domain == EXP else None
    if isinstance(a, Form) and isinstance(b, float):
        return _times(region, a, b if sign > 0 or b == 0 else 1 / b)
    if isinstance(a, float) and isinstance(b, Form):
        if sign > 0:
            return _times(region, b, a)
        reciprocal = scaled(b, -1.0, region.tolerance) if b.domain == EXP else None
        return reciprocal and _times(region, reciprocal, a)
    return None


def _times(region: LogRegion, form: Form, factor: float) -> Form | None:
    if form.domain == LOG:
        return scaled(form, factor, region.tolerance)
    return shifted(form, math.log(factor), region.tolerance) if 0 < factor < math.inf else None


def _power(region: LogRegion, node: Node) -> Form | None:
    form = region.operand(node.inputs[0])
    exponent = region.operand(node.inputs[1]) if node.op == "pow" else float(_params(region, node)["y"])
    if isinstance(form, Form) and form.domain == EXP and isinstance(exponent, float):
        return scaled(form, exponent, region.tolerance)
    return None


def _exponential(region: LogRegion, node: Node) -> Form | None:
    form = region.operand(node.inputs[0])
    if not isinstance(form, Form) or form.domain != LOG:
        return None
    scale = math.log(2) if node.op == "exp2" else 1.0
    form = scaled(form, scale, region.tolerance)
    return form and dataclasses.replace(form, domain=EXP)


def _logarithm(region: LogRegion, node: Node) -> Form | None:
    form = region.operand(node.inputs[0])
    return dataclasses.replace(form, domain=LOG) if isinstance(form, Form) and form.domain == EXP else None


def _same(region: LogRegion, node: Node) -> Form | None:
    form = region.forms.get(node.inputs[0])
    if node.op == "stop_gradient" and form is not None:
        # Of x itself: there it stands before a maximum only.
        return stopped(form) if not form.slope else form if _only_maximum(region, node) else None
    if form is not None and form.slope == 1 and not form.terms and form.domain == LOG and _rounds(region, node):
        return None  # x rounded is another value
    if node.op == "abs" and form is not None and form.domain != EXP:
        return None
    return form if is_float(region.graph, node.outputs[0]) else None


def _rounds(region: LogRegion, node: Node) -> bool:
    """Whether a conversion loses digits."""
    before, after = (region.graph.values[v].aval.dtype for v in (node.inputs[0], node.outputs[0]))
    return node.op == "convert_element_type" and jnp.promote_types(before, after) != after


def _only_maximum(region: LogRegion, node: Node) -> bool:
    """Whether nothing but maxima are taken of a value."""
    return all(region.graph.nodes[c].op == "reduce_max" for c in region.graph.users(node.outputs[0]))


def _negative(region: LogRegion, node: Node) -> Form | None:
    form = region.forms.get(node.inputs[0])
    return scaled(form, -1.0, region.tolerance) if form is not None and form.domain == LOG else None


def _reduction(region: LogRegion, node: Node) -> Form | None:
    """The maximum of ``a x + C`` is ``a max + C`` for a > 0, the sum of ``exp(a x + C)`` is ``exp(L_a + C)``."""
    form = region.forms.get(node.inputs[0])
    if form is None or not form.slope or form.loose:
        return None
    axis = form.dims.index(region.axis)
    if tuple(_params(region, node)["axes"]) != (axis,):
        return None
    if node.op == "reduce_max" and (form.domain != LOG or form.slope < 0):
        return None
    if node.op == "reduce_sum" and form.domain != EXP:
        return None
    position = int(region.graph.producer[node.inputs[0]])
    held = position >= 0 and region.graph.nodes[position].op == "stop_gradient"
    term, c = (row_max(form.mask, held), form.slope) if form.domain == LOG else (log_sum(form.slope, form.mask), 1.0)
    terms = {**form.terms, term: form.terms.get(term, 0.0) + c}
    terms = {t: c for t, c in terms.items() if c}
    # Dimensions of one are in place anywhere.
    dims = tuple(d if region.shape[d] != 1 else None for i, d in enumerate(form.dims) if i != axis and d is not None)
    return dataclasses.replace(form, slope=0.0, terms=terms, dims=dims, mask=None, zeroed=False)


def _rearranged(region: LogRegion, node: Node) -> Form | None:
    """A row constant with dimensions added, dropped or exchanged; a function of x with dimensions exchanged."""
    form = region.forms.get(node.inputs[0])
    if form is None or len(node.inputs) != 1 or (form.slope and node.op != "transpose"):
        return None
    before, after = (region.graph.values[v].aval.shape for v in (node.inputs[0], node.outputs[0]))
    if node.op == "transpose":
        origin: dict[int, int] | None = dict(enumerate(_params(region, node)["permutation"]))
    elif node.op == "broadcast_in_dim":
        origin = {int(d): i for i, d in enumerate(_params(region, node)["broadcast_dimensions"])}
    elif node.op == "reshape" and _params(region, node).get("dimensions") is not None:
        origin = None
    else:
        origin = unit_reshape(before, after)
    if origin is None:
        return None
    return dataclasses.replace(
        form, dims=tuple(form.dims[origin[j]] if j in origin else None for j in range(len(after)))
    )


def _maximum(region: LogRegion, node: Node) -> Form | None:
    """``max(-inf, m)``."""
    a, b = region.operands(node)
    if isinstance(a, float):
        a, b = b, a
    return a if isinstance(a, Form) and a.domain == LOG and b == -math.inf else None


def _test(region: LogRegion, node: Node) -> Guard | None:
    """``is_finite(m)``, ``m != -inf``, ``m > -inf``, ``m == -inf`` of a row constant m."""
    form = region.forms.get(node.inputs[0])
    if form is None or form.slope or form.domain != LOG:
        return None
    if node.op == "is_finite":
        return Guard(form, True, True)
    return Guard(form, node.op != "eq", False) if region.operand(node.inputs[1]) == -math.inf else None


def _selection(region: LogRegion, node: Node) -> Form | None:
    """A guarded maximum, or what a mask leaves out set to -inf (before ``exp``) or 0 (after it, or for the time)."""
    if len(node.inputs) != 3:
        return None
    pred, *branches = node.inputs
    for keeps, kept, other in ((False, *branches), (True, *branches[::-1])):
        form, fill = region.forms.get(kept), constant(region.graph, other)[0]
        if form is None or fill is None:
            continue
        guard = region.guard(pred)
        if guard is not None:
            same = (stopped(guard.form) or guard.form) == (stopped(form) or form) and guard.keeps == keeps and fill == 0
            return dataclasses.replace(form, guarded=form.guarded or guard.guarded) if same else None
        return _masked(form, (region.mask(pred), keeps, form.dims), fill)
    return None


def _masked(form: Form, mask: Hashable, fill: float) -> Form | None:
    if not form.slope or form.mask not in (None, mask):
        return None
    if fill != (-math.inf if form.domain == LOG else 0):
        # x with a number where the mask hides it: jax replaces what it leaves out later, so that it is finite.
        is_x = form.domain == LOG and form.slope == 1 and not form.terms and form.mask is None
        return dataclasses.replace(form, mask=mask, loose=True) if is_x and math.isfinite(fill) else None
    if form.mask is None and (form.domain == EXP or form.terms):
        return None  # an element that was part of the maximum or the sum is not left out by setting it to 0 later
    normalized = any(isinstance(t, tuple) and t[0] == "log_sum" for t in form.terms)
    return dataclasses.replace(form, mask=mask, zeroed=form.zeroed or normalized, loose=False)


def _params(region: LogRegion, node: Node) -> Any:
    return region.graph.eqn(node.covers[0]).params


#: Primitive -> rule; a rule answers None for what the algebra has no form for.
RULES: dict[str, Callable[[LogRegion, Node], Form | Guard | None]] = {
    "add": lambda region, node: _sum(region, node, 1.0),
    "sub": lambda region, node: _sum(region, node, -1.0),
    "mul": lambda region, node: _product(region, node, 1),
    "div": lambda region, node: _product(region, node, -1),
    **dict.fromkeys(("pow", "integer_pow"), _power),
    **dict.fromkeys(("exp", "exp2"), _exponential),
    "log": _logarithm,
    "neg": _negative,
    "max": _maximum,
    "select_n": _selection,
    **dict.fromkeys(("abs", *SAME_VALUE), _same),
    **dict.fromkeys(("reduce_max", "reduce_sum"), _reduction),
    **dict.fromkeys(("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose"), _rearranged),
    **dict.fromkeys(("is_finite", "eq", "ne", "gt"), _test),
}
