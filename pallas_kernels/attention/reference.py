"""The equations of the kernel in plain jax, in any precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.dropout import Bernoulli


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float = 1.0,
    lower: int | None = None,
    upper: int | None = None,
    softcap: float | None = None,
    segments: Sequence[Any] = (),
    mask: Any = None,
    bias: Any = None,
    bias_factor: float = 1.0,
    key_bias: Any = None,
    fill: float = -math.inf,
    keep: Any = None,
    keep_factor: float = 1.0,
    layouts: tuple[str, ...] = ("bshd",) * 4,
    dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``(O, m, l)`` in `dtype`. Arguments as for `forward.forward`."""
    q, k, v = (_by_heads(x.astype(dtype), layout) for x, layout in zip((q, k, v), layouts, strict=False))
    b, h, s, d = q.shape
    _, heads, t, _ = k.shape
    q = q.reshape(b, heads, h // heads, s, d)
    x = jnp.einsum("bkgsd,bktd->bkgst", q, k, precision="highest").reshape(b, h, s, t) * scale
    if softcap is not None:
        x = softcap * jnp.tanh(x / softcap)
    if bias is not None:
        x = x + bias_factor * bias.astype(dtype)
    if key_bias is not None:
        x = x + key_bias.astype(dtype)[:, :, None]
    x = jnp.where(seen(s, t, lower, upper), x, fill)
    for of_query, of_key in segments:
        x = jnp.where((0 if of_query is None else of_query[..., None]) == of_key[..., None, :], x, fill)
    if mask is not None:
        x = jnp.where(mask, x, fill)
    m = jnp.max(x, -1)
    e = jnp.exp(x - jnp.where(m == -jnp.inf, 0, m)[..., None])
    total = jnp.sum(e, -1)
    p = e / total[..., None]
    if isinstance(keep, Bernoulli):
        key = jax.random.wrap_key_data(keep.words)
        keep = jax.random.bernoulli(key, jnp.float32(keep.probability), keep.shape)
    if keep is not None:
        p = p * (keep * jnp.asarray(keep_factor, dtype))
    p = p.reshape(b, heads, h // heads, s, t)
    out = jnp.einsum("bkgst,bktd->bkgsd", p, v, precision="highest").reshape(b, h, s, d)
    return _by_heads(out, layouts[3]), m, total


def backward(
    q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array, *, dtype: Any = jnp.float32, **equation: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``(dQ, dK, dV)`` in `dtype`. Arguments as for `forward`, with the cotangent of O."""
    _, pull = jax.vjp(lambda *x: forward(*x, **equation, dtype=dtype)[0], *(x.astype(dtype) for x in (q, k, v)))
    return pull(dout.astype(dtype))


def seen(queries: int, keys: int, lower: int | None, upper: int | None) -> jax.Array:
    """Which keys each query sees."""
    distance = jnp.arange(keys) - jnp.arange(queries)[:, None]
    mask = jnp.ones(distance.shape, bool)
    mask = mask if lower is None else mask & (distance >= lower)
    return mask if upper is None else mask & (distance <= upper)


def _by_heads(x: jax.Array, layout: str) -> jax.Array:
    return x if layout == "bhsd" else x.swapaxes(1, 2)
