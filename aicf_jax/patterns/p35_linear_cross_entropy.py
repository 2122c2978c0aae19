"""Cross entropy over a vocabulary: the product that makes the logits, what is done to them, their loss."""

from aicf_jax import ops
from aicf_jax.pattern import (
    BROADCAST,
    CROSS_ENTROPY,
    ELEMENTWISE,
    GEMM,
    LAYOUT,
    NEAR_CROSS_ENTROPY,
    SLICE,
    SOFTMAX,
    NearMiss,
    Pattern,
    shared,
    star,
)

#: Between product and loss: bias, scale or temperature, softcap, mask, casts, layout, slices of rows.
_LOGITS = star(ELEMENTWISE | LAYOUT | BROADCAST | SLICE)

PATTERN = Pattern(
    "linear_cross_entropy",
    (GEMM, _LOGITS, CROSS_ENTROPY),
    rewrite=ops.linear_cross_entropy,
    near_misses=(
        # The node marked as a near miss says which one it is.
        NearMiss("almost_cross_entropy", (shared(GEMM), star(shared(_LOGITS | SOFTMAX)), shared(NEAR_CROSS_ENTROPY))),
    ),
)
