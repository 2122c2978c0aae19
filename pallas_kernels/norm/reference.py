"""The equations of the kernels in plain jax, in any precision."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.norm.backward import Backward
from pallas_kernels.norm.forward import Forward


def forward(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    eps: float,
    variance: str = "centered",
    clamped: bool = False,
    dtype: Any = jnp.float32,
) -> Forward:
    """Everything that `forward.forward` can return, computed and returned in `dtype`; S is rounded to the type of x."""
    s = (x if residual is None else x + residual).astype(dtype)
    mean = None if variance == "mean_square" else jnp.mean(s, axis=-1)
    centered = s if mean is None else s - mean[:, None]
    v = jnp.mean(jnp.square(centered if variance == "centered" else s), axis=-1)
    if variance == "moments":
        v = v - jnp.square(jnp.mean(s, axis=-1))
    slope = jnp.where(v > 0, 1.0, jnp.where(v == 0, 0.5, 0.0)).astype(dtype) if clamped else None
    rstd = lax.rsqrt((jnp.maximum(v, 0) if clamped else v) + eps)
    y = centered * rstd[:, None]
    y = y if scale is None else y * scale.astype(dtype)
    return Forward(y if bias is None else y + bias.astype(dtype), s, mean, rstd, slope)


def backward(
    dy: jax.Array,
    x: jax.Array,
    rstd: jax.Array,
    mean: jax.Array | None = None,
    slope: jax.Array | None = None,
    scale: jax.Array | None = None,
    residual: jax.Array | None = None,
    dsum: jax.Array | None = None,
    *,
    dtype: Any = jnp.float32,
) -> Backward:
    """All cotangents, in `dtype`; see `backward.backward`."""
    s = (x if residual is None else x + residual).astype(dtype)
    dy, rstd = dy.astype(dtype), rstd.astype(dtype)[:, None]
    n = (s if mean is None else s - mean.astype(dtype)[:, None]) * rstd
    g = dy if scale is None else dy * scale.astype(dtype)
    along = jnp.mean(g * n, axis=-1, keepdims=True)
    along = along if slope is None else along * slope.astype(dtype)[:, None]
    dx = g - n * along if mean is None else g - n * along - jnp.mean(g, axis=-1, keepdims=True)
    dx = rstd * dx if dsum is None else rstd * dx + dsum.astype(dtype)
    return Backward(dx, jnp.sum(dy * n, axis=0), jnp.sum(dy, axis=0))
