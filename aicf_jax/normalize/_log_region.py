"""The values around an ``exp`` that depend on one value x and row constants, each with its form (`_log_forms`)."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from aicf_jax.flags import OpFlags
from aicf_jax.graph import Graph, Node
from aicf_jax.normalize._log_forms import EXP, LOG, Form, combined, log_sum, row_max, scaled, shifted
from aicf_jax.normalize.bias import broadcast_source, unit_reshape

#: Regions are grown no further than this; jax's own masked softmax has 20 equations.
REGION_EQUATIONS = 40

_HAS_EFFECT = int(OpFlags.HAS_EFFECT)
_SAME_VALUE = ("convert_element_type", "stop_gradient", "copy", "copy_p", "pvary", "pcast")


def is_float(graph: Graph, vid: int) -> bool:
    dtype = getattr(graph.values[vid].aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def constant(graph: Graph, vid: int) -> tuple[float | None, tuple[int, ...]]:
    """``(number, covers)`` of a scalar constant, also broadcast or converted; ``(None, ())`` for all else."""
    covers: list[int] = []
    while graph.values[vid].kind != "literal":
        position = int(graph.producer[vid])
        node = graph.nodes[position] if position >= 0 else None
        if node is None or len(node.inputs) != 1 or node.op not in ("broadcast_in_dim", *_SAME_VALUE):
            return None, ()
        covers.extend(node.covers)
        vid = node.inputs[0]
    value = np.asarray(graph.literal(vid))
    if value.ndim or value.dtype.kind in "OcbV" and value.dtype != jnp.bfloat16:
        return None, ()
    return float(value), tuple(covers)


@dataclasses.dataclass(frozen=True)
class _Guard:
    """A truth value about a row maximum: `keeps` is what it is where the maximum may be used."""

    form: Form
    keeps: bool
    guarded: bool


class LogRegion:
    """Members in program order; `forms` by VID, that of x included."""

    def __init__(self, graph: Graph, x: int, axis: int):
        aval = graph.values[x].aval
        # Coefficients are literals rounded to the type they are used in; low precision ones are compared as float32.
        self.tolerance = 4 * float(jnp.finfo(jnp.promote_types(aval.dtype, jnp.float32)).eps)
        self.graph, self.x, self.axis, self.shape = graph, x, axis, aval.shape
        self.dims = tuple(None if n == 1 else d for d, n in enumerate(aval.shape))
        self.forms: dict[int, Form] = {x: Form(LOG, 1.0, {}, self.dims)}
        self.members: list[int] = []
        self._guards: dict[int, _Guard] = {}
        self._masks: dict[int, tuple[Hashable, int, tuple[int, ...]]] = {}
        queue = list(graph.users(x))
        heapq.heapify(queue)
        seen: set[int] = set()
        while queue and len(self.members) < REGION_EQUATIONS:
            position = heapq.heappop(queue)
            if position not in seen and self._add(position):
                for c in graph.consumers(position):
                    heapq.heappush(queue, c)
            seen.add(position)

    # -- forms ------------------------------------------------------------------------------------------
    def _add(self, position: int) -> bool:
        node = self.graph.nodes[position]
        rule = _RULES.get(node.op)
        if rule is None or len(node.covers) != 1 or len(node.outputs) != 1 or node.flags & _HAS_EFFECT:
            return False
        form = rule(self, node)
        if isinstance(form, _Guard):
            self._guards[node.outputs[0]] = form
        elif form is not None and self._fits(form, node.outputs[0]):
            self.forms[node.outputs[0]] = form
        else:
            return False
        self.members.append(position)
        return True

    def _fits(self, form: Form, vid: int) -> bool:
        return not form.slope or (form.dims == self.dims and self.graph.values[vid].aval.shape == self.shape)

    def operand(self, vid: int) -> Form | float | None:
        """A form, a number, or None for what varies along the axis and is not a function of x."""
        form = self.forms.get(vid)
        if form is not None:
            return form
        number, _ = constant(self.graph, vid)
        if number is not None:
            return number
        if self.graph.values[vid].aval.ndim not in (0, len(self.shape)) or not is_float(self.graph, vid):
            return None
        _, varying, _ = broadcast_source(self.graph, vid)
        if self.axis in varying:
            return None
        return Form(LOG, 0.0, {("value", vid): 1.0}, tuple(d if d in varying else None for d in range(len(self.shape))))

    def mask(self, vid: int) -> Hashable:
        """A name for a predicate: equal for two broadcasts of the same value in the same way."""
        steps: list[Hashable] = []
        covers: list[int] = []
        source = vid
        while (position := int(self.graph.producer[source])) >= 0:
            node = self.graph.nodes[position]
            if node.op not in ("broadcast_in_dim", "reshape") or len(node.covers) != 1 or len(node.inputs) != 1:
                break
            steps.append((self.graph.values[source].aval.shape, str(self.graph.eqn(node.covers[0]).params)))
            covers.extend(node.covers)
            source = node.inputs[0]
        self._masks[vid] = ((source, *steps), source, tuple(covers))
        return self._masks[vid][0]

    # -- closed parts of the region ------------------------------------------------------------------------
    def needed(self, exit_position: int, stop: Iterable[int] = ()) -> list[int]:
        """Members the exit is computed from, itself included, back to x and the values in `stop`."""
        nodes, producer, stop = self.graph.nodes, self.graph.producer, {self.x, *stop}
        found, todo = {exit_position}, [exit_position]
        while todo:
            for v in nodes[todo.pop()].inputs:
                p = int(producer[v])
                if v not in stop and (v in self.forms or v in self._guards) and p not in found:
                    found.add(p)
                    todo.append(p)
        return sorted(found)

    def is_closed(self, members: Iterable[int], exits: Iterable[int]) -> bool:
        """Whether only `members` use the values between x and the `exits` (positions)."""
        members, exits = set(members), set(exits)
        return all(set(self.users(p)) <= members | exits and not self._escapes(p) for p in members - exits)

    def users(self, position: int) -> list[int]:
        """Consumers, but for those whose own result nobody uses (jax's logsumexp computes a sign it drops)."""
        graph = self.graph
        return [
            c
            for c in graph.consumers(position)
            if graph.consumers(c) or self._escapes(c) or graph.nodes[c].flags & _HAS_EFFECT
        ]

    def _escapes(self, position: int) -> bool:
        return not self.graph.escaping.isdisjoint(self.graph.nodes[position].outputs)

    def surroundings(self, members: Iterable[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """``(inputs, covers)``: what members read besides forms, and their equations with those of constants."""
        inputs: dict[int, None] = {}
        covers: set[int] = set()
        for p in members:
            covers.update(self.graph.nodes[p].covers)
            for v in self.graph.nodes[p].inputs:
                if v in self.forms or v in self._guards or self.graph.values[v].kind == "literal":
                    continue
                number, more = constant(self.graph, v)
                if number is None and v in self._masks:
                    _, source, more = self._masks[v]
                    inputs[source] = None
                elif number is None:
                    inputs[v] = None
                covers.update(more)
        return tuple(inputs), tuple(sorted(covers))

    def guard(self, vid: int) -> _Guard | None:
        return self._guards.get(vid)


# -- one rule for each primitive --------------------------------------------------------------------------
def _sum(region: LogRegion, node: Node, sign: float) -> Form | None:
    a, b = (region.operand(v) for v in node.inputs)
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
    a, b = (region.operand(v) for v in node.inputs)
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
    if node.op == "abs" and form is not None and form.domain != EXP:
        return None
    return form if is_float(region.graph, node.outputs[0]) else None


def _negative(region: LogRegion, node: Node) -> Form | None:
    form = region.forms.get(node.inputs[0])
    return scaled(form, -1.0, region.tolerance) if form is not None and form.domain == LOG else None


def _reduction(region: LogRegion, node: Node) -> Form | None:
    """The maximum of ``a x + C`` is ``a max + C`` for a > 0, the sum of ``exp(a x + C)`` is ``exp(L_a + C)``."""
    form = region.forms.get(node.inputs[0])
    if form is None or not form.slope or tuple(_params(region, node)["axes"]) != (region.axis,):
        return None
    if node.op == "reduce_max" and (form.domain != LOG or form.slope < 0):
        return None
    if node.op == "reduce_sum" and form.domain != EXP:
        return None
    term, c = (row_max(form.mask), form.slope) if form.domain == LOG else (log_sum(form.slope, form.mask), 1.0)
    terms = {**form.terms, term: form.terms.get(term, 0.0) + c}
    terms = {t: c for t, c in terms.items() if c}
    dims = tuple(d for i, d in enumerate(form.dims) if i != region.axis)
    return dataclasses.replace(form, slope=0.0, terms=terms, dims=dims, mask=None, zeroed=False)


def _rearranged(region: LogRegion, node: Node) -> Form | None:
    """A row constant with dimensions added, dropped or exchanged."""
    form = region.forms.get(node.inputs[0])
    if form is None or form.slope or len(node.inputs) != 1:
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
    return dataclasses.replace(form, dims=tuple(form.dims[origin[j]] if j in origin else None for j in range(len(after))))


def _maximum(region: LogRegion, node: Node) -> Form | None:
    """``max(-inf, m)``."""
    a, b = (region.operand(v) for v in node.inputs)
    if isinstance(a, float):
        a, b = b, a
    return a if isinstance(a, Form) and a.domain == LOG and b == -math.inf else None


def _test(region: LogRegion, node: Node) -> _Guard | None:
    """``is_finite(m)``, ``m != -inf``, ``m > -inf``, ``m == -inf`` of a row constant m."""
    form = region.forms.get(node.inputs[0])
    if form is None or form.slope or form.domain != LOG:
        return None
    if node.op == "is_finite":
        return _Guard(form, True, True)
    return _Guard(form, node.op != "eq", False) if region.operand(node.inputs[1]) == -math.inf else None


def _selection(region: LogRegion, node: Node) -> Form | None:
    """A guarded maximum, or what a mask leaves out set to -inf (before ``exp``) or 0 (after it)."""
    if len(node.inputs) != 3:
        return None
    pred, *branches = node.inputs
    for keeps, kept, other in ((False, *branches), (True, *branches[::-1])):
        form, fill = region.forms.get(kept), constant(region.graph, other)[0]
        if form is None or fill is None:
            continue
        guard = region.guard(pred)
        if guard is not None:
            same = guard.form == form and guard.keeps == keeps and fill == 0
            return dataclasses.replace(form, guarded=form.guarded or guard.guarded) if same else None
        return _masked(form, (region.mask(pred), keeps), fill)
    return None


def _masked(form: Form, mask: Hashable, fill: float) -> Form | None:
    if not form.slope or fill != (-math.inf if form.domain == LOG else 0) or form.mask not in (None, mask):
        return None
    if form.mask is None and (form.domain == EXP or form.terms):
        return None  # an element that was part of the maximum or the sum is not left out by setting it to 0 later
    normalized = any(isinstance(t, tuple) and t[0] == "log_sum" for t in form.terms)
    return dataclasses.replace(form, mask=mask, zeroed=form.zeroed or normalized)


def _params(region: LogRegion, node: Node) -> Any:
    return region.graph.eqn(node.covers[0]).params


_RULES: dict[str, Callable[[LogRegion, Node], Form | _Guard | None]] = {
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
    **dict.fromkeys(("abs", *_SAME_VALUE), _same),
    **dict.fromkeys(("reduce_max", "reduce_sum"), _reduction),
    **dict.fromkeys(("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose"), _rearranged),
    **dict.fromkeys(("is_finite", "eq", "ne", "gt"), _test),
}
