"""Gated linear units: from either product through bias and activation to the gate, which knows both branches."""

from aicf_jax import ops
from aicf_jax.pattern import (
    ACTIVATION,
    BIAS,
    BROADCAST,
    CAST,
    GATE,
    GEMM,
    LAYOUT,
    NEAR_GATE,
    SLICE,
    NearMiss,
    Pattern,
    opt,
    shared,
    star,
)

# Halves of one projection are its two users. That nobody else uses what lies between is part of what makes a gate.
_BETWEEN = star(shared(CAST | LAYOUT | SLICE))
_WIDENED = star(shared(CAST | LAYOUT | SLICE | BROADCAST))

PATTERN = Pattern(
    "glu",
    (shared(GEMM), _BETWEEN, opt(shared(BIAS)), _BETWEEN, opt(shared(ACTIVATION)), _BETWEEN, GATE),
    rewrite=ops.glu,
    near_misses=(
        # The node marked as a near miss says which one it is.
        NearMiss(
            "almost_gate",
            (shared(GEMM), _WIDENED, opt(shared(BIAS)), _WIDENED, shared(ACTIVATION), _WIDENED, NEAR_GATE),
        ),
    ),
)
