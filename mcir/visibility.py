"""Which blocks of a stream can be left out, and when that is exact.

Masked scores are a constant `fill`. Where a mask is computed from positions alone, whole blocks are known to hold
nothing else; such a block adds nothing to sums of ``exp(x - r)`` as long as ``exp(fill - r)`` is zero. `find_skip`
proves that every update and store of a stream is zero there; `visible_blocks` evaluates the mask, block by block, in
interval arithmetic.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from mcir._intervals import RULES, Interval, equal, negate
from mcir.algebra import Forms
from mcir.graph import ComputationGraph
from mcir.ir import Compute, Program, Skip, Stream

_THROUGH = ("neg", "convert_element_type", "mul", "div", "reduce_sum", "dot")


@dataclasses.dataclass(frozen=True)
class Found:
    """A mask that makes blocks skippable. `rows`: the value that scores are relative to, None if there is none."""

    predicate: int
    visible: bool
    fill: float
    rows: int | None
    base: float


def find_skip(
    graph: ComputationGraph,
    axis: str,
    loops: tuple[str, ...],
    reductions: Iterable[int],
    stores: Iterable[int],
    known: dict[int, str],
) -> Found | None:
    """The mask under which everything the stream takes in is zero, if there is one."""
    updates, stored = list(reductions), list(stores)
    for position, value in enumerate(graph.values):
        if value.op != "select_n" or axis not in value.axes or len(value.args) != 3:
            continue
        predicate = value.args[0]
        pred_axes = set(graph.values[predicate].axes)
        if axis not in pred_axes or not pred_axes <= {axis, *loops} or not _from_positions(graph, predicate):
            continue
        for case, visible in ((1, True), (2, False)):
            fill = _constant(graph, value.args[case])
            if fill is None or math.isnan(fill):
                continue
            found = _prove(graph, position, predicate, visible, fill, updates, stored, known)
            if found is not None:
                return found
    return None


def _prove(
    graph: ComputationGraph,
    mask: int,
    predicate: int,
    visible: bool,
    fill: float,
    updates: list[int],
    stores: list[int],
    known: dict[int, str],
) -> Found | None:
    proof = _Proof(graph, mask, predicate, visible, fill, known)
    for r in updates:
        value = graph.values[r]
        if value.op == "reduce_max" and proof.filled(value.args[0]):
            continue
        if value.op not in ("reduce_sum", "dot") or not any(proof.zero(a) for a in value.args):
            return None
    if not all(proof.zero(v) for v in stores) or len(proof.rows) > 1 or (not updates and not stores):
        return None
    rows = next(iter(proof.rows), None)
    return Found(predicate, visible, fill, rows, proof.base)


class _Proof:
    """What a block holds when the mask hides all of it: `filled` values are `fill`, `zero` ones are zero."""

    def __init__(
        self, graph: ComputationGraph, mask: int, predicate: int, visible: bool, fill: float, known: dict[int, str]
    ):
        self.graph, self.mask, self.predicate, self.visible, self.fill = graph, mask, predicate, visible, fill
        self.known = known
        self.rows: set[int] = set()
        self.base = 1.0
        self._zero: dict[int, bool] = {}

    def filled(self, v: int) -> bool:
        value = self.graph.values[v]
        if v == self.mask:
            return True
        if value.op == "convert_element_type":
            return self.filled(value.args[0])
        if value.op == "select_n" and len(value.args) == 3:
            if value.args[0] == self.predicate:
                return self._hidden_case(v) == self.fill
            return all(self.filled(a) or _constant(self.graph, a) == self.fill for a in value.args[1:])
        return False

    def _hidden_case(self, v: int) -> float | None:
        value = self.graph.values[v]
        return _constant(self.graph, value.args[1 if self.visible else 2])

    def zero(self, v: int) -> bool:
        if v not in self._zero:
            self._zero[v] = False  # for cycles that cannot be, and deep sharing that can
            self._zero[v] = v not in self.known and self._is_zero(v)
        return self._zero[v]

    def _is_zero(self, v: int) -> bool:
        value = self.graph.values[v]
        if _constant(self.graph, v) == 0:
            return True
        if value.op == "select_n" and len(value.args) == 3:
            if value.args[0] == self.predicate:
                hidden = value.args[1 if self.visible else 2]
                return _constant(self.graph, hidden) == 0 or self.zero(hidden)
            return all(self.zero(a) for a in value.args[1:])
        if value.op in ("exp", "exp2"):
            return self._vanishing(value.args[0], 1.0 if value.op == "exp" else math.log(2.0))
        if value.op in ("add", "sub"):
            return all(self.zero(a) for a in value.args)
        if value.op == "div":
            return self.zero(value.args[0])
        return value.op in _THROUGH and any(self.zero(a) for a in value.args)

    def _vanishing(self, v: int, base: float) -> bool:
        """Whether ``exp`` of this is zero: `fill`, or less than it, minus row values, the first of which decides."""
        value, rows = self.graph.values[v], []
        while value.op in ("sub", "min") and not self.filled(v):
            if value.op == "sub":
                rows.append(value.args[1])
            v = next((a for a in value.args if self.filled(a)), value.args[0])
            value = self.graph.values[v]
        if not self.filled(v) or not rows:
            return False
        self.rows.add(Forms(self.graph, "", set()).row(rows[-1]))
        self.base = base
        return True


def _constant(graph: ComputationGraph, v: int) -> float | None:
    value = graph.values[v]
    if value.op == "convert_element_type":
        return _constant(graph, value.args[0])
    return float(value.param("value")) if value.op == "constant" else None


def _from_positions(graph: ComputationGraph, v: int) -> bool:
    """Whether a value's truth in a block can follow from positions: it rests on them through logic and comparisons."""
    value = graph.values[v]
    if value.op in ("iota", "constant"):
        return True
    if value.op in ("and", "or", "not", "select_n", "ne", "eq", "convert_element_type"):
        return any(_from_positions(graph, a) for a in value.args)
    return value.op in RULES and all(_from_positions(graph, a) for a in value.args)


def visible_blocks(program: Program, stream: Stream) -> tuple[tuple[str, ...], np.ndarray] | None:
    """Which blocks of a stream may hold something visible: ``(tiled axes, bool[their blocks..., blocks of stream])``.

    None when the stream skips nothing. An answer of True may be too careful, an answer of False never wrong.
    """
    found = block_visibility(program, stream)
    return found and found[:2]


def block_visibility(program: Program, stream: Stream) -> tuple[tuple[str, ...], np.ndarray, np.ndarray] | None:
    """`visible_blocks`, and which blocks are visible as a whole: there True is never wrong."""
    if stream.skip is None:
        return None
    computes = {s.result: s for _, s in program.statements() if isinstance(s, Compute)}
    axes = _position_axes(computes, stream.skip.predicate) - {stream.axis}
    tiled = tuple(a.name for a in program.axes if a.name in axes)
    order = (*tiled, stream.axis)
    counts = [program.axis(a).count for a in order]

    def positions(name: str) -> Interval:
        axis, k = program.axis(name), order.index(name)
        start = np.arange(axis.count) * axis.block
        shape = [1] * len(order)
        shape[k] = axis.count
        last = np.minimum(start + axis.block, axis.size) - 1
        return start.reshape(shape).astype(float), last.reshape(shape).astype(float)

    low, high = _interval(computes, stream.skip.predicate, positions, {})
    hidden, full = (high <= 0, low > 0) if stream.skip.visible else (low > 0, high <= 0)
    return tiled, ~np.broadcast_to(hidden, counts), np.broadcast_to(full, counts)


def visited(program: Program, stream: Stream) -> tuple[tuple[str, ...], np.ndarray]:
    """`visible_blocks` of a stream that skips: the axes, the stream's last, and whether each block is visited.

    Rows that make it visit the rest (`Skip.rows`) are not known here and counted as having none.
    """
    found = _visited(program, stream)
    assert found is not None
    return (*found[0], stream.axis), found[1]


_visited = functools.lru_cache(maxsize=1024)(visible_blocks)


def _position_axes(computes: dict[str, Compute], name: str) -> set[str]:
    step = computes.get(name)
    if step is None:
        return set()
    own = {step.param("axis")} if step.op == "iota" else set()
    return own.union(*(_position_axes(computes, a) for a in step.args))


def _interval(computes: dict[str, Compute], name: str, positions: Any, memo: dict[str, Interval]) -> Interval:
    if name not in memo:
        memo[name] = _evaluate(computes, name, positions, memo)
    return memo[name]


def _evaluate(computes: dict[str, Compute], name: str, positions: Any, memo: dict[str, Interval]) -> Interval:
    step = computes.get(name)
    unknown = (np.asarray(-np.inf), np.asarray(np.inf))
    if step is None:
        return unknown
    if step.op == "constant":
        value = np.asarray(float(step.param("value")))
        return value, value
    if step.op == "iota":
        return positions(step.param("axis"))
    rule = RULES.get(step.op)
    if step.type.dtype == "bool":
        unknown = (np.asarray(0.0), np.asarray(1.0))
    if rule is None:
        return unknown
    if step.op == "convert_element_type" and step.param("new_dtype") == "bool":
        a = _interval(computes, step.args[0], positions, memo)
        return negate(equal(a, (np.asarray(0.0), np.asarray(0.0))))
    return rule(*(_interval(computes, a, positions, memo) for a in step.args))


def underflow_margin(dtype: str) -> float:
    """``exp(-margin)`` is zero in this type, subnormals included."""
    import jax.numpy as jnp

    return -math.log(float(jnp.finfo(jnp.dtype(dtype)).smallest_subnormal)) + 1.0


def needs_all(skip: Skip, rows: Any, dtype: str) -> Any:
    """Whether some row is so low that hidden scores count in it: ``base (fill - row) > -margin``.

    Also where nothing of a row is visible: its maximum is `fill` or -inf; and where a row is NaN everywhere, for it has
    a maximum that is NaN or infinite.
    """
    import jax.numpy as jnp

    limit = skip.fill + underflow_margin(dtype) / skip.base
    return jnp.any(~(rows > jnp.asarray(limit, rows.dtype)) | jnp.isinf(rows))
