"""Attention with arrays beside the scores, and of few queries, as `DeviceCase`s."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import reference
from pallas_kernels.attention.forward import forward
from pallas_kernels.device_case import DeviceCase, nbytes, tolerance


def beside_case(
    batch: int,
    queries: int,
    keys: int,
    heads: int,
    head_dim: int,
    *beside: str,
    kv_heads: int | None = None,
    causal: bool = False,
) -> DeviceCase:
    """Attention in bfloat16 with a scale of ``1 / sqrt(D)``; causal up to the last key.

    `beside`: some of ``"padding"`` (of the last quarter of the keys on average), ``"segments"`` (eight, side by side),
    ``"mask"`` (of each batch, half of it) and ``"bias"`` (float32, of each head).
    """
    kv_heads = kv_heads or heads
    options: dict[str, Any] = {"scale": head_dim**-0.5, "upper": keys - queries if causal else None}

    def arrays(key: jax.Array) -> tuple[Any, ...]:
        parts = jax.random.split(key, 3 + len(beside))
        kinds = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
        qkv = (
            jax.random.normal(part, (batch, length, n, head_dim)).astype("bfloat16")
            for part, (length, n) in zip(parts, kinds, strict=False)
        )
        return *qkv, *(made(name, part) for name, part in zip(beside, parts[3:], strict=True))

    def made(name: str, key: jax.Array) -> jax.Array:
        if name == "padding":
            return (jnp.arange(keys) >= jax.random.randint(key, (batch, 1, 1), keys // 2, keys)).astype(jnp.int32)
        if name == "segments":
            return jnp.broadcast_to(jnp.arange(keys, dtype=jnp.int32) // -(-keys // 8), (batch, 1, keys))
        if name == "mask":
            # Each query sees the first key.
            return jax.random.bernoulli(key, 0.5, (batch, 1, queries, keys)).at[..., 0].set(True)
        return jax.random.normal(key, (1, heads, queries, keys))

    def described(values: tuple[Any, ...]) -> dict[str, Any]:
        given = dict(zip(beside, values, strict=True))
        segments = [(None, given["padding"])] if "padding" in given else []
        if "segments" in given:
            segments.append((given["segments"][..., keys - queries :], given["segments"]))
        return {"segments": segments, **{n: given[n] for n in ("mask", "bias") if n in given}}

    def kernel(q: Any, k: Any, v: Any, *values: Any) -> tuple[Any, ...]:
        return forward(q, k, v, **described(values), **options)

    def unfused(q: Any, k: Any, v: Any, *values: Any) -> tuple[Any, ...]:
        given = described(values)
        mask = reference.seen(queries, keys, None, options["upper"])[None, None]
        for of_query, of_key in given["segments"]:
            mask = mask & ((0 if of_query is None else of_query[..., None]) == of_key[..., None, :])
        mask = mask & given["mask"] if "mask" in given else mask
        return (jax.nn.dot_product_attention(q, k, v, given.get("bias"), mask),)

    def exact(q: Any, k: Any, v: Any, *values: Any) -> tuple[Any, ...]:
        return reference.forward(q, k, v, **described(values), **options, dtype=jnp.float64)[:1]

    avals = jax.eval_shape(arrays, jax.eval_shape(lambda: jax.random.key(0)))
    pairs = int(reference.seen(queries, keys, None, options["upper"]).sum())
    kind = " ".join([*beside, *(["causal"] if causal else [])])
    shared = "" if kv_heads == heads else f" K{kv_heads}"
    return DeviceCase(
        name=f"{kind} B{batch} S{queries} T{keys} H{heads}{shared} D{head_dim}".strip(),
        arrays=arrays,
        kernel=kernel,
        unfused=unfused,
        reference=exact,
        # Weights are rounded before the second product, which sums as many terms as there are keys.
        tolerances=(tolerance("bfloat16", keys) + float(jnp.finfo("bfloat16").eps),),
        flops=4 * batch * heads * head_dim * pairs,
        bytes=nbytes(avals, avals[0]),
    )
