"""Attention's backward as `DeviceCase`s: the kernels, what XLA makes of `jax.nn`'s equations, and those in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import reference
from pallas_kernels.attention.backward import backward
from pallas_kernels.attention.forward import forward
from pallas_kernels.device_case import DeviceCase, nbytes, tolerance


def gradient_case(
    batch: int,
    length: int,
    heads: int,
    head_dim: int,
    causal: bool = False,
    dtype: str = "bfloat16",
    kv_heads: int | None = None,
    window: int | None = None,
) -> DeviceCase:
    """Forward and backward of self-attention, as `device.forward_case` describes it; results: dQ, dK, dV."""
    kv_heads = kv_heads or heads
    upper, lower = 0 if causal else None, None if window is None else 1 - window
    options: dict[str, Any] = {"scale": head_dim**-0.5, "lower": lower, "upper": upper}

    def arrays(key: jax.Array) -> tuple[Any, ...]:
        kinds = zip(jax.random.split(key, 4), (heads, kv_heads, kv_heads, heads), strict=True)
        return tuple(jax.random.normal(k, (batch, length, h, head_dim)).astype(dtype) for k, h in kinds)

    def kernel(q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
        out, m, total = forward(q, k, v, **options, with_statistics=True)
        return backward(q, k, v, out, m, total, dout, **options)

    def unfused(q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
        mask = None if window is None else reference.seen(length, length, lower, None)[None, None]

        def attention(q: Any, k: Any, v: Any) -> Any:
            return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal)

        return jax.vjp(attention, q, k, v)[1](dout)

    def exact(q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
        return reference.backward(q, k, v, dout, **options, dtype=jnp.float64)

    avals = jax.eval_shape(arrays, jax.eval_shape(lambda: jax.random.key(0)))
    pairs = int(reference.seen(length, length, lower, upper).sum())
    kind = f"{'causal ' if causal else ''}{'' if window is None else f'window {window} '}"
    shared = "" if kv_heads == heads else f" K{kv_heads}"
    # Weights, and gradients of scores, are rounded before products of as many terms as there are rows; O is, too.
    error = tolerance(dtype, length * heads // kv_heads) + 3 * float(jnp.finfo(dtype).eps)
    return DeviceCase(
        name=f"{kind}{dtype} B{batch} S{length} H{heads}{shared} D{head_dim} gradients",
        arrays=arrays,
        kernel=kernel,
        unfused=unfused,
        reference=exact,
        tolerances=(error,) * 3,
        # Two products forward, five backward.
        flops=14 * batch * heads * head_dim * pairs,
        bytes=nbytes(avals, avals[:3]),
    )
