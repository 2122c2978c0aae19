"""``mosaic_attention_grad``: `pallas_kernels.attention.backward` for Hopper.

Memory moved: Q, K, V and dY twice, Y, m and l once, dQ, dK and dV once, and two float32 numbers a row written and read;
arrays whose dimensions lie in another order than the kernels' are transposed first. Sums in float32, the same bits on
every run; weights and gradients of scores are rounded to the type of the operands for the products.
"""

from __future__ import annotations

from typing import Any

from aicf_jax.kernels._attention_layouts import chosen, given, laid_out, layouts, order, rows_given
from aicf_jax.kernels._gemm_epilogue import NARROW
from aicf_jax.kernels._hopper import TARGETS
from aicf_jax.kernels._kernel import Kernel, Where
from aicf_jax.ops import FusedOp, nbytes
from aicf_jax.ops._attention_variant import Array, Variant, variant

#: Lengths of a head whose sums of dK and dV stay in registers.
_HEAD_DIMS = (64, 128)


def _fits(item: Any) -> bool:
    if not isinstance(item, Variant) or item.masks or item.biases or not order(item):
        return False
    depth = item.size(item.roles.depth)
    return depth in _HEAD_DIMS and depth == item.size(item.roles.value_depth) and len(set(item.dtypes)) == 1


def _known(op: FusedOp) -> tuple[Variant, tuple[int, ...], int]:
    """The kind of attention, the inputs whose gradients are wanted, and how many inputs the attention has."""
    assert op.gradient_of is not None
    origin, wanted = op.gradient_of
    v = variant(origin)
    assert isinstance(v, Variant)
    return v, wanted, len(origin.in_avals)


def _run(op: FusedOp, *inputs: Any) -> tuple[Any, ...]:
    from pallas_kernels.attention import backward

    v, wanted, n = _known(op)
    out, m, total, dout = inputs[n:]
    arrays = (v.q, v.k, v.v)
    q, k, values = (given(v, a, inputs[a.argument]) for a in arrays)
    gradients = backward(
        q,
        k,
        values,
        given(v, v.out, out),
        rows_given(v, m if v.base == 1.0 else m * v.base),
        rows_given(v, total),
        given(v, v.out, dout),
        scale=v.scale * v.base,
        lower=v.band.lower,
        upper=v.band.upper,
        softcap=None if v.softcap is None else v.softcap * v.base,
        layouts=tuple(chosen(v, a)[0] for a in (*arrays, v.out)),
    )
    found: dict[int, Any] = {}
    for a, x in zip(arrays, gradients, strict=True):
        x = laid_out(v, layouts(v, a)[chosen(v, a)[0]], a, op.in_avals[a.argument].shape, x)
        found[a.argument] = found[a.argument] + x if a.argument in found else x
    return tuple(found[i] for i in wanted)


def _bytes(op: FusedOp) -> int:
    """See the module; and what is transposed twice more, but for Y and dY: their transpositions cancel with others."""
    if op.gradient_of is None or not isinstance(variant(op.gradient_of[0]), Variant):
        return op.outer_bytes()
    v, _, n = _known(op)

    def size(a: Array) -> int:
        return nbytes(op.in_avals[a.argument])

    arrays, dout, rows = (v.q, v.k, v.v), nbytes(op.in_avals[-1]), nbytes(op.in_avals[n + 1])
    moved = 4 * sum(size(a) for a in arrays if not chosen(v, a)[1])
    return op.outer_bytes() + sum(map(size, arrays)) + dout + 4 * rows + moved


KERNEL = Kernel(
    "mosaic_attention_grad",
    "attention_grad",
    ("cuda",),
    {
        "dtypes": tuple((t,) for t in NARROW),
        "variant": Where(
            "gradients of Q, K and V of one type, heads of 64 or 128, with no more than scale, softcap and limits on "
            "the distance of query and key",
            _fits,
        ),
    },
    _run,
    cost_bytes=_bytes,
    targets=TARGETS,
    opaque=True,
)
