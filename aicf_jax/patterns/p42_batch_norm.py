"""Batch norm with statistics of its own input, and the activation behind it."""

from aicf_jax import ops
from aicf_jax.pattern import ACTIVATION, BATCH_NORM, Pattern, shared

PATTERN = Pattern("batch_norm", (shared(BATCH_NORM), ACTIVATION), rewrite=ops.batch_norm)
