"""GEMM, optional bias, activation."""

from aicf_jax import ops
from aicf_jax.pattern import (
    ACTIVATION,
    ALMOST_ACTIVATION,
    BIAS,
    CAST,
    GEMM,
    JOIN,
    LAYOUT,
    SCALE,
    NearMiss,
    Pattern,
    opt,
    star,
)

_BETWEEN = star(CAST | LAYOUT)

PATTERN = Pattern(
    "gemm_epilogue",
    (GEMM, _BETWEEN, opt(BIAS), _BETWEEN, ACTIVATION),
    rewrite=ops.gemm_epilogue,
    near_misses=(
        NearMiss(
            "activation_on_another_branch",
            (GEMM, _BETWEEN),
            expected="bias and activation one after the other",
            found="bias on one branch of the product, activation on another",
            fork=(BIAS, ACTIVATION),
        ),
        NearMiss(
            "activation_on_another_branch",
            (GEMM, _BETWEEN, BIAS, _BETWEEN, JOIN),
            expected="the activation is applied to the biased product",
            found="the activation is applied to another value, which joins the biased product",
            operand=ACTIVATION,
        ),
        NearMiss(
            "scale_after_bias",
            (GEMM, _BETWEEN, BIAS, _BETWEEN, SCALE),
            expected="an activation after the bias",
            found="a scale after the bias: alpha * (A @ B + b) is not alpha * (A @ B) + b",
            whole=False,  # as of queries, which flax scales before attention: product and bias are one all the same
        ),
        NearMiss("near_activation", (GEMM, _BETWEEN, opt(BIAS), _BETWEEN, ALMOST_ACTIVATION)),
    ),
)
