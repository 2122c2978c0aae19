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
    group = q.shape[1] // k.shape[1]
    x = jnp.einsum("bhsd,bhtd->bhst", q, jnp.repeat(k, group, 1), precision="highest") * scale
    if softcap is not None:
        x = softcap * jnp.tanh(x / softcap)
    if bias is not None:
        x = x + bias_factor * bias.astype(dtype)
    if key_bias is not None:
        x = x + key_bias.astype(dtype)[:, :, None]
    x = jnp.where(visible(x.shape[2], x.shape[3], lower, upper, segments, mask), x, fill)
    m = jnp.max(x, -1)
    e = jnp.exp(x - jnp.where(m == -jnp.inf, 0, m)[..., None])
    total = jnp.sum(e, -1)
    p = e / total[..., None]
    if keep is not None:
        p = p * (kept(keep) * jnp.asarray(keep_factor, dtype))
    out = jnp.einsum("bhst,bhtd->bhsd", p, jnp.repeat(v, group, 1), precision="highest")
    return _by_heads(out, layouts[3]), m, total


def kept(keep: Any) -> jax.Array:
    """Which weights dropout keeps: an array, or a `Bernoulli` as jax draws it."""
    if not isinstance(keep, Bernoulli):
        return keep
    return jax.random.bernoulli(jax.random.wrap_key_data(keep.words), jnp.float32(keep.probability), keep.shape)


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    *,
    bias: Any = None,
    key_bias: Any = None,
    dtype: Any = jnp.float32,
    **equation: Any,
) -> tuple[jax.Array | None, ...]:
    """``(dQ, dK, dV, dbias, dkey_bias)`` in `dtype`; None of what there is not.

    Arguments as for `forward`, with the cotangent of O.
    """

    def out(q: Any, k: Any, v: Any, bias: Any, key_bias: Any) -> Any:
        return forward(q, k, v, bias=bias, key_bias=key_bias, **equation, dtype=dtype)[0]

    _, pull = jax.vjp(out, *(None if x is None else x.astype(dtype) for x in (q, k, v, bias, key_bias)))
    return pull(dout.astype(dtype))


def visible(
    queries: int, keys: int, lower: int | None, upper: int | None, segments: Sequence[Any] = (), mask: Any = None
) -> Any:
    """Which scores are not hidden, by limits and arrays; dimensions that are shared are 1."""
    found = seen(queries, keys, lower, upper)[None, None]
    for of_query, of_key in segments:
        found = found & ((0 if of_query is None else of_query[..., None]) == of_key[..., None, :])
    return found if mask is None else found & mask


def seen(queries: int, keys: int, lower: int | None, upper: int | None) -> jax.Array:
    """Which keys each query sees."""
    distance = jnp.arange(keys) - jnp.arange(queries)[:, None]
    mask = jnp.ones(distance.shape, bool)
    mask = mask if lower is None else mask & (distance >= lower)
    return mask if upper is None else mask & (distance <= upper)


def _by_heads(x: jax.Array, layout: str) -> jax.Array:
    return x if layout == "bhsd" else x.swapaxes(1, 2)
