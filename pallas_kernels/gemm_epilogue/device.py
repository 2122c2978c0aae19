"""GEMM epilogues as `DeviceCase`s: the kernel, what XLA makes of the same equations, and those in float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.device_case import CUBLASLT, DeviceCase, nbytes, tolerance
from pallas_kernels.gemm_epilogue import reference
from pallas_kernels.gemm_epilogue.backward import backward
from pallas_kernels.gemm_epilogue.forward import forward

#: The activations as people write them.
_WRITTEN: dict[str, Any] = {
    "none": lambda z: z,
    "relu": jax.nn.relu,
    "gelu_tanh": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "elu": jax.nn.elu,
    "leaky_relu": jax.nn.leaky_relu,
    "softplus": jax.nn.softplus,
}


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
        y = _WRITTEN[activation](z)
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


def backward_case(m: int, n: int, activation: str = "relu", dtype: str = "bfloat16") -> DeviceCase:
    """``dZ = dY act'`` and the gradient of the bias, from Y where that says it all (relu), else from Z."""

    def arrays(key: jax.Array) -> tuple[Any, ...]:
        kz, kd = jax.random.split(key)
        z, dy = (jax.random.normal(k, (m, n)).astype(dtype) for k in (kz, kd))
        return (jax.nn.relu(z) if activation == "relu" else z), dy

    def kernel(residual: Any, dy: Any) -> tuple[Any, ...]:
        return backward(residual, dy, activation=activation)

    def unfused(residual: Any, dy: Any) -> tuple[Any, ...]:
        (dz,) = jax.vjp(_WRITTEN[activation], residual)[1](dy)
        return dz, jnp.sum(dz, 0)

    def exact(residual: Any, dy: Any) -> tuple[Any, ...]:
        return reference.backward(residual, dy, activation=activation, dtype=jnp.float64)

    avals = jax.eval_shape(arrays, jax.eval_shape(lambda: jax.random.key(0)))
    return DeviceCase(
        name=f"{activation} {dtype} {m}x{n} gradient",
        arrays=arrays,
        kernel=kernel,
        unfused=unfused,
        reference=exact,
        tolerances=(tolerance(dtype), tolerance(dtype, m)),
        flops=0,
        bytes=nbytes(avals, jax.eval_shape(unfused, *avals)),
    )
