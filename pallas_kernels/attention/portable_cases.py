"""Attention through Triton, checked and timed on a GPU: forward, and forward with gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _triton
from pallas_kernels.attention import portable, reference
from pallas_kernels.attention.device import forward_case
from pallas_kernels.device_case import DeviceCase, nbytes, tolerance


def _equation(head_dim: int, causal: bool) -> dict[str, Any]:
    return {"scale": head_dim**-0.5, "upper": 0 if causal else None}


def _forward(length: int, heads: int, head_dim: int, causal: bool, kv_heads: int | None = None) -> DeviceCase:
    def kernel(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        return portable.forward(q, k, v, **_equation(head_dim, causal))

    case = forward_case(1, length, heads, head_dim, causal, kv_heads=kv_heads)
    return dataclasses.replace(case, kernel=kernel, refusal=_triton.refusal)


def _gradients(length: int, heads: int, head_dim: int, causal: bool, kv_heads: int | None = None) -> DeviceCase:
    """``(O, dQ, dK, dV)`` by four kernels; seven products of which the results need five."""
    plain = forward_case(1, length, heads, head_dim, causal, kv_heads=kv_heads)
    equation, dtype = _equation(head_dim, causal), jnp.bfloat16

    def arrays(key: jax.Array) -> tuple[Any, ...]:
        first, second = jax.random.split(key)
        q, k, v = plain.arrays(first)
        return q, k, v, jax.random.normal(second, q.shape).astype(dtype)

    def kernel(q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
        out, m, total = portable.forward(q, k, v, **equation, with_statistics=True)
        return (out, *portable.backward(q, k, v, out, m, total, dout, **equation))

    def with_gradients(f: Any) -> Any:
        def both(q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
            out, pull = jax.vjp(f, q, k, v)
            return (out, *pull(dout.astype(out.dtype)))

        return both

    def exact(*args: Any) -> tuple[Any, ...]:
        f = with_gradients(lambda q, k, v: reference.forward(q, k, v, **equation, dtype=jnp.float64)[0])
        return f(*(x.astype(jnp.float64) for x in args))

    avals = jax.eval_shape(arrays, jax.eval_shape(lambda: jax.random.key(0)))
    # Weights or slopes are rounded before the product that sums them; slopes come from a rounded O besides.
    bound = tolerance(dtype, length) + float(jnp.finfo(dtype).eps)
    return DeviceCase(
        name=f"{plain.name} and gradients",
        arrays=arrays,
        kernel=kernel,
        unfused=with_gradients(lambda q, k, v: plain.unfused(q, k, v)[0]),
        reference=exact,
        tolerances=(bound, 2 * bound, 2 * bound, 2 * bound),
        flops=plain.flops // 4 * 14,
        bytes=nbytes(avals, avals),
        refusal=_triton.refusal,
    )


DEVICE = (
    _forward(2048, 16, 64, causal=True),
    _forward(2048, 16, 128, causal=False),
    _forward(1000, 8, 256, causal=True, kv_heads=2),
    _gradients(2048, 16, 64, causal=True),
    _gradients(2048, 16, 128, causal=True, kv_heads=4),
)
