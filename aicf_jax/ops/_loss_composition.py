"""Linear cross entropy as a composition of the user's equations: what is saved of each row, and the backward.

Two ways to differentiate, by the shape of the result:

- *rows*: of every row m, l and what was taken are saved (`_loss_rows`); the backward computes the logits again.
- *total*: the result is one number, so its gradient is that of a cotangent of 1, times the cotangent. It is computed
  where the logits are, in the forward, and no product is computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import mcir
from aicf_jax import _compat
from aicf_jax.graph import build
from aicf_jax.memo import memo
from aicf_jax.normalize._log_region import LogRegion
from aicf_jax.normalize._loss_region import LossRegion
from aicf_jax.ops._attention_composition import reads
from aicf_jax.ops._loss_rows import Rows, count
from aicf_jax.ops._row_slices import evaluate_rows
from aicf_jax.ops._semantic import FusedOp, Step, nbytes

#: What passes a cotangent on to one of its operands and nothing to the others.
_SELECTIONS = ("select_n", "max", "min", "clamp")


def loss_step(op: FusedOp) -> Step:
    return next(step for step in op.steps if step.role == "loss")


@memo()
def region_of(op: FusedOp) -> LossRegion:
    """What each equation between logits and loss does."""
    graph = build(loss_step(op).body)
    x = graph.arguments[0]
    return LossRegion(LogRegion(graph, x, op.blob["axis"] % graph.values[x].aval.ndim), whole=True)


def logits_aval(op: FusedOp) -> Any:
    return op.slot_avals[loss_step(op).operands[0]]


def side_by_side(op: FusedOp) -> frozenset[int] | None:
    """The loss, whose logits and labels have the same rows."""
    return frozenset(k for k, step in enumerate(op.steps) if step.role == "loss")


@memo()
def kept_gradients(op: FusedOp) -> tuple[int, ...]:
    """Inputs whose gradients are computed in the forward: none unless the result is one number.

    Together they are no larger than the logits, which an unfused program keeps. In float16 they could underflow before
    a loss scale is multiplied with them.
    """
    x = logits_aval(op)
    if op.out_avals[0].shape or jnp.float16 in (a.dtype for a in (x, *op.in_avals)):
        return ()
    found = [i for i, a in enumerate(op.in_avals) if jnp.issubdtype(a.dtype, jnp.floating) and nbytes(a) < nbytes(x)]
    return tuple(found) if sum(nbytes(op.in_avals[i]) for i in found) <= nbytes(x) else ()


def names(op: FusedOp) -> tuple[str, ...]:
    """Of the result and the saved values, in prints."""
    taken = [f"t{k}" for k in range(count(region_of(op)))] if count(region_of(op)) != 1 else ["t"]
    own = input_names(op)
    return ("Y", "m", "l", *taken, *(f"unit_d{own.get(i, f'in{i}')}" for i in kept_gradients(op)))


def input_names(op: FusedOp) -> dict[int, str]:
    """The operand of the product that the vocabulary is a dimension of is W, the other X; integers are labels."""
    found = {i: "labels" for i, a in enumerate(op.in_avals) if jnp.issubdtype(a.dtype, jnp.integer)}
    found = dict(list(found.items())[:1])
    (w, _), *_ = places(op)
    product = next(step for step in op.steps if step.role == "bilinear")
    for slot in product.operands:
        behind = reads(op, slot, -1)
        for i in sorted(s for s in behind if s < len(op.in_avals)):
            found[i] = "W" if i == w else "X"
    return found


@memo()
def places(op: FusedOp) -> list[tuple[int, int]]:
    """``(input, dimension)`` of inputs that have the vocabulary as a dimension, operands of the product first.

    Raises DeriveError where the logits have no vocabulary, as with a single class, or one that is several axes.
    """
    slot = loss_step(op).operands[0]

    def f(*inputs: Any) -> Any:
        return (evaluate_rows(op, inputs, slot),)

    graph = mcir.trace(f, *map(_compat.plain_aval, op.in_avals))
    dim = graph.outputs[0][1].dims[op.blob["axis"]]
    if len(dim) != 1:
        code = "reshape" if dim else "one_class"
        raise mcir.DeriveError(code, "a vocabulary that is one axis of several classes", f"{len(dim)} axes")
    found = []
    for i, view in graph.views.items():
        found += [(int(graph.values[i].param("argument")), d) for d, own in enumerate(view.dims) if own == dim]
    if any(op.in_avals[i].shape[d] != math.prod(graph.axes[a] for a in dim) for i, d in found):
        sliced = "a slice along the vocabulary, whose softmax is another one"
        raise mcir.DeriveError("vocabulary_sliced", "slices of rows of the logits", sliced)
    if not found:
        raise mcir.DeriveError("vocabulary", "an operand of the product with the vocabulary as a dimension", "none")
    return found


# -- forward and backward --------------------------------------------------------------------------------------


def rows_of(op: FusedOp, inputs: Sequence[Any]) -> Rows:
    return Rows(region_of(op), [evaluate_rows(op, inputs, s) for s in loss_step(op).operands[1:]])


def results(op: FusedOp, inputs: Sequence[Any]) -> list[Any]:
    """The loss, computed from the numbers of each row."""
    return _save_rows(op, inputs)[0]


def save(op: FusedOp, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """``(results, saved)``: m, l, what was taken, and the gradients at a cotangent of 1 that are kept."""
    out, saved = _save_rows(op, inputs)
    kept = kept_gradients(op)
    if kept:
        saved += _pull_rows(op, inputs, saved, jnp.ones_like(out[0]), kept, again=False)
    return out, saved


def _save_rows(op: FusedOp, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    x = evaluate_rows(op, inputs, loss_step(op).operands[0])
    rows = rows_of(op, inputs)
    m = rows.maximum(x)
    l, taken = rows.total(x, m), rows.taken_from(x)
    return [rows.loss(m, l, taken)], [m, l, *taken]


def cotangent(
    op: FusedOp,
    inputs: Sequence[Any],
    results: Sequence[Any],
    saved: Sequence[Any],
    cts: Sequence[Any],
    wanted: Sequence[int],
) -> list[Any]:
    """See the docstring of `ops.linear_cross_entropy`."""
    (ct,) = cts
    n = 2 + count(region_of(op))
    unit = dict(zip(kept_gradients(op), saved[n:], strict=True))
    before = reads(op, loss_step(op).operands[0], -1)
    held = _held(op, inputs, saved[:n], ct) if before.intersection(unit).intersection(wanted) else ct
    found = {i: g * (held if i in before else ct).astype(g.dtype) for i, g in unit.items() if i in wanted}
    rest = [i for i in wanted if i not in found]
    if rest:
        found.update(zip(rest, _pull_rows(op, inputs, saved[:n], ct, rest), strict=True))
    return [found[i] for i in wanted]


def _held(op: FusedOp, inputs: Sequence[Any], saved: Sequence[Any], ct: Any) -> Any:
    """The cotangent of a result that is one number, 0 where it is not finite and no row's numbers receive it.

    A mean over rows that are all left out divides by 0; a select passes nothing on where a product would be NaN.
    """
    region = region_of(op)
    made = {region.graph.nodes[int(region.graph.producer[v])].op for v in region.rows}
    if made.isdisjoint(_SELECTIONS):
        return ct
    m, l, *taken = saved
    received = jax.vjp(lambda l, taken: rows_of(op, inputs).loss(m, l, taken), l, list(taken))[1](ct)
    passes = sum(jnp.sum(jnp.where(x != 0, 1.0, 0.0)) for x in jax.tree.leaves(received))
    return jnp.where(jnp.isfinite(ct) | (passes > 0), ct, jnp.zeros_like(ct))


def pull_loss(
    op: FusedOp, inputs: Sequence[Any], saved: Sequence[Any], ct: Any, beside: Sequence[int]
) -> tuple[Any, list[Any], list[Any]]:
    """Cotangents of l, of what was taken, and of inputs beside the logits, as far as they do not go through these."""
    m, l, *taken = saved

    def loss(l: Any, taken: Sequence[Any], *xs: Any) -> Any:
        return rows_of(op, _given(inputs, beside, xs)).loss(m, l, taken)

    dl, dtaken, *terms = jax.vjp(loss, l, list(taken), *[inputs[i] for i in beside])[1](ct)
    return dl, dtaken, terms


def places_of(op: FusedOp, wanted: Sequence[int]) -> tuple[list[int], list[int]]:
    """Inputs that the logits depend on, and those that the rest of the loss does."""
    slot, *others = loss_step(op).operands
    before = [i for i in wanted if i in reads(op, slot, -1)]
    return before, [i for i in wanted if any(i in reads(op, s, -1) for s in others)]


def _given(inputs: Sequence[Any], where: Sequence[int], xs: Sequence[Any]) -> list[Any]:
    replaced = dict(zip(where, xs, strict=True))
    return [replaced.get(i, x) for i, x in enumerate(inputs)]


def _pull_rows(
    op: FusedOp, inputs: Sequence[Any], saved: Sequence[Any], ct: Any, wanted: Sequence[int], again: bool = True
) -> list[Any]:
    """Cotangents from the numbers of each row; the logits are computed again, and no array of their size is kept."""
    m = saved[0]
    before, beside = places_of(op, wanted)

    def logits(*xs: Any) -> Any:
        return evaluate_rows(op, _given(inputs, before, xs), loss_step(op).operands[0])

    def numbers(x: Any, *xs: Any) -> list[Any]:
        rows = rows_of(op, _given(inputs, beside, xs))
        return [rows.total(x, m, again), *rows.taken_from(x)]

    direct = [inputs[i] for i in beside]
    x, pull_logits = jax.vjp(logits, *[inputs[i] for i in before])
    dl, dtaken, terms = pull_loss(op, inputs, saved, ct, beside)
    dx, *more = jax.vjp(numbers, x, *direct)[1]([dl, *dtaken])
    found = dict(zip(before, pull_logits(dx), strict=True))
    for i, a, b in zip(beside, terms, more, strict=True):
        found[i] = found[i] + a + b if i in found else a + b
    return [found[i] if i in found else jnp.zeros_like(inputs[i]) for i in wanted]
