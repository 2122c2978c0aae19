"""GEMM epilogues as `DeviceCase`s: the kernel, what XLA makes of the same equations, and those in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.device_case import CUBLASLT, DeviceCase, nbytes, tolerance
from pallas_kernels.gemm_epilogue import reference
from pallas_kernels.gemm_epilogue.activations import ACTIVATIONS
from pallas_kernels.gemm_epilogue.forward import forward


def forward_case(
    m: int,
    n: int,
    k: int,
    activation: str = "relu",
    dtype: str = "bfloat16",
    with_z: bool = False,
    trans_b: bool = False,
) -> DeviceCase:
    """``Y = act(X W + b)``, with Z where the backward would want it. Products have a variance of 1."""

    def arrays(key: jax.Array) -> tuple[Any, ...]:
        kx, kw, kb = jax.random.split(key, 3)
        x = jax.random.normal(kx, (m, k)).astype(dtype)
        w = jax.random.normal(kw, (n, k) if trans_b else (k, n)) * k**-0.5
        return x, w.astype(dtype), jax.random.normal(kb, (n,)).astype(dtype)

    def kernel(x: Any, w: Any, b: Any) -> tuple[Any, ...]:
        z_dtype = jnp.dtype(dtype) if with_z else None
        return forward(x, w, b, activation=activation, trans_b=trans_b, z_dtype=z_dtype)

    def unfused(x: Any, w: Any, b: Any) -> tuple[Any, ...]:
        z = jnp.matmul(x, w.T if trans_b else w) + b
        y = ACTIVATIONS[activation].value(z.astype(jnp.float32), 0.0).astype(dtype)
        return (y, z) if with_z else (y,)

    def exact(x: Any, w: Any, b: Any) -> tuple[Any, ...]:
        y, z = reference.forward(x, w, b, activation=activation, trans_b=trans_b, dtype=jnp.float64)
        return (y, z) if with_z else (y,)

    avals = jax.eval_shape(arrays, jax.eval_shape(lambda: jax.random.key(0)))
    results = jax.eval_shape(unfused, *avals)
    kept = ", Z kept" if with_z else ""
    return DeviceCase(
        name=f"{activation} {dtype} {m}x{n}x{k}{' W transposed' if trans_b else ''}{kept}",
        arrays=arrays,
        kernel=kernel,
        unfused=unfused,
        reference=exact,
        tolerances=(tolerance(dtype, k),) * len(results),
        flops=2 * m * n * k,
        bytes=nbytes(avals, results),
        libraries={"cuBLASLt": CUBLASLT},
    )
