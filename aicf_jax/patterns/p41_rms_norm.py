"""RMS norm, with the residual addition before it."""

from aicf_jax import ops
from aicf_jax.pattern import NEAR_RMS_NORM, RESIDUAL, RMS_NORM, NearMiss, Pattern, opt, shared

PATTERN = Pattern(
    "rms_norm",
    (opt(shared(RESIDUAL)), RMS_NORM),
    rewrite=ops.rms_norm,
    near_misses=(NearMiss("near_norm", (NEAR_RMS_NORM,)),),
)
