"""The activations of the epilogue and their derivatives, as float32 formulas that every kernel of the package can run.

Mosaic GPU has neither expm1, log1p nor erfc, and ``1 + erf`` or ``1 + tanh`` lose all digits where they are small. The
formulas here keep a relative error of a few units of float32 (1e-5 for `erfc`, see there), which the rounding to 16
bits hides. NaN and infinity appear where they do in jax's own functions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_LOG2E = math.log2(math.e)
_SQRT_HALF = math.sqrt(0.5)
_GELU = math.sqrt(2 / math.pi)
_CUBIC = 0.044715
_DENSITY = 1 / math.sqrt(2 * math.pi)


def _reciprocal(x: Any) -> Any:
    """``1 / x`` for ``x >= 1``: a square root is one instruction where a rounded division is ten."""
    r = jax.lax.rsqrt(x)
    return r * r


def sigmoid(z: Any) -> Any:
    """``1 / (1 + exp(-z))``."""
    return _reciprocal(1.0 + jnp.exp2(z * -_LOG2E))


def expm1(z: Any) -> Any:
    """``exp(z) - 1`` for ``z <= 0``, as ``tanh(z / 2) * (exp(z) + 1)``, in which nothing cancels."""
    return jnp.tanh(0.5 * z) * (jnp.exp(z) + 1.0)


def log1p(u: Any) -> Any:
    """``log(1 + u)`` for ``0 <= u <= 1``: the error of rounding ``1 + u`` is divided out (Kahan)."""
    w = 1.0 + u
    return jnp.where(w == 1.0, u, jnp.log(w) * (u / jnp.where(w == 1.0, 1.0, w - 1.0)))


#: ``t = 1 / (1 + x / 2)``: coefficients of `erfc`, from the constant one on.
_ERFC = (0.28209466, 0.28211913, 0.24605434, 0.1857361, 0.02776711, 0.1763247, -0.37720734, 0.22097287, -0.04386112)


def erfc(x: Any) -> Any:
    """The complementary error function.

    ``exp(-x^2) * t * P(t)`` with ``t = 1 / (1 + x / 2)`` for ``x >= 0`` and ``2 - erfc(-x)`` below: P is a minimax
    fit of ours, of relative error 4.4e-7 for all x. Rounding ``x^2`` makes that 1e-5 at the end of float32's range.
    """
    size = jnp.abs(x)
    t = _reciprocal(1.0 + 0.5 * size)
    scaled = jnp.full_like(x, _ERFC[-1])
    for c in _ERFC[-2::-1]:
        scaled = scaled * t + c
    tail = t * scaled * jnp.exp2((x * x) * -_LOG2E)
    return jnp.where(x < 0, 2.0 - tail, tail)


def _gelu_cubic(z: Any) -> Any:
    return _GELU * (z + _CUBIC * (z * z * z))


def _gelu_tanh_grad(z: Any, t: Any, alpha: float) -> Any:
    s = sigmoid(2.0 * _gelu_cubic(z))  # 0.5 * (1 + tanh(u)) = sigmoid(2 u)
    return t * (s + z * (s * (1.0 - s)) * ((2.0 * _GELU) * (1.0 + (3.0 * _CUBIC) * (z * z))))


def _gelu_exact_grad(z: Any, t: Any, alpha: float) -> Any:
    return t * (0.5 * erfc(-z * _SQRT_HALF) + z * (_DENSITY * jnp.exp2((z * z) * (-0.5 * _LOG2E))))


def _silu_grad(z: Any, t: Any, alpha: float) -> Any:
    s = sigmoid(z)
    return t * (s + z * (s * (1.0 - s)))


def _softplus(z: Any, alpha: float) -> Any:
    return jnp.maximum(z, 0.0) + log1p(jnp.exp(-jnp.abs(z)))


@dataclasses.dataclass(frozen=True)
class Activation:
    """``y = value(z, alpha)``.

    Attributes:
      value: the function.
      grad: ``(r, t, alpha) -> t * act'``, where `r` is the result of the activation if `from_output`, else its input.
      from_output: what `grad` is a function of.
    """

    value: Callable[[Any, float], Any]
    grad: Callable[[Any, Any, float], Any]
    from_output: bool = False


def _elu(z: Any, alpha: float) -> Any:
    return jnp.where(z > 0, z, alpha * expm1(jnp.minimum(z, 0.0)))


def _elu_grad(z: Any, t: Any, alpha: float) -> Any:
    return jnp.where(z > 0, t, t * (alpha * jnp.exp(jnp.minimum(z, 0.0))))


#: By name, as `aicf_jax.ops.epilogue.ACTIVATIONS` has them.
ACTIVATIONS: dict[str, Activation] = {
    "none": Activation(lambda z, alpha: z, lambda r, t, alpha: t),
    "relu": Activation(
        lambda z, alpha: jnp.maximum(z, 0.0), lambda y, t, alpha: jnp.where(y > 0, t, 0.0), from_output=True
    ),
    "gelu_exact": Activation(lambda z, alpha: (0.5 * z) * erfc(-z * _SQRT_HALF), _gelu_exact_grad),
    "gelu_tanh": Activation(lambda z, alpha: z * sigmoid(2.0 * _gelu_cubic(z)), _gelu_tanh_grad),
    "silu": Activation(lambda z, alpha: z * sigmoid(z), _silu_grad),
    "tanh": Activation(lambda z, alpha: jnp.tanh(z), lambda y, t, alpha: (t + t * y) * (1.0 - y), from_output=True),
    "sigmoid": Activation(lambda z, alpha: sigmoid(z), lambda y, t, alpha: t * y * (1.0 - y), from_output=True),
    "elu": Activation(_elu, _elu_grad),
    "leaky_relu": Activation(
        lambda z, alpha: jnp.where(z >= 0, z, alpha * z), lambda z, t, alpha: jnp.where(z >= 0, t, alpha * t)
    ),
    "softplus": Activation(_softplus, lambda z, t, alpha: t * sigmoid(z)),
}
