"""Layer norm, with the residual addition before it."""

from aicf_jax import ops
from aicf_jax.pattern import LAYER_NORM, NEAR_LAYER_NORM, RESIDUAL, NearMiss, Pattern, opt, shared

PATTERN = Pattern(
    "layer_norm",
    (opt(shared(RESIDUAL)), LAYER_NORM),  # the sum goes on to the next block as well
    rewrite=ops.layer_norm,
    near_misses=(NearMiss("near_norm", (NEAR_LAYER_NORM,)),),  # the node says which one it is
)
