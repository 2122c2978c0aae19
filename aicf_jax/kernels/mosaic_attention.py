"""``mosaic_attention``: `pallas_kernels.attention.forward` for Hopper.

Memory moved: Q, K, V and the result once, and two numbers a row where the backward wants them; arrays whose dimensions
lie in another order than the kernel's are transposed first. Between the products all is float32 but for the weights,
which are rounded to the type of V.
"""

from __future__ import annotations

import math
from typing import Any

from aicf_jax.kernels import _attention_sides
from aicf_jax.kernels._attention_layouts import chosen, given, laid_out, layouts, order, row_axes
from aicf_jax.kernels._gemm_epilogue import NARROW
from aicf_jax.kernels._hopper import TARGETS
from aicf_jax.kernels._kernel import ANY, Kernel, Where
from aicf_jax.ops import FusedOp, nbytes
from aicf_jax.ops._attention_variant import Variant, variant

#: Lengths of a head are multiples of the first number up to the second.
_HEAD_ATOM, _LONGEST_HEAD = 16, 256

#: What hidden scores may be at most, of those that are no infinity.
_HIGHEST_FILL = -1e4


def _fits(item: Any) -> bool:
    if not isinstance(item, Variant) or not order(item):
        return False
    depth = item.size(item.roles.depth)
    if item.fill is not None and not -math.inf < item.fill * item.base <= _HIGHEST_FILL:
        return False
    has_length = depth % _HEAD_ATOM == 0 and depth <= _LONGEST_HEAD
    return has_length and depth == item.size(item.roles.value_depth) and len(set(item.dtypes)) == 1


def _call(op: FusedOp, inputs: Any, saving: bool) -> tuple[Any, ...]:
    from pallas_kernels.attention import forward

    v = variant(op)
    assert isinstance(v, Variant)
    arrays, (batch, heads) = (v.q, v.k, v.v), order(v)
    out, *statistics = forward(
        *(given(v, a, inputs[a.argument]) for a in arrays),
        scale=v.scale * v.base,
        lower=v.band.lower,
        upper=v.band.upper,
        softcap=None if v.softcap is None else v.softcap * v.base,
        **_attention_sides.arrays(op, v, (batch, (*heads, *v.roles.group)), inputs),
        layouts=tuple(chosen(v, a)[0] for a in (*arrays, v.out)),
        with_statistics=saving,
    )
    out = laid_out(v, layouts(v, v.out)[chosen(v, v.out)[0]], v.out, op.out_avals[0].shape, out)
    if not saving:
        return (out,)
    shape = tuple(v.size(*d) for d in v.rows.dims)
    m, total = (laid_out(v, row_axes(v), v.rows, shape, x) for x in statistics)
    return out, m / v.base if v.base != 1.0 else m, total


def _run(op: FusedOp, *inputs: Any) -> tuple[Any, ...]:
    return _call(op, inputs, saving=False)


def _save(op: FusedOp, *inputs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    out, m, total = _call(op, inputs, saving=True)
    return (out,), (m, total)


def _bytes(op: FusedOp) -> int:
    """Inputs and results once, inputs that are transposed twice more, and what is made of masks and biases first.

    A result in another order is what a product leaves for a transposition behind it, with which it cancels.
    """
    v = variant(op)
    if not isinstance(v, Variant):
        return op.outer_bytes()
    moved = [op.in_avals[a.argument] for a in (v.q, v.k, v.v) if not chosen(v, a)[1]]
    return op.outer_bytes() + 2 * sum(map(nbytes, moved)) + _attention_sides.moved_bytes(op, v)


KERNEL = Kernel(
    "mosaic_attention",
    "attention",
    ("cuda",),
    {
        "operand_dtypes": tuple((t, t) for t in NARROW),
        "output_dtype": NARROW,
        "steps": ANY,
        "variant": Where(
            "Q, K, V and a result of one type, heads of a multiple of 16 up to 256, with no more than scale, softcap, "
            "limits on the distance of query and key, and masks, segment ids and biases made without Q and K",
            _fits,
        ),
    },
    _run,
    cost_bytes=_bytes,
    save=_save,
    targets=TARGETS,
    opaque=True,
)
