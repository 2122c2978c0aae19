"""Norms as `DeviceCase`s: the kernels, what XLA makes of the same equations, and those in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.device_case import DeviceCase, nbytes, tolerance
from pallas_kernels.norm import reference
from pallas_kernels.norm.backward import backward
from pallas_kernels.norm.forward import forward

_EPS = 1e-6


def _rows(key: jax.Array, count: int, length: int, number: int, dtype: Any) -> list[jax.Array]:
    keys = jax.random.split(key, number)
    return [jax.random.normal(k, (count, length), jnp.float32).astype(dtype) for k in keys]


def _given(found: Any) -> tuple[Any, ...]:
    return tuple(x for x in found if x is not None)


def forward_case(count: int, length: int, dtype: str = "bfloat16", variance: str = "centered") -> DeviceCase:
    """A residual addition and the norm of its sum, with the sum and the statistics that a backward needs."""

    def arrays(key: jax.Array) -> tuple[Any, ...]:
        rows, parameters = jax.random.split(key)
        return (*_rows(rows, count, length, 2, dtype), *(p[0] for p in _rows(parameters, 1, length, 2, dtype)))

    def kernel(x: Any, residual: Any, scale: Any, bias: Any) -> tuple[Any, ...]:
        options: dict[str, Any] = {"eps": _EPS, "variance": variance, "with_sum": True, "with_statistics": True}
        return _given(forward(x, scale, bias, residual, **options))

    def plain(dtype: Any) -> Any:
        return lambda x, residual, scale, bias: _given(
            reference.forward(x, scale, bias, residual, eps=_EPS, variance=variance, dtype=dtype)
        )

    def unfused(*args: Any) -> tuple[Any, ...]:
        y, s, *statistics = plain(jnp.float32)(*args)
        return (y.astype(dtype), s.astype(dtype), *statistics)

    results = jax.eval_shape(unfused, *jax.eval_shape(arrays, jax.eval_shape(lambda: jax.random.key(0))))
    name = "rms norm" if variance == "mean_square" else "layer norm"
    return DeviceCase(
        name=f"{name} {dtype} {count}x{length} forward",
        arrays=arrays,
        kernel=kernel,
        unfused=unfused,
        reference=plain(jnp.float64),
        tolerances=(*(tolerance(dtype) for _ in range(2)), *(tolerance("float32", length) for _ in results[2:])),
        flops=0,
        bytes=2 * nbytes(results[:2]) + nbytes(results[2:]),
    )


def backward_case(count: int, length: int, dtype: str = "bfloat16", variance: str = "centered") -> DeviceCase:
    """The gradients of X (and R), scale and bias, from what the forward kept."""
    centered = variance != "mean_square"

    def arrays(key: jax.Array) -> tuple[Any, ...]:
        rows, parameters = jax.random.split(key)
        dy, x, residual, dsum = _rows(rows, count, length, 4, dtype)
        (scale,) = _rows(parameters, 1, length, 1, dtype)
        kept = reference.forward(x, residual=residual, eps=_EPS, variance=variance)
        return (dy, x, kept.rstd, *((kept.mean,) if centered else ()), scale[0], residual, dsum)

    def split(args: tuple[Any, ...]) -> dict[str, Any]:
        names = ("dy", "x", "rstd", *(("mean",) if centered else ()), "scale", "residual", "dsum")
        return dict(zip(names, args, strict=True))

    def kernel(*args: Any) -> tuple[Any, ...]:
        return _given(backward(**split(args), dscale=jnp.dtype(dtype), dbias=jnp.dtype(dtype)))

    def unfused(*args: Any) -> tuple[Any, ...]:
        return tuple(x.astype(dtype) for x in reference.backward(**split(args)))

    def exact(*args: Any) -> tuple[Any, ...]:
        return tuple(reference.backward(**split(args), dtype=jnp.float64))

    avals = jax.eval_shape(arrays, jax.eval_shape(lambda: jax.random.key(0)))
    name = "layer norm" if centered else "rms norm"
    return DeviceCase(
        name=f"{name} {dtype} {count}x{length} backward",
        arrays=arrays,
        kernel=kernel,
        unfused=unfused,
        reference=exact,
        tolerances=(tolerance(dtype), *(tolerance(dtype, count),) * 2),
        flops=0,
        bytes=nbytes(avals) + nbytes(jax.eval_shape(unfused, *avals)),
    )
