"""Scaled dot-product attention: score product, scale / bias / mask / softcap, softmax, dropout, value product."""

from aicf_jax import ops
from aicf_jax.pattern import GEMM, SOFTMAX, Pattern
from aicf_jax.patterns._attention import NOT_SOFTMAX, RESULT, SCORES, WEIGHTS, near_misses

PATTERN = Pattern(
    "attention",
    (GEMM, SCORES, SOFTMAX, WEIGHTS, GEMM, RESULT),
    rewrite=ops.attention,
    near_misses=(*near_misses(SOFTMAX), NOT_SOFTMAX),
)
