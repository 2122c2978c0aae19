"""In a derived backward: the activation's gradient, then its sum over the rows. dZ also feeds the two products."""

from aicf_jax import ops
from aicf_jax.pattern import ACTIVATION_GRAD, CAST, LAYOUT, REDUCTION, Pattern, shared, star

PATTERN = Pattern(
    "gemm_epilogue_grad",
    (shared(ACTIVATION_GRAD), star(shared(CAST | LAYOUT)), REDUCTION),
    rewrite=ops.gemm_epilogue_grad,
)
