"""Three layers of Dense and tanh-GELU: the activation costs about as much as the products."""

import flax.linen as nn

from experiments.benchmarks.program import Program, scaled
from experiments.benchmarks.suite._data import linen_program, normal
from experiments.benchmarks.suite._mlp import MLP


def build(seed, scale=1.0):
    """The program's callable and its arguments, see `Program`."""
    width = scaled(512, scale)
    return linen_program(MLP(width, activation=nn.gelu), seed, normal(seed, scaled(256, scale), width))


PROGRAM = Program("mlp_gelu", build)
