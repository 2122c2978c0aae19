"""What kind of attention an operation is, for kernels that are made for some kinds and cannot run the user's equations.

Read off the computation graph: scale, softcap, which keys a query sees, and the roles of the axes. All of it is known
exactly or the operation is no kind at all: a string says why.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

import mcir
from aicf_jax import _compat
from aicf_jax.memo import memo
from aicf_jax.ops._attention_composition import softmax_step
from aicf_jax.ops._position_band import Band, Unidentified, band, number
from aicf_jax.ops._semantic import FusedOp


@dataclasses.dataclass(frozen=True)
class Roles:
    """Axes by what they are for. Heads of Q are those of K and V, then `group`: several share a head of K and V."""

    batch: tuple[str, ...]
    group: tuple[str, ...]
    query: str
    key: str
    depth: str
    value_depth: str


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of the operation: the argument it is (-1: a result), and the axes of its dimensions, major first."""

    argument: int
    dims: tuple[tuple[str, ...], ...]

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(a for d in self.dims for a in d)


@dataclasses.dataclass(frozen=True)
class Variant:
    """``softmax(base X) V`` with ``X = scale Q K^T``, or ``X = softcap tanh(scale Q K^T / softcap)``, over a band.

    `rows`: the statistics of the rows, laid out like X without the keys.
    """

    sizes: tuple[tuple[str, int], ...]
    roles: Roles
    q: Array
    k: Array
    v: Array
    out: Array
    rows: Array
    dtypes: tuple[str, ...]
    scale: float
    softcap: float | None
    band: Band
    base: float

    def size(self, *axes: str) -> int:
        return math.prod(dict(self.sizes)[a] for a in axes)

    def __str__(self) -> str:
        r, b = self.roles, self.band
        parts = [f"{self.size(r.query)} queries, {self.size(r.key)} keys, heads of {self.size(r.depth)}"]
        parts += [f"{self.size(*r.group)} heads of Q for each of K"] if r.group else []
        parts += [f"j - i in [{b.lower}, {b.upper}]"] if b != Band() else []
        parts += [f"scale {self.scale:.4g}"] + ([f"softcap {self.softcap:g}"] if self.softcap else [])
        return ", ".join(parts)

    __repr__ = __str__


@memo()
def variant(op: FusedOp) -> Variant | str:
    """The kind of attention, or why it is none that is known."""
    _, step = softmax_step(op)
    if op.blob["keep"] != "all":
        return "a softmax with a mask of its own"
    if len(op.results) != 1:
        return "several results"

    def f(*inputs: Any) -> tuple[Any, ...]:
        slots = op.evaluate(inputs)
        return slots[step.operands[0]], slots[softmax_slot(op)], slots[op.results[0]]

    try:
        return _read(op, mcir.trace(f, *map(_compat.plain_aval, op.in_avals)))
    except mcir.DeriveError as error:
        return error.found
    except Unidentified as error:
        return str(error)


def softmax_slot(op: FusedOp) -> int:
    return len(op.in_avals) + softmax_step(op)[0]


def _read(op: FusedOp, graph: Any) -> Variant:
    (x, x_view), (p, _), (out, out_view) = graph.outputs
    keys = x_view.dims[op.blob["axis"] % len(x_view.dims)]
    if len(keys) != 1:
        raise Unidentified("keys along several axes")
    v, out_dot = _values(graph, out, p)
    scores = _Scores(graph)
    scores.read(x)
    roles = _roles(graph, keys[0], scores, v, out_dot)
    found = Band()
    for predicate, seen in scores.masks:
        found &= band(graph, predicate, roles.query, roles.key, seen)
    _check(graph, found, roles)
    base = float(op.blob["base"])
    if scores.factor * base <= 0:
        raise Unidentified("a scale that is not positive")
    rows = tuple(d for d in x_view.dims if d != keys)
    q_array, k_array, v_array = (_array(graph, i) for i in (scores.q, scores.k, v))
    return Variant(
        tuple(graph.axes.items()),
        roles,
        q_array,
        k_array,
        v_array,
        Array(-1, _whole(out_view)),
        Array(-1, rows),
        tuple(graph.values[i].dtype for i in (scores.q, scores.k, v, out)),
        scores.factor,
        scores.softcap,
        found,
        base,
    )


def _values(graph: Any, out: int, p: int) -> tuple[int, int]:
    """V, and the product of P and V, which must be all that lies behind P."""
    dot = _through_casts(graph, out, p)
    if graph.values[dot].op != "dot":
        raise Unidentified(f"{graph.values[dot].op} behind the product with V")
    a, b = (_through_casts(graph, i, p) for i in graph.values[dot].args)
    if (a == p) == (b == p):
        raise Unidentified("something between weights and values")
    v = b if a == p else a
    if graph.values[v].op != "input":
        raise Unidentified(f"values from {graph.values[v].op}")
    return v, dot


def _through_casts(graph: Any, v: int, stop: int = -1) -> int:
    while v != stop and graph.values[v].op == "convert_element_type":
        if not jnp.issubdtype(jnp.dtype(graph.values[graph.values[v].args[0]].dtype), jnp.floating):
            break
        v = graph.values[v].args[0]
    return v


class _Scores:
    """X, read from the softmax down to Q and K."""

    def __init__(self, graph: Any):
        self.graph = graph
        self.factor = 1.0
        self.softcap: float | None = None
        self.masks: list[tuple[int, bool]] = []
        self.q = self.k = self.dot = -1

    def read(self, v: int) -> None:
        while self.dot < 0:
            v = self._next(_through_casts(self.graph, v))

    def _next(self, v: int) -> int:
        """What a value is computed from."""
        value = self.graph.values[v]
        if value.op == "dot":
            self.dot = v
            self.q, self.k = (self._operand(a) for a in value.args)
            return v
        if value.op in ("mul", "div", "neg"):
            return self._scaled(v)
        if value.op == "select_n" and len(value.args) == 3:
            return self._masked(value)
        if value.op == "add":
            for mask, rest in (value.args, value.args[::-1]):
                if self._adds_mask(mask):
                    return rest
            raise Unidentified("something added to the scores")
        if value.op == "tanh" and self.softcap is None:
            if self.factor <= 0:
                raise Unidentified("a softcap that is not positive")
            # softcap tanh(scale X / softcap): the factor starts again with what cancels the division.
            self.softcap = self.factor
            return value.args[0]
        raise Unidentified(f"scores through {value.op}")

    def _scaled(self, v: int) -> int:
        value = self.graph.values[v]
        if value.op == "neg":
            self.factor = -self.factor
            return value.args[0]
        a, b = value.args
        known = number(self.graph, b)
        if known is None and value.op == "mul":
            a, b = b, a
            known = number(self.graph, b)
        if known is None or not math.isfinite(known) or known == 0:
            raise Unidentified(f"scores in a {value.op} with what is no number")
        self.factor = self.factor * known if value.op == "mul" else self.factor / known
        return a

    def _operand(self, v: int) -> int:
        """Q or K: an input, perhaps scaled."""
        while self.graph.values[v := _through_casts(self.graph, v)].op != "input":
            if self.graph.values[v].op not in ("mul", "div", "neg"):
                raise Unidentified(f"queries or keys from {self.graph.values[v].op}")
            v = self._scaled(v)
        return v

    def _masked(self, value: Any) -> int:
        predicate, *cases = value.args
        for hidden, rest, seen in ((0, 1, True), (1, 0, False)):
            if (fill := number(self.graph, cases[hidden])) is not None:
                self._hides(fill, value.dtype)
                self.masks.append((predicate, seen))
                return cases[rest]
        raise Unidentified("a choice between scores")

    def _adds_mask(self, v: int) -> bool:
        """Whether it is 0 where a key is seen and very low elsewhere."""
        value = self.graph.values[_through_casts(self.graph, v)]
        if value.op != "select_n" or len(value.args) != 3:
            return False
        cases = [number(self.graph, a) for a in value.args[1:]]
        if None in cases or 0 not in cases:
            return False
        seen = cases[1] == 0
        fill = cases[0 if seen else 1]
        assert fill is not None
        self._hides(fill, value.dtype)
        self.masks.append((value.args[0], seen))
        return True

    def _hides(self, fill: float, dtype: str) -> None:
        """Scores that are not seen must be so low that their exponential is 0 beside any other."""
        lowest = float(jnp.finfo(jnp.dtype(dtype)).min)
        if self.softcap is not None or not self.factor * fill <= max(lowest / 2, -1e30):
            raise Unidentified(f"a mask that fills with {fill:g}")


def _roles(graph: Any, key: str, scores: _Scores, v: int, out_dot: int) -> Roles:
    values = graph.values
    q_axes, k_axes, v_axes = (set(values[i].axes) for i in (scores.q, scores.k, v))
    if key in q_axes:
        scores.q, scores.k = scores.k, scores.q
        q_axes, k_axes = k_axes, q_axes
    over = set(values[scores.dot].param("over"))
    batch = q_axes & k_axes - over
    depth, value_depth = over, v_axes - batch - {key}
    if len(depth) != 1 or len(value_depth) != 1 or k_axes != batch | depth | {key} or not batch <= v_axes:
        raise Unidentified("K and V with other axes than batch, heads, keys and depth")
    if key in q_axes or value_depth & q_axes or key not in v_axes:
        raise Unidentified("Q, K and V whose axes are not those of attention")
    order = [a for d in graph.views[scores.q].dims for a in d]
    rows = [a for a in order if a in q_axes - batch - depth]
    named = [a for p, _ in scores.masks for a in rows if a in values[p].axes]
    if not rows or len(set(named)) > 1:
        raise Unidentified("no axis of queries, or a mask along several")
    query = named[0] if named else max(rows, key=lambda a: graph.axes[a])
    if set(values[out_dot].axes) != (q_axes - depth) | value_depth:
        raise Unidentified("a result with other axes than Q")
    return Roles(
        tuple(a for a in order if a in batch), tuple(a for a in rows if a != query), query, key, *depth, *value_depth
    )


def _check(graph: Any, found: Band, roles: Roles) -> None:
    """Each query has to see a key: rows that see none are what their fill makes of them."""
    queries, keys = graph.axes[roles.query], graph.axes[roles.key]
    low, high = found.lower, found.upper
    sees = (
        (high is None or high >= 0)
        and (low is None or queries - 1 + low < keys)
        and (low is None or high is None or low <= high)
    )
    if not sees:
        raise Unidentified("a query that sees no key")


def _array(graph: Any, v: int) -> Array:
    return Array(int(graph.values[v].param("argument")), _whole(graph.views[v]))


def _whole(view: Any) -> tuple[tuple[str, ...], ...]:
    if view.place is not None:
        raise Unidentified("part of an array")
    return view.dims
