"""nn.RNN over an OptimizedLSTMCell: small products and gates inside a scan."""

import flax.linen as nn

from experiments.benchmarks.program import Program, scaled
from experiments.benchmarks.suite._data import linen_program, normal


def build(seed, scale=1.0):
    """The program's callable and its arguments, see `Program`."""
    width = scaled(128, scale)
    return linen_program(nn.RNN(nn.OptimizedLSTMCell(width)), seed, normal(seed, scaled(32, scale), 32, width))


PROGRAM = Program("lstm", build)
