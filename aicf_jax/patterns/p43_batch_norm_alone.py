"""Batch norm with statistics of its own input and no activation (``activation="none"``)."""

from aicf_jax import ops
from aicf_jax.pattern import BATCH_NORM, Pattern

PATTERN = Pattern("batch_norm_alone", (BATCH_NORM,), rewrite=ops.batch_norm)
