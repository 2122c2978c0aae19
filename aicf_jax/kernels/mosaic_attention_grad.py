"""``mosaic_attention_grad``: `pallas_kernels.attention.backward` for Hopper.

Memory moved: Q, K, V and dY twice, Y, m and l once, dQ, dK and dV once, and two float32 numbers a row written and read;
arrays whose dimensions lie in another order than the kernels' are transposed first. Masks and biases of queries x keys
are read twice, the second time transposed; for the gradient of such a bias all is read once more. Sums in float32, the
same bits on every run; weights and gradients of scores are rounded to the type of the operands for the products.
"""

from __future__ import annotations

from typing import Any

from aicf_jax.kernels import _attention_sides
from aicf_jax.kernels._attention import gradient, gradient_capabilities, known
from aicf_jax.kernels._attention_layouts import chosen
from aicf_jax.kernels._hopper import HEADS, TARGETS, needs, takes_heads
from aicf_jax.kernels._kernel import Kernel
from aicf_jax.ops import FusedOp, nbytes
from aicf_jax.ops._attention_variant import Array, Variant, variant


def _library() -> Any:
    from pallas_kernels import attention

    return attention


def _fits(v: Variant) -> bool:
    if v.passes or not _attention_sides.fills_low(v):
        return False
    if not takes_heads(v) or not _fits_in_memory(v):
        return False
    # Statistics that come back from the program's units are off by a rounding, which beside a fill is not little.
    return v.base == 1.0 or (v.fill is None and not v.biases)


def _fits_in_memory(v: Variant) -> bool:
    """Whether there is shared memory for tiles of what is beside the scores, dropout read."""
    from pallas_kernels._mosaic import HOPPER_SMEM_BYTES
    from pallas_kernels.attention.gradient_problem import default_backward

    of_tiles = v.size(v.roles.depth), _attention_sides.bytes_of_score(v), 4 * len(v.masks) + 4
    return default_backward(of_tiles[0], False, *of_tiles[1:]).smem_bytes(*of_tiles) <= HOPPER_SMEM_BYTES


def _bytes(op: FusedOp) -> int:
    """See the module; and what is transposed twice more, but for Y and dY: their transpositions cancel with others."""
    if op.gradient_of is None or not isinstance(variant(op.gradient_of[0]), Variant):
        return op.outer_bytes()
    v, n = known(op), len(op.gradient_of[0].in_avals)

    def size(a: Array) -> int:
        return nbytes(op.in_avals[a.argument])

    arrays, dout, rows = (v.q, v.k, v.v), nbytes(op.in_avals[-1]), nbytes(op.in_avals[n + 1])
    moved = 4 * sum(size(a) for a in arrays if not chosen(v, a)[1])
    once = sum(map(size, arrays)) + dout
    again = 2 if _attention_sides.pulls_tiles(op.gradient_of[0], v, op.gradient_of[1]) else 1
    beside = _attention_sides.gradient_bytes(op.gradient_of[0], v)
    return op.outer_bytes() + again * once + 4 * rows + moved + beside


def _launches(op: FusedOp) -> int:
    """One for dQ, one for dK and dV, and one for the gradient of a bias of queries x keys."""
    if op.gradient_of is None or not isinstance(variant(op.gradient_of[0]), Variant):
        return 2
    return 2 + _attention_sides.pulls_tiles(op.gradient_of[0], known(op), op.gradient_of[1])


KERNEL = Kernel(
    "mosaic_attention_grad",
    "attention_grad",
    ("cuda",),
    gradient_capabilities(
        f"{HEADS}, with no more than scale, softcap, limits on the distance of query and key, masks, segment ids and "
        "biases made without Q and K, whose fill nothing is added to, and dropout of the weights, all of it small "
        "enough for shared memory",
        _fits,
        "masks",
        "biases",
        "fill",
        "dropout",
    ),
    **gradient(_library, with_sides=True),
    cost_bytes=_bytes,
    launches=_launches,
    targets=TARGETS,
    needs=needs,
    opaque=True,
)
