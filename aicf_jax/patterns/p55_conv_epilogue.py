"""Convolution, optional bias, optional scale and shift per channel (batch norm with given statistics), activation."""

from aicf_jax import ops
from aicf_jax.pattern import (
    ACTIVATION,
    AFFINE,
    ALMOST_ACTIVATION,
    BIAS,
    CONV,
    JOIN,
    NEAR_AFFINE,
    NearMiss,
    Pattern,
    opt,
    shared,
)
from aicf_jax.patterns._conv import BETWEEN, SHARED_AFFINE, SHARED_BETWEEN, SHARED_BIAS

_LINEAR = (CONV, BETWEEN, opt(BIAS), BETWEEN, opt(AFFINE), BETWEEN)

PATTERN = Pattern(
    "conv_epilogue",
    (*_LINEAR, ACTIVATION),
    rewrite=ops.conv_epilogue,
    near_misses=(
        # The node marked as a near miss says which one it is.
        NearMiss(
            "almost_affine",
            (shared(CONV), SHARED_BETWEEN, SHARED_BIAS, SHARED_BETWEEN, SHARED_AFFINE, SHARED_BETWEEN, NEAR_AFFINE),
        ),
        NearMiss(
            "activation_on_another_branch",
            (CONV, BETWEEN),
            expected="bias and activation one after the other",
            found="bias on one branch of the convolution, activation on another",
            fork=(BIAS | AFFINE, ACTIVATION),
        ),
        NearMiss(
            "activation_on_another_branch",
            (*_LINEAR, JOIN),
            expected="the activation is applied to the convolution's result",
            found="the activation is applied to another value, which joins the convolution's result",
            operand=ACTIVATION,
        ),
        NearMiss("near_activation", (*_LINEAR, ALMOST_ACTIVATION)),
    ),
)
