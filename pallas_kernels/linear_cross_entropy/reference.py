"""The equations of the kernels in plain jax, in any precision."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def _logits(x: Any, w: Any, trans_w: bool, scale: float, softcap: float | None) -> Any:
    found = jnp.matmul(x, w.T if trans_w else w, precision=jax.lax.Precision.HIGHEST) * scale
    return found if softcap is None else softcap * jnp.tanh(found / softcap)


def _numbers(logits: Any, labels: Any, base: float) -> tuple[Any, Any, Any, Any]:
    m = jax.lax.stop_gradient(jnp.max(logits, -1))
    here = labels[:, None] == jnp.arange(logits.shape[1])
    taken = jnp.sum(jnp.where(here, logits, 0), -1)
    return m, jnp.sum(jnp.exp(base * (logits - m[:, None])), -1), taken, jnp.sum(logits, -1)


def forward(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    *,
    trans_w: bool = False,
    scale: float = 1.0,
    softcap: float | None = None,
    base: float = 1.0,
    dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """``(m, l, taken, sum)`` in `dtype`. Arguments as for `forward.forward`."""
    return _numbers(_logits(x.astype(dtype), w.astype(dtype), trans_w, scale, softcap), labels, base)


def backward(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    m: jax.Array,
    dl: jax.Array,
    dtaken: jax.Array,
    dsum: jax.Array | None = None,
    *,
    trans_w: bool = False,
    scale: float = 1.0,
    softcap: float | None = None,
    base: float = 1.0,
    dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
    """``(dX, dW)`` in `dtype`. Arguments as for `backward.backward`."""

    def numbers(x: Any, w: Any) -> Any:
        logits = _logits(x, w, trans_w, scale, softcap)
        _, _, taken, total = _numbers(logits, labels, base)
        return jnp.sum(jnp.exp(base * (logits - m[:, None].astype(dtype))), -1), taken, total

    found, pull = jax.vjp(numbers, x.astype(dtype), w.astype(dtype))
    dsum = jnp.zeros_like(found[2]) if dsum is None else dsum
    return pull((dl.astype(dtype), dtaken.astype(dtype), dsum.astype(dtype)))
