"""GEMM with a bias and no activation (``activation="none"``)."""

from aicf_jax import ops
from aicf_jax.pattern import BIAS, CAST, LAYOUT, UNBATCHED_GEMM, Pattern, star

PATTERN = Pattern("gemm_bias", (UNBATCHED_GEMM, star(CAST | LAYOUT), BIAS), rewrite=ops.gemm_epilogue)
