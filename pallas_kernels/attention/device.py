"""Attention as `DeviceCase`s: the kernel, what XLA makes of `jax.nn`'s equations, and those in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import reference
from pallas_kernels.attention.forward import forward
from pallas_kernels.device_case import DeviceCase, nbytes, tolerance


def forward_case(
    batch: int,
    length: int,
    heads: int,
    head_dim: int,
    causal: bool = False,
    dtype: str = "bfloat16",
    kv_heads: int | None = None,
    window: int | None = None,
) -> DeviceCase:
    """Self-attention with a scale of ``1 / sqrt(D)``; `window` is how many keys a query sees, itself included."""
    kv_heads = kv_heads or heads
    options: dict[str, Any] = {
        "scale": head_dim**-0.5,
        "upper": 0 if causal else None,
        "lower": None if window is None else 1 - window,
    }

    def arrays(key: jax.Array) -> tuple[Any, ...]:
        kinds = zip(jax.random.split(key, 3), (heads, kv_heads, kv_heads), strict=True)
        return tuple(jax.random.normal(k, (batch, length, h, head_dim)).astype(dtype) for k, h in kinds)

    def kernel(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        return forward(q, k, v, **options)

    def unfused(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        mask = None if window is None else reference.seen(length, length, options["lower"], None)[None, None]
        return (jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal),)

    def exact(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        return reference.forward(q, k, v, **options, dtype=jnp.float64)[:1]

    avals = jax.eval_shape(arrays, jax.eval_shape(lambda: jax.random.key(0)))
    pairs = int(reference.seen(length, length, options["lower"], options["upper"]).sum())
    kind = f"{'causal ' if causal else ''}{'' if window is None else f'window {window} '}"
    shared = "" if kv_heads == heads else f" K{kv_heads}"
    return DeviceCase(
        name=f"{kind}{dtype} B{batch} S{length} H{heads}{shared} D{head_dim}",
        arrays=arrays,
        kernel=kernel,
        unfused=unfused,
        reference=exact,
        # Weights are rounded before the second product, which sums as many terms as there are keys.
        tolerances=(tolerance(dtype, length) + float(jnp.finfo(dtype).eps),),
        flops=4 * batch * heads * head_dim * pairs,
        bytes=nbytes(avals, avals[0]),
    )
