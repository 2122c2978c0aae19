"""What kind of attention an operation is, for kernels that are made for some kinds and cannot run the user's equations.

Read off the computation graph: scale, softcap, which keys a query sees, and the roles of the axes. All of it is known
exactly or the operation is no kind at all: a string says why.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import mcir
from aicf_jax import _compat
from aicf_jax.memo import memo
from aicf_jax.ops import _side_arrays
from aicf_jax.ops._attention_composition import softmax_step
from aicf_jax.ops._attention_dropout import Dropout, dropout
from aicf_jax.ops._attention_scores import Scores, through_casts
from aicf_jax.ops._position_band import Band, Unidentified, conditions, limit
from aicf_jax.ops._semantic import FusedOp
from aicf_jax.ops._side_arrays import Bias, Mask, Segments, behind

#: The axis of queries where there is one query: of size 1, which the graph leaves out.
_ONE = "one"


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

    Attributes:
      masks: conditions that a key has to meet besides, from arrays.
      biases: arrays that are added to X.
      fill: what X is where a key is hidden, if a row may have nothing else; None: -inf, or each row sees a key.
      passes: whether the hidden scores of a row that has nothing else have gradients: they were added to the fill.
      dropout: what the weights are multiplied by behind the softmax; None: nothing.
      rows: the statistics of the rows, laid out like X without the keys.
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
    masks: tuple[Mask | Segments, ...]
    biases: tuple[Bias, ...]
    fill: float | None
    passes: bool
    dropout: Dropout | None
    base: float

    @property
    def has_arrays(self) -> bool:
        """Whether there are masks or biases beside the band: a kernel that knows none must ask."""
        return bool(self.masks or self.biases)

    def size(self, *axes: str) -> int:
        return math.prod(dict(self.sizes)[a] for a in axes)

    def __str__(self) -> str:
        r, b = self.roles, self.band
        parts = [f"{self.size(r.query)} queries, {self.size(r.key)} keys, heads of {self.size(r.depth)}"]
        parts += [f"{self.size(*r.group)} heads of Q for each of K"] if r.group else []
        parts += [f"j - i in [{b.lower}, {b.upper}]"] if b != Band() else []
        parts += [f"{len(self.masks)} masks from arrays"] if self.masks else []
        parts += [f"{len(self.biases)} biases"] if self.biases else []
        parts += ["dropout"] if self.dropout is not None else []
        parts += [f"scale {self.scale:.4g}"] + ([f"softcap {self.softcap:g}"] if self.softcap else [])
        return ", ".join(parts)

    __repr__ = __str__


@memo()
def variant(op: FusedOp) -> Variant | str:
    """The kind of attention, or why it is none that is known."""
    if op.blob["keep"] != "all":
        return "a softmax with a mask of its own"
    if len(op.results) != 1:
        return "several results"

    try:
        return _read(op, scores_graph(op))
    except mcir.DeriveError as error:
        return error.found
    except Unidentified as error:
        return str(error)


@memo()
def scores_graph(op: FusedOp) -> Any:
    """The computation graph of the operation, with the scores, the weights and the result as its outputs."""
    _, step = softmax_step(op)

    def f(*inputs: Any) -> tuple[Any, ...]:
        slots = op.evaluate(inputs)
        return slots[step.operands[0]], slots[softmax_slot(op)], slots[op.results[0]]

    return mcir.trace(f, *map(_compat.plain_aval, op.in_avals))


def softmax_slot(op: FusedOp) -> int:
    return len(op.in_avals) + softmax_step(op)[0]


def _read(op: FusedOp, graph: Any) -> Variant:
    (x, x_view), (p, _), (out, out_view) = graph.outputs
    keys = x_view.dims[op.blob["axis"] % len(x_view.dims)]
    if len(keys) != 1:
        raise Unidentified("keys along several axes")
    v, weights, out_dot = _values(graph, out, p)
    scores = Scores(graph)
    scores.read(x)
    roles = _roles(graph, keys[0], scores, v, out_dot)
    found, masks = _masks(graph, scores, roles)
    biases = tuple(_bias(graph, i, factor, roles) for i, factor in scores.biases)
    fill = _fill(scores) if masks or biases else None
    _check(graph, found, roles)
    base = float(op.blob["base"])
    if scores.factor * base <= 0:
        raise Unidentified("a scale that is not positive")
    rows = tuple(d for d in x_view.dims if d != keys)
    q_array, k_array, v_array = (_array(graph, i) for i in (scores.q, scores.k, v))
    out_array, rows = Array(-1, _whole(out_view)), Array(-1, rows)
    if roles.query == _ONE:
        q_array, out_array = (_with_query(x, {roles.depth, roles.value_depth}) for x in (q_array, out_array))
        if not rows.dims:
            raise Unidentified("scores without a dimension of rows")
        rows = Array(-1, (*rows.dims[:-1], (*rows.dims[-1], _ONE)))
    return Variant(
        tuple({**graph.axes, roles.query: graph.axes.get(roles.query, 1)}.items()),
        roles,
        q_array,
        k_array,
        v_array,
        out_array,
        rows,
        tuple(graph.values[i].dtype for i in (scores.q, scores.k, v, out)),
        scores.factor,
        scores.softcap,
        found,
        masks,
        biases,
        fill,
        _passes(scores, masks, fill),
        dropout(graph, weights, p),
        base,
    )


def _masks(graph: Any, scores: Scores, roles: Roles) -> tuple[Band, tuple[Mask | Segments, ...]]:
    """The limits on the distance of query and key, and the other conditions."""
    found, masks = Band(), []
    for predicate, seen in scores.masks:
        for condition, holds in conditions(graph, predicate, seen):
            try:
                found &= limit(graph, condition, roles.query, roles.key, holds)
            except Unidentified:
                masks.append(_side_arrays.mask(graph, condition, holds, roles.query, roles.key))
    return found, tuple(dict.fromkeys(masks))


def _bias(graph: Any, v: int, factor: float, roles: Roles) -> Bias:
    found = _side_arrays.side(graph, v)
    if roles.key not in found.axes:
        raise Unidentified("a bias that is the same for all keys")
    return Bias(found, factor)


def _fill(scores: Scores) -> float | None:
    """What is left of a row whose keys are all hidden, as far as that is one number."""
    fills = scores.fills
    if all(f.value == -math.inf for f in fills):
        return None
    if len({f.value for f in fills}) > 1 or (len(fills) > 1 and any(f.added for f in fills)):
        raise Unidentified("masks that fill with different numbers")
    return fills[0].value


def _passes(scores: Scores, masks: Sequence[Any], fill: float | None) -> bool:
    return any(f.added for f in scores.fills) and (bool(masks) or fill is not None)


def _values(graph: Any, out: int, p: int) -> tuple[int, int, int]:
    """V, what is made of P, and the product of both, which must be all that lies behind them."""
    dot = through_casts(graph, out, p)
    if graph.values[dot].op != "dot":
        raise Unidentified(f"{graph.values[dot].op} behind the product with V")
    a, b = graph.values[dot].args
    if (p in behind(graph, a)) == (p in behind(graph, b)):
        raise Unidentified("weights in both operands of the product with V")
    weights, v = (a, b) if p in behind(graph, a) else (b, a)
    v = through_casts(graph, v)
    if graph.values[v].op != "input":
        raise Unidentified(f"values from {graph.values[v].op}")
    return v, weights, dot


def _roles(graph: Any, key: str, scores: Scores, v: int, out_dot: int) -> Roles:
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
    positions = [a for a in rows if a in _positions(graph, [p for p, _ in scores.masks])]
    named = positions or [a for a in rows for p, _ in scores.masks if a in values[p].axes] or rows
    query = max(named, key=lambda a: graph.axes[a], default=_ONE)
    if set(values[out_dot].axes) != (q_axes - depth) | value_depth:
        raise Unidentified("a result with other axes than Q")
    return Roles(
        tuple(a for a in order if a in batch), tuple(a for a in rows if a != query), query, key, *depth, *value_depth
    )


def _positions(graph: Any, found: list[int]) -> set[str]:
    """The axes whose positions some values depend on."""
    todo, seen = list(found), set(found)
    while todo:
        new = [a for a in graph.values[todo.pop()].args if a not in seen]
        seen.update(new)
        todo += new
    return {graph.values[v].param("axis") for v in seen if graph.values[v].op == "iota"}


def _check(graph: Any, found: Band, roles: Roles) -> None:
    """Each query has to see a key: rows that see none are what their fill makes of them."""
    queries, keys = graph.axes.get(roles.query, 1), graph.axes[roles.key]
    low, high = found.lower, found.upper
    sees = (
        (high is None or high >= 0)
        and (low is None or queries - 1 + low < keys)
        and (low is None or high is None or low <= high)
    )
    if not sees:
        raise Unidentified("a query that sees no key")


def _with_query(array: Array, depth: set[str]) -> Array:
    """An array of one query with a dimension for it, in front of `depth` if that is last."""
    at = len(array.dims) - (bool(array.dims) and bool(set(array.dims[-1]) & depth))
    return Array(array.argument, (*array.dims[:at], (_ONE,), *array.dims[at:]))


def _array(graph: Any, v: int) -> Array:
    return Array(int(graph.values[v].param("argument")), _whole(graph.views[v]))


def _whole(view: Any) -> tuple[tuple[str, ...], ...]:
    if view.place is not None:
        raise Unidentified("part of an array")
    return view.dims
