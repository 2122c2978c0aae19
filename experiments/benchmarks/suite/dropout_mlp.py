"""A training step's MLP: dropout after each layer, its key an argument."""

import jax

from experiments.benchmarks.program import Program, scaled
from experiments.benchmarks.suite._data import linen_variables, normal
from experiments.benchmarks.suite._mlp import MLP


def build(seed, scale=1.0):
    """The program's callable and its arguments, see `Program`."""
    width = scaled(512, scale)
    module = MLP(width, dropout=0.1)
    x = normal(seed, scaled(256, scale), width)
    params = linen_variables(module, seed, x)["params"]

    def target(params, x, key):
        return module.apply({"params": params}, x, rngs={"dropout": key})

    return target, (params, x, jax.random.key(seed + 2))


PROGRAM = Program("dropout_mlp", build)
