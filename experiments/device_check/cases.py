"""What is checked: the cases of every kernel package, and whole functions as `aicf_jax.fuse` makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import aicf_jax
from pallas_kernels.attention.device import SelfAttention
from pallas_kernels.device_case import CUBLASLT, DeviceCase, discover, nbytes, tolerance


def every_case(target: str) -> dict[str, DeviceCase]:
    """``"package/name"`` -> case. `target`: what `fuse` chooses kernels for."""
    return discover() | {f"fuse/{case.name}": case for case in fused_cases(target)}


def fused_cases(target: str) -> list[DeviceCase]:
    """Forward and gradients of a layer, fused, beside the same without `fuse`."""
    layers = [_layer(jax.nn.relu, "relu", k) for k in (512, 1024, 2048, 4096)]
    layers += [_layer(jax.nn.gelu, "gelu", 1024), _norm_residual(8192, 4096)]
    layers += [_attention(SelfAttention(4, 2048, 16, 64, causal=True))]
    return [_fused(*layer, target) for layer in layers]


def _layer(act: Callable[[Any], Any], name: str, k: int) -> tuple[str, Any, Any, int, int, dict[str, Any]]:
    m, n = 8192, 4096

    def layer(x: Any, w: Any, b: Any) -> Any:
        return act(x @ w + b)

    def arrays(key: jax.Array) -> tuple[Any, ...]:
        kx, kw, kb, kd = jax.random.split(key, 4)
        x, w = jax.random.normal(kx, (m, k)), jax.random.normal(kw, (k, n)) * k**-0.5
        return _bf16(x, w, jax.random.normal(kb, (n,)), jax.random.normal(kd, (m, n)))

    return f"dense {name} {m}x{n}x{k} and gradients", layer, arrays, 6 * m * n * k, m, {"cuBLASLt": CUBLASLT}


def _norm_residual(count: int, length: int) -> tuple[str, Any, Any, int, int, dict[str, Any]]:
    def norm(x: Any, residual: Any, scale: Any, bias: Any) -> Any:
        h = x + residual
        wide = h.astype(jnp.promote_types(h.dtype, jnp.float32))
        mean = jnp.mean(wide, -1, keepdims=True)
        variance = jnp.mean(jnp.square(wide - mean), -1, keepdims=True)
        return ((wide - mean) * jax.lax.rsqrt(variance + 1e-6)).astype(x.dtype) * scale + bias

    def arrays(key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, 5)
        rows = [jax.random.normal(k, (count, length)) for k in keys[:3]]
        scale, bias = (jax.random.normal(k, (length,)) for k in keys[3:])
        return _bf16(rows[0], rows[1], scale, bias, rows[2])

    return f"layer norm of a sum {count}x{length} and gradients", norm, arrays, 0, count, {}


def _attention(of: SelfAttention) -> tuple[str, Any, Any, int, int, dict[str, Any]]:
    # two products forward, five backward
    return (
        f"attention {of} and gradients",
        of.unfused,
        lambda key: of.arrays(key, of.heads),
        7 * of.flops,
        of.length,
        {},
    )


def _bf16(*xs: Any) -> tuple[Any, ...]:
    return tuple(x.astype(jnp.bfloat16) for x in xs)


def _fused(name: str, f: Any, arrays: Any, flops: int, rows: int, libraries: dict[str, Any], target: str) -> DeviceCase:
    """The case of a function with its gradients; the last array is the cotangent."""

    def with_gradients(g: Any) -> Any:
        def both(*args: Any) -> tuple[Any, ...]:
            y, pull = jax.vjp(g, *args[:-1])
            return (y, *pull(args[-1]))

        return both

    def exact(*args: Any) -> tuple[Any, ...]:
        return with_gradients(f)(*(x.astype(jnp.float64) for x in args))

    avals = jax.eval_shape(arrays, jax.eval_shape(lambda: jax.random.key(0)))
    results = jax.eval_shape(with_gradients(f), *avals)
    # what is rounded on the way is rounded once more in each gradient; the longest sum is the one over the rows
    tolerances = (2 * tolerance("bfloat16", 4096), *(3 * tolerance("bfloat16", rows) for _ in results[1:]))
    fused = aicf_jax.fuse(f, policy=aicf_jax.Policy(target=target, on_failure="raise"))
    return DeviceCase(
        name=name,
        arrays=arrays,
        kernel=with_gradients(fused),
        unfused=with_gradients(f),
        reference=exact,
        tolerances=tolerances,
        flops=flops,
        bytes=nbytes(avals, results),
        libraries=libraries,
    )
