"""A causal pre-norm transformer, 24 unrolled layers of small width: many nodes, little work in each.

The rewrite study measures on it what fusing costs before the first step.
"""

import flax.linen as nn

from experiments.benchmarks.program import Program, scaled
from experiments.benchmarks.suite._data import linen_program, normal

LAYERS = 24


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + W2 gelu(W1 norm(x))`."""

    heads: int

    @nn.compact
    def __call__(self, x, mask):
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
        y = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(y)


class Transformer(nn.Module):
    """`layers` blocks and a last norm over embedded tokens of shape (batch, sequence, width)."""

    heads: int = 4
    layers: int = LAYERS

    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(x[..., 0])
        for _ in range(self.layers):
            x = Block(self.heads)(x, mask)
        return nn.LayerNorm()(x)


def build(seed, scale=1.0):
    """The program's callable and its arguments, see `Program`."""
    return linen_program(Transformer(), seed, normal(seed, 2, scaled(64, scale), scaled(64, scale)))


PROGRAM = Program("transformer_24", build)
