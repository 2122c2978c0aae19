"""The equations of the kernels in plain jax, in any precision."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gemm_epilogue.activations import ACTIVATIONS


def forward(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: str = "none",
    alpha: float = 0.0,
    trans_a: bool = False,
    trans_b: bool = False,
    bias_along: str = "n",
    dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
    """``(Y, Z)`` in `dtype`: ``Z = A @ B + b`` and ``Y = act(Z)``. Arguments as for `forward.forward`."""
    a, b = (x.astype(dtype) for x in (a, b))
    left = jnp.swapaxes(a, -1, -2) if trans_a else a
    right = jnp.swapaxes(b, -1, -2) if trans_b else b
    z = jnp.matmul(left, right, precision=jax.lax.Precision.HIGHEST)
    if bias is not None:
        z = z + (bias.astype(dtype) if bias_along == "n" else bias.astype(dtype)[:, None])
    return ACTIVATIONS[activation].value(z, alpha), z


def backward(
    residual: jax.Array,
    dy: jax.Array,
    *,
    activation: str,
    alpha: float = 0.0,
    from_output: bool | None = None,
    dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
    """``(dZ, db)`` in `dtype`: ``dZ = dY * act'`` and its sum over the rows. Arguments as for `backward.backward`."""
    known, r = ACTIVATIONS[activation], residual.astype(dtype)
    if known.from_output and from_output is False:
        r = known.value(r, alpha)
    dz = known.grad(r, dy.astype(dtype), alpha)
    return dz, jnp.sum(dz, 0)
