"""Attention as a composition of the user's equations: its slots, its weights from the log-sum-exp, its backward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import mcir
from aicf_jax import _compat
from aicf_jax.memo import memo
from aicf_jax.ops._log_domain import capped, finite, wide
from aicf_jax.ops._semantic import FusedOp, Step


def permutation(op: FusedOp, ndim: int) -> tuple[int, ...]:
    """For each dimension of the weights, which of the scores' it is. Batching added dimensions in front."""
    packed = op.blob["permutation"]
    digits = [int(d) for d in f"{packed:o}"[1:]] if packed else list(range(ndim))
    front = ndim - len(digits)
    return (*range(front), *(d + front for d in digits))


def _inverse(permutation: Sequence[int]) -> tuple[int, ...]:
    return tuple(permutation.index(d) for d in range(len(permutation)))


def products(op: FusedOp) -> tuple[int, int]:
    """Positions of the score product and of the value product among the steps."""
    first, second = (k for k, step in enumerate(op.steps) if step.role == "bilinear")
    return first, second


def softmax_step(op: FusedOp) -> tuple[int, Step]:
    return next((k, step) for k, step in enumerate(op.steps) if step.role == "softmax")


def side_by_side(op: FusedOp) -> frozenset[int] | None:
    """The softmax, whose scores and mask are; None where the mask has fewer dimensions than the scores."""
    k, step = softmax_step(op)
    return frozenset({k}) if len({v.aval.shape for v in step.body.invars}) == 1 else None


def evaluate(op: FusedOp, inputs: Sequence[Any], slot: int, given: Mapping[int, Any]) -> Any:
    """The value of one slot by the equations, with some slots given. What is normalized late stays as it is given."""
    values: dict[int, Any] = {**dict(enumerate(inputs)), **given}
    n = len(op.in_avals)

    def get(s: int) -> Any:
        if s not in values:
            step = op.steps[s - n]
            if step.role == "normalize" and given:
                values[s] = get(step.operands[0]).astype(step.body.outvars[0].aval.dtype)
            else:
                (values[s],) = _compat.as_function(step.body)(*map(get, step.operands))
        return values[s]

    return get(slot)


def _scores_and_mask(op: FusedOp, inputs: Sequence[Any]) -> tuple[Any, Any]:
    """X, and which elements take part (None: all)."""
    _, step = softmax_step(op)
    x = evaluate(op, inputs, step.operands[0], {})
    keep = op.blob["keep"]
    if keep == "all":
        return x, None
    mask = _beside_scores(step, evaluate(op, inputs, step.operands[1], {}))
    mask = jnp.broadcast_to(mask, x.shape)
    return x, mask if keep == "where_true" else ~mask


def _beside_scores(step: Step, mask: Any) -> Any:
    """A softmax's mask with its dimensions where the equations put them."""
    x, var = step.body.invars
    for eqn in step.body.eqns:
        if var.aval.ndim == x.aval.ndim:
            break
        if eqn.primitive.name in ("broadcast_in_dim", "reshape") and list(eqn.invars) == [var]:
            mask, (var,) = eqn.primitive.bind(mask, **eqn.params), eqn.outvars
    if var.aval.ndim != x.aval.ndim:
        raise ValueError(f"a mask of shape {var.aval.shape} beside scores of shape {x.aval.shape}")
    return mask


def _exponential(op: FusedOp, x: Any, m: Any) -> Any:
    difference = x - jnp.expand_dims(finite(m), op.blob["axis"])
    base = op.blob["base"]
    return jnp.exp(difference if base == 1.0 else difference * jnp.asarray(base, difference.dtype))


def save(op: FusedOp, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """``(results, [m, l])``: the row maximum of X and ``l = sum_j exp(a (x_j - m))``, in float32 or wider."""
    axis = op.blob["axis"]
    x, mask = _scores_and_mask(op, inputs)
    x = wide(x, mask)
    # P does not depend on m, so m needs no derivative. That of a maximum would be 0/0 where the compiler rounds x
    # differently for the maximum and for the comparison with it.
    m = jax.lax.stop_gradient(jnp.max(x, axis=axis))
    total = jnp.sum(_exponential(op, x, m), axis=axis)
    if not op.blob["guarded"]:
        # inf - inf: an infinite score makes its whole row NaN.
        total = jnp.where(m == jnp.inf, jnp.nan, total)
    return [evaluate(op, inputs, s, {}) for s in op.results], [m, total]


def weights(op: FusedOp, inputs: Sequence[Any], m: Any, total: Any) -> tuple[Any, Any]:
    """``(E, r)``, P = E r: exponentials laid out like the scores, which are recomputed, and a factor for each row."""
    x, mask = _scores_and_mask(op, inputs)
    x = wide(x, mask)
    if not op.blob["guarded"]:
        x = capped(x, jnp.expand_dims(m, op.blob["axis"]))
    e, rows = _exponential(op, x, m), jnp.expand_dims(1 / total, op.blob["axis"])
    if mask is not None and op.blob["zeroed"]:
        e = jnp.where(mask, e, 0)
        rows = jnp.where(jnp.isinf(rows), 0, rows)  # rows without elements
    return e, rows


def cotangent(
    op: FusedOp,
    inputs: Sequence[Any],
    results: Sequence[Any],
    saved: Sequence[Any],
    cts: Sequence[Any],
    wanted: Sequence[int],
) -> list[Any]:
    """See the docstring of `ops.attention`. X and P are computed again; no array of their size is kept.

    W is linear in P, so the factor of each row, 1/l, may as well multiply dY, which is smaller than P. In low precision
    it stays with P: dY / l could underflow. And where something chooses among the elements of P: of a row without
    elements, whose factor is infinite, it may choose none.
    """
    (ct,) = cts
    k, step = softmax_step(op)
    slot = len(op.in_avals) + k
    before, behind = (
        [i for i in wanted if i in reads(op, target, stop)]
        for target, stop in ((step.operands[0], -1), (op.results[0], slot))
    )

    def given(where: Sequence[int], xs: Sequence[Any]) -> list[Any]:
        replaced = dict(zip(where, xs, strict=True))
        return [replaced.get(i, x) for i, x in enumerate(inputs)]

    def scores(*xs: Any) -> Any:
        return evaluate(op, given(before, xs), step.operands[0], {})

    x, pull_scores = jax.vjp(scores, *[inputs[i] for i in before])
    p, per_row = weights(op, inputs, *saved)
    dtype = step.body.outvars[0].aval.dtype
    if dtype == p.dtype == ct.dtype and not _chooses(op, k):
        ct = ct * _beside_result(op, per_row)
    else:
        p = p * per_row

    def after(p: Any, *xs: Any) -> Any:
        return evaluate(op, given(behind, xs), op.results[0], {slot: p})

    order = permutation(op, p.ndim)
    _, pull_after = jax.vjp(after, p.transpose(order).astype(dtype), *[inputs[i] for i in behind])
    dp, *direct = pull_after(ct)
    delta = _rows(op, results[0].astype(p.dtype) * ct.astype(p.dtype))
    dp, delta = (y.transpose(_inverse(order)) for y in (dp, delta))
    dx = p * (dp.astype(p.dtype) - delta)
    if op.blob["base"] != 1.0:
        dx = dx * jnp.asarray(op.blob["base"], dx.dtype)
    found = dict(zip(before, pull_scores(dx.astype(x.dtype)), strict=True))
    for i, term in zip(behind, direct, strict=True):
        found[i] = found[i] + term if i in found else term
    return [found[i] if i in found else jnp.zeros_like(inputs[i]) for i in wanted]


def _chooses(op: FusedOp, softmax: int) -> bool:
    """Whether a step behind the softmax takes elements of one array or of another, as dropout does."""
    return any(eqn.primitive.name == "select_n" for step in op.steps[softmax + 1 :] for eqn in step.body.eqns)


def reads(op: FusedOp, target: int, stop: int) -> set[int]:
    """Slots that a slot is computed from, not looking behind `stop`."""
    n = len(op.in_avals)
    seen: set[int] = set()
    todo = [target]
    while todo:
        s = todo.pop()
        if s in seen or s == stop:
            continue
        seen.add(s)
        if s >= n:
            step = op.steps[s - n]
            todo.extend(step.operands[:1] if step.role == "normalize" else step.operands)
    return seen


def _rows(op: FusedOp, product: Any) -> Any:
    """A sum of an array like the result over all axes but those of the rows of P, laid out beside P."""
    rows, p_dims, out_dims, sizes = _layout(op)
    product = product.reshape([sizes[a] for d in out_dims for a in d])
    flat = [a for d in out_dims for a in d]
    product = jnp.sum(product, axis=tuple(k for k, a in enumerate(flat) if a not in rows))
    left = [a for a in flat if a in rows]
    product = product.transpose([left.index(a) for d in p_dims for a in d if a in rows])
    return product.reshape([math.prod(sizes[a] for a in d if a in rows) for d in p_dims])


def _beside_result(op: FusedOp, rows: Any) -> Any:
    """What there is one of for each row of P, laid out beside the scores, beside the result."""
    _, p_dims, out_dims, sizes = _layout(op)
    rows = rows.transpose(permutation(op, rows.ndim))
    keys = keys_dimension(op, rows.ndim)
    flat = [a for k, d in enumerate(p_dims) if k != keys for a in d]
    rows = rows.reshape([sizes[a] for a in flat])
    wanted = [a for d in out_dims for a in d]
    have = [a for a in wanted if a in flat]
    rows = rows.transpose([flat.index(a) for a in have])
    rows = jax.lax.broadcast_in_dim(rows, [sizes[a] for a in wanted], [wanted.index(a) for a in have])
    return rows.reshape([math.prod(sizes[a] for a in d) for d in out_dims])


def keys_dimension(op: FusedOp, ndim: int) -> int:
    """The dimension of the weights that the softmax normalizes over."""
    return permutation(op, ndim).index(op.blob["axis"] % ndim)


@memo()
def _layout(op: FusedOp) -> tuple[set[str], Any, Any, dict[str, int]]:
    """``(axes of P's rows, axes of P's dimensions, of the result's dimensions, sizes)``."""
    graph = region_graph(op)
    (_, p), (_, out) = graph.outputs
    keys = keys_dimension(op, len(p.dims))
    rows = {a for k, d in enumerate(p.dims) if k != keys for a in d}
    return rows, p.dims, out.dims, graph.axes


@memo()
def region_graph(op: FusedOp) -> Any:
    """The computation graph of the operation, with P and the result as its outputs."""
    k, _ = softmax_step(op)
    slot = len(op.in_avals) + k

    def f(*inputs: Any) -> tuple[Any, Any]:
        slots = op.evaluate(inputs)
        return slots[slot], slots[op.results[0]]

    return mcir.trace(f, *map(_compat.plain_aval, op.in_avals))
