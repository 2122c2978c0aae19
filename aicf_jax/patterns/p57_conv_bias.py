"""Convolution with a bias and nothing else (``activation="none"``)."""

from aicf_jax import ops
from aicf_jax.pattern import BIAS, CONV, Pattern
from aicf_jax.patterns._conv import BETWEEN

PATTERN = Pattern("conv_bias", (CONV, BETWEEN, BIAS), rewrite=ops.conv_epilogue)
