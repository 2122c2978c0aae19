"""The pointwise operations of the language, by the names of jax's primitives, and how a parameter is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


#: Primitives of the same name in `jax.lax` that are functions of each element and have no parameters that matter.
_PLAIN = _words(
    "abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clamp cos cosh digamma div eq erf erf_inv erfc "
    "exp exp2 expm1 floor ge gt igamma is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not "
    "or pow rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt "
    "square sub tan tanh xor"
)

#: Parameters that are part of what an operation computes. Others must have their default.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "integer_pow": ("y",),
    "convert_element_type": ("new_dtype",),
    "bitcast_convert_type": ("new_dtype",),
    "reduce_precision": ("exponent_bits", "mantissa_bits"),
}

_LAX_NAMES = {
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "not": "bitwise_not",
}


def _lax(name: str) -> Callable[..., Any]:
    return getattr(jax.lax, _LAX_NAMES.get(name, name))


POINTWISE: dict[str, Callable[..., Any]] = {
    **{name: _lax(name) for name in _PLAIN},
    "integer_pow": lambda x, *, y: jax.lax.integer_pow(x, y),
    # A primitive of its own from jax 0.12 on, in the derivative of tanh: without the cancellation near 1.
    "one_minus_square": lambda x: (1 - x) * (1 + x),
    "convert_element_type": lambda x, *, new_dtype: jax.lax.convert_element_type(x, jnp.dtype(new_dtype)),
    "bitcast_convert_type": lambda x, *, new_dtype: jax.lax.bitcast_convert_type(x, jnp.dtype(new_dtype)),
    "reduce_precision": lambda x, *, exponent_bits, mantissa_bits: jax.lax.reduce_precision(
        x, exponent_bits, mantissa_bits
    ),
}


def shifted_exp(x: Any, m: Any, base: float) -> Any:
    """``exp(base (x - m))`` of scores relative to a running maximum; a maximum that is infinite counts as zero.

    So a row that has seen only -inf has weights 0, and a row with a NaN keeps it. x is no larger than m; saying so
    keeps the compiler from one multiply-subtract without the rounding that x had when its maximum was taken.
    """
    safe = jnp.where(jnp.isfinite(m) | jnp.isnan(m), m, 0)
    difference = jnp.minimum(x, jnp.where(jnp.isinf(m), jnp.inf, m)) - safe
    return jnp.exp(difference if base == 1.0 else difference * jnp.asarray(base, difference.dtype))


def random_bits(key_data: Any, counter: Any) -> Any:
    """The 32 random bits that jax's partitionable threefry gives the element at each flat position.

    Args:
      key_data: uint32[2].
      counter: uint32 flat positions, any shape.

    ``threefry2x32(key, (0, position))`` with its two output words combined by exclusive or, as `jax.random.bits` does
    for arrays of less than 2^32 elements.
    """
    from jax.extend.random import threefry2x32_p

    shape = jnp.shape(counter)
    k1, k2 = (jnp.broadcast_to(key_data[i], shape) for i in range(2))
    high, low = threefry2x32_p.bind(k1, k2, jnp.zeros(shape, np.uint32), counter)
    return high ^ low


def empty_value(monoid: str, dtype: Any) -> Any:
    """The neutral element of a one-value monoid in this dtype: 0, or the least or greatest value."""
    dtype = jnp.dtype(dtype)
    if monoid in ("sum", "moments"):
        return np.zeros((), dtype)
    low = monoid == "max"
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(-np.inf if low else np.inf, dtype)
    if dtype == np.bool_:
        return np.asarray(not low)
    info = jnp.iinfo(dtype)
    return np.asarray(info.min if low else info.max, dtype)


def never(x: Any) -> Any:
    """False, but not to a compiler, which so can do nothing with it before it has x, which is not empty."""
    first = jax.lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())
    return jnp.isnan(first) & jnp.isfinite(first)
