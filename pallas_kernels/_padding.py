"""Arrays made longer for TMA, and results cut back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def padded(x: Any, dim: int, to: int) -> Any:
    """An array with zeros at the end of a dimension, whose length is then a multiple of `to`."""
    more = -x.shape[dim] % to
    return jnp.pad(x, [(0, more if d == dim else 0) for d in range(x.ndim)]) if more else x


def cut(x: Any, dim: int, length: int) -> Any:
    """The first so many along a dimension."""
    return x if x.shape[dim] == length else jax.lax.slice_in_dim(x, 0, length, axis=dim)
