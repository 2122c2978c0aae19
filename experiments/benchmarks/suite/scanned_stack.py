"""Pre-norm feed-forward layers under nn.scan with rematerialized bodies, as deep models are compiled once per layer."""

import flax.linen as nn

from experiments.benchmarks.program import Program, scaled
from experiments.benchmarks.suite._data import linen_program, normal


class Layer(nn.Module):
    """`x + W2 gelu(W1 norm(x))` in the form of a scan body."""

    width: int

    @nn.compact
    def __call__(self, x, _):
        y = nn.gelu(nn.Dense(2 * self.width)(nn.LayerNorm()(x)))
        return x + nn.Dense(self.width)(y), None


class ScannedStack(nn.Module):
    """`layers` of them, their parameters stacked on axis 0."""

    width: int
    layers: int = 6

    @nn.compact
    def __call__(self, x):
        # prevent_cse only guards against merging across iterations, which a scan does not do
        body = nn.remat(Layer, prevent_cse=False)
        stack = nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
        return stack(self.width)(x, None)[0]


def build(seed, scale=1.0):
    """The program's callable and its arguments, see `Program`."""
    width = scaled(256, scale)
    return linen_program(ScannedStack(width), seed, normal(seed, scaled(96, scale), width))


PROGRAM = Program("scanned_stack", build)
