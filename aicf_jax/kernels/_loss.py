"""What the kernels of linear cross entropy share: which losses they take, and gradients from numbers of rows."""

from __future__ import annotations

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
    from_rows,
    labels,
    matrix,
    needs_sum,
    taken_cotangents,
    taken_of,
    to_rows,
    variant,
)

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


def numbers(op: FusedOp, inputs: Sequence[Any]) -> list[Any]:
    """m, l and what was taken of each row, as `_loss_composition.save` has them."""
    from pallas_kernels import linear_cross_entropy as library

    v = known(op)
    x, w = (matrix(v, m, inputs[m.argument]) for m in (v.x, v.w))
    label = labels(op, v, inputs)
    found = library.forward(x, w, label, **_options(v), with_sum=needs_sum(v))
    taken = taken_of(v, label, found.taken, found.sum)
    return [from_rows(op, v, n) for n in (found.m, found.l, *taken)]


def gradients(
    op: FusedOp, inputs: Sequence[Any], saved: Sequence[Any], ct: Any, wanted: Sequence[int]
) -> tuple[Any, ...]:
    """Cotangents of the inputs in `wanted`, as `_loss_composition.cotangent` has them, from what `numbers` gave."""
    from pallas_kernels import linear_cross_entropy as library

    v = known(op)
    _, beside = places_of(op, wanted)
    dl, dtaken, terms = pull_loss(op, inputs, saved, ct, beside)
    found: dict[int, Any] = dict(zip(beside, terms, strict=True))
    operands = (v.x, v.w)
    asked = v.x.argument in wanted, v.w.argument in wanted
    if any(asked):
        pulls = [jax.vjp(lambda a, m=m: matrix(v, m, a), inputs[m.argument]) for m in operands]
        dlabel, dsum = (None if isinstance(d, float) else to_rows(v, d) for d in taken_cotangents(v, dtaken))
        (x, _), (w, _) = pulls
        given = library.backward(
            x,
            w,
            labels(op, v, inputs),
            to_rows(v, saved[0]),
            to_rows(v, dl),
            jax.numpy.zeros(x.shape[:1], jax.numpy.float32) if dlabel is None else dlabel,
            dsum if needs_sum(v) else None,
            **_options(v),
            wanted=asked,
        )
        for m, d, (_, pull) in zip(operands, given, pulls, strict=True):
            if d is not None:
                (d,) = pull(d)
                found[m.argument] = found[m.argument] + d if m.argument in found else d
    return tuple(found[i] if i in found else jax.numpy.zeros_like(inputs[i]) for i in wanted)


def bytes_of_product(op: FusedOp) -> int:
    """The traffic that takes as long as the product of hidden states and vocabulary, which a backward makes again."""
    v = variant(op)
    if not isinstance(v, Variant):
        return 0
    return 2 * math.prod(n for _, n in v.sizes) // _FLOPS_PER_BYTE
