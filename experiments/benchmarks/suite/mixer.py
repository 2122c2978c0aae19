"""MLP-Mixer (Tolstikhin et al. 2021, arXiv:2105.01601): token mixing is a GEMM between two transposes."""

import flax.linen as nn
import jax.numpy as jnp

from experiments.benchmarks.program import Program, scaled
from experiments.benchmarks.suite._data import linen_program, normal


class MixerBlock(nn.Module):
    """Token mixing, then channel mixing, each a pre-norm two-layer MLP with a residual."""

    tokens_hidden: int
    channels_hidden: int

    @nn.compact
    def __call__(self, x):
        y = jnp.swapaxes(nn.LayerNorm()(x), 1, 2)
        y = nn.Dense(x.shape[1])(nn.gelu(nn.Dense(self.tokens_hidden)(y)))
        x = x + jnp.swapaxes(y, 1, 2)
        y = nn.gelu(nn.Dense(self.channels_hidden)(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[2])(y)


class Mixer(nn.Module):
    """Patches, mixer blocks, mean over tokens, classifier."""

    width: int
    blocks: int = 3
    patch: int = 4
    classes: int = 10

    @nn.compact
    def __call__(self, images):
        size = (self.patch, self.patch)
        x = nn.Conv(self.width, size, strides=size)(images)
        x = x.reshape(x.shape[0], -1, self.width)
        for _ in range(self.blocks):
            x = MixerBlock(self.width // 2, self.width * 2)(x)
        return nn.Dense(self.classes)(jnp.mean(nn.LayerNorm()(x), axis=1))


def build(seed, scale=1.0):
    """The program's callable and its arguments, see `Program`."""
    return linen_program(Mixer(scaled(128, scale)), seed, normal(seed, scaled(8, scale), 32, 32, 3))


PROGRAM = Program("mixer", build)
