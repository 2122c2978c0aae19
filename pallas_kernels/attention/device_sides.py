"""Attention with arrays beside the scores, and of few queries, as `DeviceCase`s."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import reference
from pallas_kernels.attention.backward import backward
from pallas_kernels.attention.dropout import Bernoulli
from pallas_kernels.attention.forward import forward
from pallas_kernels.device_case import DeviceCase, nbytes, tolerance

#: What programs in float32 fill with.
_LOWEST = float(jnp.finfo(jnp.float32).min)

_DROPOUT, _KEPT = ("dropout", "shared dropout"), 0.9


@dataclasses.dataclass(frozen=True)
class Beside:
    """Attention in bfloat16 with a scale of ``1 / sqrt(D)``; causal up to the last key.

    `beside`: some of ``"padding"`` (of the last quarter of the keys on average), ``"segments"`` (eight, side by side),
    ``"mask"`` (of each batch, half of it), ``"bias"`` (float32, of each head), ``"dropout"`` (of a tenth of the
    weights, drawn in the kernel) and ``"shared dropout"`` (from an array that all batches and heads share).
    """

    batch: int
    queries: int
    keys: int
    heads: int
    head_dim: int
    beside: tuple[str, ...]
    kv_heads: int | None = None
    causal: bool = False
    fill: float = -math.inf

    def __str__(self) -> str:
        kind = " ".join([*self.beside, *(["causal"] if self.causal else [])])
        shared = "" if self.kv_heads in (None, self.heads) else f" K{self.kv_heads}"
        return f"{kind} B{self.batch} S{self.queries} T{self.keys} H{self.heads}{shared} D{self.head_dim}".strip()

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the kernels."""
        upper = self.keys - self.queries if self.causal else None
        drops = any(name in self.beside for name in _DROPOUT)
        return {
            "scale": self.head_dim**-0.5,
            "upper": upper,
            "fill": self.fill,
            "keep_factor": 1 / _KEPT if drops else 1.0,
        }

    @property
    def flops(self) -> int:
        """Of one product for what limits leave."""
        pairs = reference.seen(self.queries, self.keys, None, self.options["upper"]).sum()
        return 2 * self.batch * self.heads * self.head_dim * int(pairs)

    def arrays(self, key: jax.Array, *more: tuple[int, int]) -> tuple[Any, ...]:
        """Random Q, K and V, arrays of so many rows and heads, and what is beside the scores."""
        kv_heads = self.kv_heads or self.heads
        kinds = ((self.queries, self.heads), (self.keys, kv_heads), (self.keys, kv_heads), *more)
        parts = jax.random.split(key, len(kinds) + len(self.beside))
        found = (
            jax.random.normal(part, (self.batch, length, n, self.head_dim)).astype("bfloat16")
            for part, (length, n) in zip(parts, kinds, strict=False)
        )
        return *found, *(self._made(name, part) for name, part in zip(self.beside, parts[len(kinds) :], strict=True))

    def _made(self, name: str, key: jax.Array) -> jax.Array:
        batch, queries, keys = self.batch, self.queries, self.keys
        if name == "padding":
            return (jnp.arange(keys) >= jax.random.randint(key, (batch, 1, 1), keys // 2, keys)).astype(jnp.int32)
        if name == "segments":
            return jnp.broadcast_to(jnp.arange(keys, dtype=jnp.int32) // -(-keys // 8), (batch, 1, keys))
        if name == "mask":
            # Each query sees the first key.
            return jax.random.bernoulli(key, 0.5, (batch, 1, queries, keys)).at[..., 0].set(True)
        if name == "dropout":
            return jax.random.key_data(key)
        if name == "shared dropout":
            return jax.random.bernoulli(key, jnp.float32(_KEPT), (1, 1, queries, keys))
        return jax.random.normal(key, (1, self.heads, queries, keys))

    def described(self, values: tuple[Any, ...]) -> dict[str, Any]:
        """Arrays beside the scores as the kernels take them."""
        given = dict(zip(self.beside, values, strict=True))
        segments = [(None, given["padding"])] if "padding" in given else []
        if "segments" in given:
            segments.append((given["segments"][..., self.keys - self.queries :], given["segments"]))
        found = {"segments": segments, **{n: given[n] for n in ("mask", "bias") if n in given}}
        if "dropout" in given:
            found["keep"] = Bernoulli(given["dropout"], _KEPT, (self.batch, self.heads, self.queries, self.keys))
        elif "shared dropout" in given:
            found["keep"] = given["shared dropout"]
        return found

    def unfused(self, q: Any, k: Any, v: Any, *values: Any) -> Any:
        """By `jax.nn`, which has no dropout: with it by the equations themselves, in float32 between the products."""
        given = self.described(values)
        limits = self.queries, self.keys, None, self.options["upper"]
        mask = reference.visible(*limits, given["segments"], given.get("mask"))
        if "keep" in given:
            k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
            x = jnp.einsum("bshd,bthd->bhst", q, k, preferred_element_type=jnp.float32) * self.options["scale"]
            w = jax.nn.softmax(jnp.where(mask, x, self.fill), axis=-1)
            w = jnp.where(reference.kept(given["keep"]), w / _KEPT, 0.0).astype(v.dtype)
            return jnp.einsum("bhst,bthd->bshd", w, v)
        return jax.nn.dot_product_attention(q, k, v, given.get("bias"), mask)


def beside_case(of: Beside) -> DeviceCase:
    """Forward."""

    def exact(q: Any, k: Any, v: Any, *values: Any) -> tuple[Any, ...]:
        return reference.forward(q, k, v, **of.described(values), **of.options, dtype=jnp.float64)[:1]

    avals = jax.eval_shape(of.arrays, jax.eval_shape(lambda: jax.random.key(0)))
    return DeviceCase(
        name=str(of),
        arrays=of.arrays,
        kernel=lambda q, k, v, *values: forward(q, k, v, **of.described(values), **of.options),
        unfused=lambda *args: (of.unfused(*args),),
        reference=exact,
        # Weights are rounded before the second product, which sums as many terms as there are keys.
        tolerances=(tolerance("bfloat16", of.keys) + float(jnp.finfo("bfloat16").eps),),
        flops=2 * of.flops,
        bytes=nbytes(avals, avals[0]),
    )


def beside_gradient_case(of: Beside) -> DeviceCase:
    """Forward and backward, to dQ, dK, dV and the gradient of a bias."""
    of = dataclasses.replace(of, fill=_LOWEST)
    biases = tuple(n for n in of.beside if n == "bias")

    def arrays(key: jax.Array) -> tuple[Any, ...]:
        return of.arrays(key, (of.queries, of.heads))

    def kernel(q: Any, k: Any, v: Any, dout: Any, *values: Any) -> tuple[Any, ...]:
        beside = of.described(values)
        out, m, total = forward(q, k, v, **beside, **of.options, with_statistics=True)
        return backward(q, k, v, out, m, total, dout, **beside, **of.options, wanted=biases)

    def unfused(q: Any, k: Any, v: Any, dout: Any, *values: Any) -> tuple[Any, ...]:
        moving = [i for i, name in enumerate(of.beside) if name == "bias"]

        def f(q: Any, k: Any, v: Any, *biases: Any) -> Any:
            given = list(values)
            for i, x in zip(moving, biases, strict=True):
                given[i] = x
            return of.unfused(q, k, v, *given)

        return jax.vjp(f, q, k, v, *(values[i] for i in moving))[1](dout)

    def exact(q: Any, k: Any, v: Any, dout: Any, *values: Any) -> tuple[Any, ...]:
        found = reference.backward(q, k, v, dout, **of.described(values), **of.options, dtype=jnp.float64)
        return tuple(x for x in found if x is not None)

    avals = jax.eval_shape(arrays, jax.eval_shape(lambda: jax.random.key(0)))
    rounding = float(jnp.finfo("bfloat16").eps)
    shares = of.heads // (of.kv_heads or of.heads)
    # Gradients of scores are rounded like weights, before products of as many terms as there are rows; O is, too.
    error = tolerance("bfloat16", max(of.queries * shares, of.keys)) + 3 * rounding
    return DeviceCase(
        name=f"{of} gradients",
        arrays=arrays,
        kernel=kernel,
        unfused=unfused,
        reference=exact,
        tolerances=(error,) * (3 + len(biases)),
        # Two products forward, five backward, and two for the gradient of a bias.
        flops=(7 + 2 * len(biases)) * of.flops,
        bytes=nbytes(avals, avals[:3], [avals[4 + of.beside.index(n)] for n in biases]),
    )
