"""A small vision transformer: patches by a strided convolution, pre-norm blocks, mean over the patches, a head.

Dosovitskiy et al., "An image is worth 16x16 words", 2021.
"""

import flax.linen as nn
import jax.numpy as jnp

from experiments.benchmarks.program import Program, scaled
from experiments.benchmarks.suite._data import linen_program, normal


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + W2 gelu(W1 norm(x))`, without a mask."""

    heads: int

    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x))
        y = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(y)


class ViT(nn.Module):
    """Images (B, H, W, 3) -> logits (B, classes)."""

    width: int
    patch: int = 8
    heads: int = 4
    layers: int = 4
    classes: int = 100

    @nn.compact
    def __call__(self, images):
        size = (self.patch, self.patch)
        x = nn.Conv(self.width, size, strides=size)(images)
        x = x.reshape(x.shape[0], -1, self.width)
        x = x + self.param("places", nn.initializers.normal(0.02), x.shape[1:])
        for _ in range(self.layers):
            x = Block(self.heads)(x)
        return nn.Dense(self.classes)(jnp.mean(nn.LayerNorm()(x), axis=1))


def build(seed, scale=1.0):
    """The program's callable and its arguments, see `Program`."""
    side = 8 * scaled(8, scale)
    return linen_program(ViT(4 * scaled(32, scale)), seed, normal(seed, scaled(8, scale), side, side, 3))


PROGRAM = Program("vit", build)
