"""Attention whose weights are normalized after the product with the values."""

from aicf_jax import ops
from aicf_jax.pattern import CAST, GEMM, LAYOUT, NORMALIZE, SOFTMAX_WEIGHTS, Pattern, shared, star
from aicf_jax.patterns._attention import RESULT, SCORES, WEIGHTS, near_misses

PATTERN = Pattern(
    "attention_late",
    # The weights go two ways, to the product and into their sum; both end in the last node.
    (GEMM, SCORES, shared(SOFTMAX_WEIGHTS), WEIGHTS, GEMM, star(CAST | LAYOUT), NORMALIZE, RESULT),
    rewrite=ops.attention,
    near_misses=near_misses(shared(SOFTMAX_WEIGHTS)),
)
