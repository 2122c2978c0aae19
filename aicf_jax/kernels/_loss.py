"""What the kernels of linear cross entropy share: which losses they take, and gradients from numbers of rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax

from aicf_jax.kernels._gemm_epilogue import NARROW
from aicf_jax.kernels._kernel import Where
from aicf_jax.ops import FusedOp
from aicf_jax.ops._loss_composition import places_of, pull_loss
from aicf_jax.ops._loss_variant import (
    Variant,
    along_axes,
    from_rows,
    labels,
    matrix,
    needs_sum,
    taken_cotangents,
    taken_of,
    to_rows,
    variant,
)
from aicf_jax.partition import Partition, split

#: Operations that a Hopper GPU does while it moves a byte: a product of 16-bit matrices beside a copy.
_FLOPS_PER_BYTE = 180

VARIANT = Where(
    "a product of two arrays of one 16-bit type without batch dimensions, then no more than a positive scale and a "
    "softcap, and of a row its log-sum-exp, logits at one integer label and sums with one weight at it and another "
    "one elsewhere",
    lambda item: isinstance(item, Variant) and item.dtype in NARROW,
)


def known(op: FusedOp) -> Variant:
    found = variant(op)
    assert isinstance(found, Variant)
    return found


def _options(v: Variant) -> dict[str, Any]:
    return {"trans_w": v.trans_w, "scale": v.scale, "softcap": v.softcap, "base": v.base}


def numbers(op: FusedOp, inputs: Sequence[Any], on_parts: bool = False) -> list[Any]:
    """m, l and what was taken of each row, as `_loss_composition.save` has them.

    `on_parts`: each device has those of its part of the rows and of the vocabulary.
    """
    from pallas_kernels import linear_cross_entropy as library

    v, run = known(op), library.forward

    def found(x: Any, w: Any, label: Any, classes: Any) -> list[Any]:
        x, flat = _flat(x, label), (label - classes[:1]).reshape(-1)
        given = run(x, w, flat, **_options(v), with_sum=needs_sum(v))
        return [n.reshape(label.shape) for n in given if n is not None]

    def merged(axes: Any, *arrays: Any) -> list[Any]:
        """Of all parts of the vocabulary."""
        m, l, *rest = found(*arrays)
        top = jax.lax.pmax(m, axes)
        l = l * jax.numpy.exp(v.base * (m - jax.numpy.where(jax.numpy.isinf(top), 0.0, top)))
        return [top, *(jax.lax.psum(n, axes) for n in (l, *rest))]

    label = labels(op, v, inputs)
    arrays, names = _arrays(v, inputs, label)
    rows = names[2]
    rule = Partition(names, (rows,) * (3 + needs_sum(v)), contracted=merged)
    m, l, at_label, *total = (split(found, rule) if on_parts else found)(*arrays)
    taken = taken_of(v, label, at_label, *total or (None,))
    return [from_rows(op, v, n) for n in (m, l, *taken)]


def _arrays(v: Variant, inputs: Sequence[Any], label: Any) -> tuple[list[Any], tuple[tuple[str | None, ...], ...]]:
    """X, W, labels and the numbers of classes, and names of dimensions that may be split: rows and the vocabulary."""
    x, w = along_axes(v, v.x, inputs[v.x.argument]), matrix(v, v.w, inputs[v.w.argument])
    # Labels of few bits cannot count the classes.
    label = label.astype(jax.numpy.promote_types(label.dtype, jax.numpy.int32))
    rows = tuple(f"r{k}" for k in range(label.ndim))
    of_w = ("v", None) if v.trans_w else (None, "v")
    classes = jax.numpy.arange(w.shape[1 - v.trans_w], dtype=label.dtype)
    return [x, w, label, classes], ((*rows, *(None,) * (x.ndim - label.ndim)), of_w, rows, ("v",))


def _flat(x: Any, label: Any) -> Any:
    """X as a matrix of the rows that the labels have."""
    return x.reshape(label.size, -1)


def gradients(
    op: FusedOp, inputs: Sequence[Any], saved: Sequence[Any], ct: Any, wanted: Sequence[int], on_parts: bool = False
) -> tuple[Any, ...]:
    """Cotangents of the inputs in `wanted`, as `_loss_composition.cotangent` has them, from what `numbers` gave."""
    v = known(op)
    _, beside = places_of(op, wanted)
    dl, dtaken, terms = pull_loss(op, inputs, saved, ct, beside)
    found: dict[int, Any] = dict(zip(beside, terms, strict=True))
    asked = v.x.argument in wanted, v.w.argument in wanted
    if any(asked):
        dlabel, dsum = (None if isinstance(d, float) else to_rows(v, d) for d in taken_cotangents(v, dtaken))
        rows = [to_rows(v, saved[0]), to_rows(v, dl), dlabel, dsum if needs_sum(v) else None]
        given = _operand_gradients(op, inputs, rows, asked, on_parts)
        for m, pull, d in zip((v.x, v.w), (along_axes, matrix), given, strict=True):
            if d is not None:
                (d,) = jax.vjp(functools.partial(pull, v, m), inputs[m.argument])[1](d)
                found[m.argument] = found[m.argument] + d if m.argument in found else d
    return tuple(found[i] if i in found else jax.numpy.zeros_like(inputs[i]) for i in wanted)


def _operand_gradients(
    op: FusedOp, inputs: Sequence[Any], rows: Sequence[Any], asked: tuple[bool, bool], on_parts: bool
) -> list[Any]:
    """Of X, with a dimension for each axis, and W; None for what is not asked for.

    `rows`: m, and the cotangents of l, of the logit at the label and of the sum of logits, None where there is none.
    """
    from pallas_kernels import linear_cross_entropy as library

    v, run = known(op), library.backward
    given_label, given_sum = (n is not None for n in rows[2:])

    def found(x: Any, w: Any, label: Any, classes: Any, *some: Any) -> list[Any]:
        m, dl, *left = (n.reshape(-1) for n in some)
        dlabel, dsum = left[0] if given_label else None, left[-1] if given_sum else None
        dlabel = jax.numpy.zeros(label.size, jax.numpy.float32) if dlabel is None else dlabel
        flat = (label - classes[:1]).reshape(-1)
        dx, dw = run(_flat(x, label), w, flat, m, dl, dlabel, dsum, **_options(v), wanted=asked)
        return [d for d in (None if dx is None else dx.reshape(x.shape), dw) if d is not None]

    arrays, names = _arrays(v, inputs, labels(op, v, inputs))
    numbers = [n for n in rows if n is not None]
    results = tuple(n for n, is_asked in zip(names[:2], asked, strict=True) if is_asked)
    rule = Partition((*names, *(names[2],) * len(numbers)), results, sums=tuple(range(len(results))))
    given = iter((split(found, rule) if on_parts else found)(*arrays, *numbers))
    return [next(given) if is_asked else None for is_asked in asked]


def gradient_launches(op: FusedOp, wanted: Sequence[int]) -> int:
    """Of a block of classes the logits' gradient, and a product for X and W each that is wanted."""
    v = variant(op)
    if not isinstance(v, Variant):
        return 1
    from pallas_kernels.linear_cross_entropy.config import default_backward

    products = sum(m.argument in wanted for m in (v.x, v.w))
    classes = v.size(*v.w.dims[1 - v.trans_w])
    block = default_backward(v.size(*v.x.dims[0]), classes).block
    return -(-classes // block) * (1 + products) if products else 0


def bytes_of_product(op: FusedOp) -> int:
    """The traffic that takes as long as the product of hidden states and vocabulary, which a backward makes again."""
    v = variant(op)
    if not isinstance(v, Variant):
        return 0
    return 2 * math.prod(n for _, n in v.sizes) // _FLOPS_PER_BYTE
