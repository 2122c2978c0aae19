"""Convolution, optional bias, scale and shift per channel, and no activation (``activation="none"``)."""

from aicf_jax import ops
from aicf_jax.pattern import AFFINE, BIAS, CONV, Pattern, opt
from aicf_jax.patterns._conv import BETWEEN

PATTERN = Pattern("conv_affine", (CONV, BETWEEN, opt(BIAS), BETWEEN, AFFINE), rewrite=ops.conv_epilogue)
