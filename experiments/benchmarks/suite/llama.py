"""Blocks as in llama: RMS norms, rotary positions, grouped queries, SwiGLU; no biases.

Touvron et al., "LLaMA: open and efficient foundation language models", 2023.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from experiments.benchmarks.program import Program, scaled
from experiments.benchmarks.suite._data import linen_program, normal


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions on (B, S, H, D): pairs ``(x_k, x_{k + D/2})`` turned by ``s 10000^(-2k/D)``."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-jnp.arange(half, dtype=x.dtype) / half)
    angles = jnp.arange(x.shape[1], dtype=x.dtype)[:, None] * rates
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + W3 (silu(W1 n) * W2 n)` with `n = norm(x)`."""

    heads: int
    groups: int

    @nn.compact
    def __call__(self, x):
        width, size = x.shape[-1], x.shape[-1] // self.heads
        y = nn.RMSNorm()(x)
        q = rotated(nn.DenseGeneral((self.heads, size), use_bias=False)(y))
        k = rotated(nn.DenseGeneral((self.groups, size), use_bias=False)(y))
        v = nn.DenseGeneral((self.groups, size), use_bias=False)(y)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + nn.DenseGeneral(width, axis=(-2, -1), use_bias=False)(y)
        y = nn.RMSNorm()(x)
        gate, up = (nn.Dense(3 * width, use_bias=False)(y) for _ in range(2))
        return x + nn.Dense(width, use_bias=False)(nn.silu(gate) * up)


class Llama(nn.Module):
    """`layers` blocks and a last norm over embedded tokens of shape (batch, sequence, width)."""

    heads: int = 8
    groups: int = 2
    layers: int = 2

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers):
            x = Block(self.heads, self.groups)(x)
        return nn.RMSNorm()(x)


def build(seed, scale=1.0):
    """The program's callable and its arguments, see `Program`."""
    return linen_program(Llama(), seed, normal(seed, 2, scaled(128, scale), 16 * scaled(16, scale)))


PROGRAM = Program("llama", build)
