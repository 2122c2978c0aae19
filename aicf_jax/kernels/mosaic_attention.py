"""``mosaic_attention``: `pallas_kernels.attention.forward` for Hopper.

Memory moved: Q, K, V and the result once, and two numbers a row where the backward wants them; arrays whose dimensions
lie in another order than the kernel's are transposed first. Between the products all is float32 but for the weights,
which are rounded to the type of V.
"""

from __future__ import annotations

from typing import Any

from aicf_jax.kernels import _attention_sides
from aicf_jax.kernels._attention import capabilities, forward
from aicf_jax.kernels._attention import moved_bytes as moved_bytes_of_arrays
from aicf_jax.kernels._hopper import HEADS, TARGETS, needs, takes_heads
from aicf_jax.kernels._kernel import Kernel
from aicf_jax.ops import FusedOp
from aicf_jax.ops._attention_variant import Variant, variant


def _library() -> Any:
    from pallas_kernels import attention

    return attention


def _fits(v: Variant) -> bool:
    return _attention_sides.fills_low(v) and takes_heads(v)


def _bytes(op: FusedOp) -> int:
    """Also what is made of masks and biases first.

    A result in another order is what a product leaves for a transposition behind it, with which it cancels.
    """
    v = variant(op)
    return moved_bytes_of_arrays(op) + (_attention_sides.moved_bytes(op, v) if isinstance(v, Variant) else 0)


KERNEL = Kernel(
    "mosaic_attention",
    "attention",
    ("cuda",),
    capabilities(
        f"{HEADS}, with no more than scale, softcap, limits on the distance of query and key, masks, segment ids and "
        "biases made without Q and K, and dropout of the weights",
        _fits,
        "masks",
        "biases",
        "fill",
        "dropout",
        "passes",
    ),
    **forward(_library, with_sides=True),
    cost_bytes=_bytes,
    targets=TARGETS,
    needs=needs,
    opaque=True,
)
