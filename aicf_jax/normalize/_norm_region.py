"""The values around a norm as polynomials (`_moments`) in one value x and its statistics along some axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

import jax.numpy as jnp

from aicf_jax.flags import OpFlags
from aicf_jax.graph import Graph, Node
from aicf_jax.normalize import _moments as moments
from aicf_jax.normalize._constants import SAME_VALUE, is_float, number
from aicf_jax.normalize._moments import Poly
from aicf_jax.normalize._region import Region
from aicf_jax.normalize.bias import broadcast_source, unit_reshape

#: Regions are grown no further than this; flax's layer norm in low precision has about 30 equations.
REGION_EQUATIONS = 48

_HAS_EFFECT = int(OpFlags.HAS_EFFECT)

#: For each dimension of a value the dimension of x it is, None where the value does not vary.
Dims = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Form:
    """A value of the region."""

    poly: Poly
    dims: Dims

    @property
    def is_row(self) -> bool:
        """Constant along the axes: made of statistics alone."""
        return all(map(moments.is_row, moments.symbols(self.poly)))

    @property
    def has_root(self) -> bool:
        """Whether it is past the root or the reciprocal of a statistic: only there values from elsewhere come in."""
        return any(moments.is_reciprocal(s, e) for m in self.poly for s, e in m)

    @property
    def values(self) -> set[moments.Symbol]:
        return {s for s in moments.symbols(self.poly) if s[0] == "value"}


class NormRegion(Region):
    """What depends on x, statistics of x along `axes`, and at most one factor and one addend from elsewhere."""

    def __init__(self, graph: Graph, x: int, axes: tuple[int, ...]):
        super().__init__(graph, x)
        aval = graph.values[x].aval
        self.axes, self.shape = axes, aval.shape
        self.length = math.prod(aval.shape[a] for a in axes)
        # Coefficients are lengths and their reciprocals, exact or rounded once. N and N - 1 stay apart far beyond any
        # row there is.
        self.tolerance = float(jnp.finfo(jnp.promote_types(aval.dtype, jnp.float32)).eps)
        self.forms: dict[int, Form] = {x: Form(moments.power(moments.X), tuple(range(aval.ndim)))}
        self._sources: dict[int, tuple[int, frozenset[int], tuple[int, ...]]] = {}
        self._grow(REGION_EQUATIONS)

    def _add(self, position: int) -> bool:
        node = self.graph.nodes[position]
        rule = RULES.get(node.op)
        if rule is None or len(node.covers) != 1 or len(node.outputs) != 1 or node.flags & _HAS_EFFECT:
            return False
        form = rule(self, node) if is_float(self.graph, node.outputs[0]) else None
        if form is None or not form.poly or moments.as_number(form.poly) is not None:
            return False
        self.forms[node.outputs[0]] = form
        return True

    def operand(self, vid: int) -> Form | None:
        """A value of the region or a number."""
        form = self.forms.get(vid)
        if form is not None:
            return form
        found = number(self.graph, vid)
        if found is None or not math.isfinite(found[0]):
            return None
        return Form(moments.number(found[0]), (None,) * self.graph.values[vid].aval.ndim)

    def operands(self, node: Node) -> tuple[Form, Form] | None:
        """Both operands of a node; one may be from elsewhere where the other is past the root."""
        a, b = (self.operand(v) for v in node.inputs)
        if a is None and b is not None:
            a = self._value(node.inputs[0], b)
        elif b is None and a is not None:
            b = self._value(node.inputs[1], a)
        return None if a is None or b is None else (a, b)

    def _value(self, vid: int, beside: Form) -> Form | None:
        ndim = self.graph.values[vid].aval.ndim
        # Beside a statistic that has fewer dimensions than x, the value has those of the statistic.
        places: Dims = tuple(range(ndim)) if ndim == len(self.shape) else beside.dims
        if len(places) != ndim or not is_float(self.graph, vid):
            return None
        addends = [m for m in beside.poly if all(s[0] == "value" for s, _ in m)]
        if not beside.has_root or addends:
            return None
        source, varying, _ = self.source(vid)
        along = frozenset(d for i in varying if (d := places[i]) is not None)
        if len(along) < len(varying):
            return None
        return Form(
            moments.power(moments.value(source, along)),
            tuple(d if i in varying else None for i, d in enumerate(places)),
        )

    def source(self, vid: int) -> tuple[int, frozenset[int], tuple[int, ...]]:
        """`broadcast_source`, also of what was broadcast before it was converted."""
        if vid not in self._sources:
            source, varying, covers = broadcast_source(self.graph, vid)
            position = int(self.graph.producer[vid])
            node = self.graph.nodes[position] if position >= 0 else None
            if not covers and node is not None and node.op in SAME_VALUE[:1] and len(node.covers) == 1:
                below, along, more = broadcast_source(self.graph, node.inputs[0])
                if more:
                    source, varying, covers = below, along, (*more, *node.covers)
            self._sources[vid] = source, frozenset(varying), covers
        return self._sources[vid]

    def covers(self, members: Iterable[int]) -> tuple[int, ...]:
        """Equations of the members, with those of numbers and broadcasts that they read."""
        covers: set[int] = set()
        for p in members:
            covers.update(self.graph.nodes[p].covers)
            for v in self.graph.nodes[p].inputs:
                if v in self.forms:
                    continue
                found = number(self.graph, v)
                covers.update(self.source(v)[2] if found is None else found[1])
        return tuple(sorted(covers))


# -- what each primitive does to forms -------------------------------------------------------------------


def _form(poly: Poly | None, dims: Dims | None) -> Form | None:
    return None if poly is None or dims is None else Form(poly, dims)


def _common(a: Dims, b: Dims) -> Dims | None:
    """The dimensions of an elementwise result; None where two different ones meet."""
    if not a or not b:
        return a or b
    if any(i is not None and j is not None and i != j for i, j in zip(a, b, strict=True)):
        return None
    return tuple(j if i is None else i for i, j in zip(a, b, strict=True))


def _sum(region: NormRegion, node: Node, sign: float) -> Form | None:
    pair = region.operands(node)
    if pair is None:
        return None
    a, b = pair
    poly = moments.plus(a.poly, b.poly, sign, region.tolerance)
    return _form(poly if len(poly) <= moments.TERMS else None, _common(a.dims, b.dims))


def _product(region: NormRegion, node: Node) -> Form | None:
    pair = region.operands(node)
    if pair is None:
        return None
    a, b = pair
    if a.values and b.values:
        return None  # one factor, and none after the addend
    return _form(moments.times(a.poly, b.poly, region.tolerance), _common(a.dims, b.dims))


def _quotient(region: NormRegion, node: Node) -> Form | None:
    a, b = (region.operand(v) for v in node.inputs)
    if b is None or not b.is_row:
        return None
    if a is None:
        below = Form(moments.reciprocal(b.poly) or {}, b.dims)
        a = region._value(node.inputs[0], below)
    reciprocal = moments.reciprocal(b.poly)
    if a is None or reciprocal is None:
        return None
    return _form(moments.times(a.poly, reciprocal, region.tolerance), _common(a.dims, b.dims))


def _power(region: NormRegion, node: Node) -> Form | None:
    form = region.operand(node.inputs[0])
    if node.op == "pow":
        exponent = region.operand(node.inputs[1])
        y = None if exponent is None else moments.as_number(exponent.poly)
    else:
        y = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5}.get(node.op)
        y = float(region.graph.eqn(node.covers[0]).params["y"]) if y is None else y
    if form is None or y is None or (y != 2 and not form.is_row):
        return None
    return _form(moments.raised(form.poly, y, region.tolerance), form.dims)


def _maximum(region: NormRegion, node: Node) -> Form | None:
    a, b = (region.operand(v) for v in node.inputs)
    if a is None or b is None:
        return None
    form, bound = (
        (a, moments.as_number(b.poly)) if moments.as_number(b.poly) is not None else (b, moments.as_number(a.poly))
    )
    if bound is None or not form.is_row:
        return None
    return Form(moments.power(moments.at_least(form.poly, bound)), form.dims)


def _negative(region: NormRegion, node: Node) -> Form | None:
    form = region.forms.get(node.inputs[0])
    return form and Form({m: -c for m, c in form.poly.items()}, form.dims)


def _same(region: NormRegion, node: Node) -> Form | None:
    form = region.forms.get(node.inputs[0])
    if form is None or node.op != "stop_gradient":
        return form
    return Form(moments.power(moments.stopped(form.poly)), form.dims) if form.is_row else None


def _selected(region: NormRegion, node: Node) -> Form | None:
    """The branch that a constant condition takes (jax guards its variance against rows without elements)."""
    pred = number(region.graph, node.inputs[0])
    if pred is None or any(v not in region.forms and number(region.graph, v) is None for v in node.inputs[1:]):
        return None
    return region.forms.get(node.inputs[1 + int(pred[0])])


def _total(region: NormRegion, node: Node) -> Form | None:
    """The sum along the axes: N times the mean."""
    form = region.forms.get(node.inputs[0])
    axes = region.graph.eqn(node.covers[0]).params["axes"]
    if form is None or form.dims != tuple(range(len(region.shape))) or set(axes) != set(region.axes):
        return None
    if moments.X not in moments.symbols(form.poly):
        return None
    mean = moments.expectation(form.poly, region.tolerance)
    # Dimensions of one are in place anywhere.
    dims = tuple(d if n != 1 else None for d, n in enumerate(region.shape) if d not in region.axes)
    return _form(mean and {m: c * region.length for m, c in mean.items()}, dims)


def _rearranged(region: NormRegion, node: Node) -> Form | None:
    """What does not vary with x, as a statistic, with dimensions added or dropped."""
    form = region.forms.get(node.inputs[0])
    if form is None or len(node.inputs) != 1 or moments.X in moments.symbols(form.poly):
        return None
    before, after = (region.graph.values[v].aval.shape for v in (node.inputs[0], node.outputs[0]))
    params = region.graph.eqn(node.covers[0]).params
    if node.op == "broadcast_in_dim":
        origin: dict[int, int] | None = {int(d): i for i, d in enumerate(params["broadcast_dimensions"])}
    else:
        origin = unit_reshape(before, after) if params.get("dimensions") is None or node.op == "squeeze" else None
    if origin is None:
        return None
    return Form(form.poly, tuple(form.dims[origin[j]] if j in origin else None for j in range(len(after))))


#: Primitive -> rule; a rule answers None for what has no form.
RULES: dict[str, Callable[[NormRegion, Node], Form | None]] = {
    **dict.fromkeys(("add", "add_any"), lambda region, node: _sum(region, node, 1.0)),
    "sub": lambda region, node: _sum(region, node, -1.0),
    "mul": _product,
    "div": _quotient,
    **dict.fromkeys(("pow", "integer_pow", "square", "sqrt", "rsqrt"), _power),
    "max": _maximum,
    "neg": _negative,
    "select_n": _selected,
    "reduce_sum": _total,
    **dict.fromkeys(SAME_VALUE, _same),
    **dict.fromkeys(("broadcast_in_dim", "reshape", "squeeze", "expand_dims"), _rearranged),
}
