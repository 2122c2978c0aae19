"""Attention as `DeviceCase`s: the kernels, what XLA makes of `jax.nn`'s equations, and those in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import reference
from pallas_kernels.attention.backward import backward
from pallas_kernels.attention.forward import forward
from pallas_kernels.device_case import DeviceCase, nbytes, tolerance


@dataclasses.dataclass(frozen=True)
class SelfAttention:
    """With a scale of ``1 / sqrt(D)``; `window` is how many keys a query sees, itself included.

    `softcap`: scores x become ``softcap tanh(x / softcap)``.
    """

    batch: int
    length: int
    heads: int
    head_dim: int
    causal: bool = False
    dtype: str = "bfloat16"
    kv_heads: int | None = None
    window: int | None = None
    softcap: float | None = None

    def __str__(self) -> str:
        kind = f"{'causal ' if self.causal else ''}{'' if self.window is None else f'window {self.window} '}"
        kind += "" if self.softcap is None else f"softcap {self.softcap:g} "
        shared = "" if self.shares == 1 else f" K{self.kv_heads}"
        return f"{kind}{self.dtype} B{self.batch} S{self.length} H{self.heads}{shared} D{self.head_dim}"

    @property
    def shares(self) -> int:
        """Heads of Q for each of K and V."""
        return self.heads // (self.kv_heads or self.heads)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the kernels."""
        lower = None if self.window is None else 1 - self.window
        limits = {"lower": lower, "upper": 0 if self.causal else None}
        return {"scale": self.head_dim**-0.5, **limits, "softcap": self.softcap}

    @property
    def flops(self) -> int:
        """Of one product for what is seen."""
        pairs = reference.seen(self.length, self.length, self.options["lower"], self.options["upper"]).sum()
        return 2 * self.batch * self.heads * self.head_dim * int(pairs)

    def arrays(self, key: jax.Array, *more: int) -> tuple[Any, ...]:
        """Random Q, K and V, and arrays of so many heads."""
        heads = (self.heads, *(self.heads // self.shares,) * 2, *more)
        keys = jax.random.split(key, len(heads))
        shapes = ((self.batch, self.length, h, self.head_dim) for h in heads)
        return tuple(jax.random.normal(k, shape).astype(self.dtype) for k, shape in zip(keys, shapes, strict=True))

    def unfused(self, q: Any, k: Any, v: Any) -> Any:
        """By `jax.nn`, which has no softcap: then by its equations."""
        lower = self.options["lower"]
        if self.softcap is not None:
            return self._capped(q, k, v, self.softcap)
        mask = None if lower is None else reference.seen(self.length, self.length, lower, None)[None, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=self.causal)

    def _capped(self, q: Any, k: Any, v: Any, softcap: float) -> Any:
        k, v = (jnp.repeat(x, self.shares, axis=2) for x in (k, v))
        x = jnp.einsum("bshd,bthd->bhst", q, k, preferred_element_type=jnp.float32) * self.options["scale"]
        x = softcap * jnp.tanh(x / softcap)
        mask = reference.seen(self.length, self.length, self.options["lower"], self.options["upper"])
        weights = jax.nn.softmax(jnp.where(mask, x, -jnp.inf), axis=-1)
        return jnp.einsum("bhst,bthd->bshd", weights.astype(v.dtype), v)

    @property
    def rounding(self) -> float:
        """Of the weights, which are multiplied in the type of V."""
        return float(jnp.finfo(self.dtype).eps)


def forward_case(of: SelfAttention, forward: Callable[..., Any] = forward) -> DeviceCase:
    """By Mosaic GPU, or another `forward` of the same arguments."""
    avals = jax.eval_shape(of.arrays, jax.eval_shape(lambda: jax.random.key(0)))
    return DeviceCase(
        name=str(of),
        arrays=of.arrays,
        kernel=lambda q, k, v: forward(q, k, v, **of.options),
        unfused=lambda q, k, v: (of.unfused(q, k, v),),
        reference=lambda q, k, v: reference.forward(q, k, v, **of.options, dtype=jnp.float64)[:1],
        # The second product sums as many terms as there are keys.
        tolerances=(tolerance(of.dtype, of.length) + of.rounding,),
        flops=2 * of.flops,
        bytes=nbytes(avals, avals[0]),
    )


def gradient_case(
    of: SelfAttention, forward: Callable[..., Any] = forward, backward: Callable[..., Any] = backward
) -> DeviceCase:
    """Forward and backward, to dQ, dK and dV."""

    def arrays(key: jax.Array) -> tuple[Any, ...]:
        return of.arrays(key, of.heads)

    def kernel(q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
        out, m, total = forward(q, k, v, **of.options, with_statistics=True)
        return backward(q, k, v, out, m, total, dout, **of.options)

    avals = jax.eval_shape(arrays, jax.eval_shape(lambda: jax.random.key(0)))
    # Gradients of scores are rounded like weights, before products of as many terms as there are rows; O is, too.
    error = tolerance(of.dtype, of.length * of.shares) + 3 * of.rounding
    return DeviceCase(
        name=f"{of} gradients",
        arrays=arrays,
        kernel=kernel,
        unfused=lambda q, k, v, dout: jax.vjp(of.unfused, q, k, v)[1](dout),
        reference=lambda q, k, v, dout: reference.backward(q, k, v, dout, **of.options, dtype=jnp.float64)[:3],
        tolerances=(error,) * 3,
        # Two products forward, five backward.
        flops=7 * of.flops,
        bytes=nbytes(avals, avals[:3]),
    )
