"""``mosaic_attention_grad``: `pallas_kernels.attention.backward` for Hopper.

Memory moved: Q, K, V and dY twice, Y, m and l once, dQ, dK and dV once, and two float32 numbers a row written and read;
arrays whose dimensions lie in another order than the kernels' are transposed first. Sums in float32, the same bits on
every run; weights and gradients of scores are rounded to the type of the operands for the products.
"""

from __future__ import annotations

from typing import Any

from aicf_jax.kernels._attention import gradient, gradient_capabilities, known
from aicf_jax.kernels._attention_layouts import chosen
from aicf_jax.kernels._hopper import HEADS, TARGETS, needs, takes_heads
from aicf_jax.kernels._kernel import Kernel
from aicf_jax.ops import FusedOp, nbytes
from aicf_jax.ops._attention_variant import Array, Variant, variant


def _library() -> Any:
    from pallas_kernels import attention

    return attention


def _bytes(op: FusedOp) -> int:
    """See the module; and what is transposed twice more, but for Y and dY: their transpositions cancel with others."""
    if op.gradient_of is None or not isinstance(variant(op.gradient_of[0]), Variant):
        return op.outer_bytes()
    v, n = known(op), len(op.gradient_of[0].in_avals)

    def size(a: Array) -> int:
        return nbytes(op.in_avals[a.argument])

    arrays, dout, rows = (v.q, v.k, v.v), nbytes(op.in_avals[-1]), nbytes(op.in_avals[n + 1])
    moved = 4 * sum(size(a) for a in arrays if not chosen(v, a)[1])
    return op.outer_bytes() + sum(map(size, arrays)) + dout + 4 * rows + moved


KERNEL = Kernel(
    "mosaic_attention_grad",
    "attention_grad",
    ("cuda",),
    gradient_capabilities(
        f"{HEADS}, with no more than scale, softcap and limits on the distance of query and key", takes_heads
    ),
    gradient(_library),
    cost_bytes=_bytes,
    targets=TARGETS,
    needs=needs,
    opaque=True,
)
