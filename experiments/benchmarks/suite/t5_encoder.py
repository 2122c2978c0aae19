"""Encoder blocks as in T5: RMS norms, attention without a scale, a learned bias of relative positions, GeGLU.

Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text transformer", 2020.
"""

import flax.linen as nn
import jax.numpy as jnp

from experiments.benchmarks.program import Program, scaled
from experiments.benchmarks.suite._data import linen_program, normal

BUCKETS = 32


def buckets(length: int) -> jnp.ndarray:
    """(S, S) int32: buckets of ``key - query``, exact up to a quarter of them, logarithmic beyond, signs apart."""
    places = jnp.arange(length)
    distance = places[None, :] - places[:, None]
    half, exact = BUCKETS // 2, BUCKETS // 4
    size = jnp.abs(distance)
    far = exact + (jnp.log(jnp.maximum(size, 1) / exact) / jnp.log(128 / exact) * (half - exact)).astype(jnp.int32)
    return jnp.where(size < exact, size, jnp.minimum(far, half - 1)) + jnp.where(distance > 0, half, 0)


class Block(nn.Module):
    """`x + attention(norm(x), bias)`, then `x + W3 (gelu(W1 n) * W2 n)` with `n = norm(x)`."""

    heads: int

    @nn.compact
    def __call__(self, x, bias):
        width, size = x.shape[-1], x.shape[-1] // self.heads
        y = nn.RMSNorm()(x)
        q, k, v = (nn.DenseGeneral((self.heads, size), use_bias=False)(y) for _ in range(3))
        p = nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias)
        y = jnp.einsum("bhqk,bkhd->bqhd", p, v)
        x = x + nn.DenseGeneral(width, axis=(-2, -1), use_bias=False)(y)
        y = nn.RMSNorm()(x)
        gate, up = (nn.Dense(2 * width, use_bias=False)(y) for _ in range(2))
        return x + nn.Dense(width, use_bias=False)(nn.gelu(gate) * up)


class Encoder(nn.Module):
    """`layers` blocks that share one table of position biases, and a last norm, over (batch, sequence, width)."""

    heads: int = 4
    layers: int = 2

    @nn.compact
    def __call__(self, x):
        table = self.param("table", nn.initializers.normal(0.02), (self.heads, BUCKETS))
        bias = table[:, buckets(x.shape[1])]
        for _ in range(self.layers):
            x = Block(self.heads)(x, bias)
        return nn.RMSNorm()(x)


def build(seed, scale=1.0):
    """The program's callable and its arguments, see `Program`."""
    return linen_program(Encoder(), seed, normal(seed, 2, scaled(128, scale), 8 * scaled(32, scale)))


PROGRAM = Program("t5_encoder", build)
