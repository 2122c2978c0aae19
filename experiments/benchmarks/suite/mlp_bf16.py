"""Three layers of Dense and relu computed in bfloat16 on float32 parameters, as mixed-precision training does."""

import jax.numpy as jnp

from experiments.benchmarks.program import Program, scaled
from experiments.benchmarks.suite._data import linen_program, normal
from experiments.benchmarks.suite._mlp import MLP


def build(seed, scale=1.0):
    """The program's callable and its arguments, see `Program`."""
    width = scaled(512, scale)
    x = normal(seed, scaled(256, scale), width, dtype=jnp.bfloat16)
    return linen_program(MLP(width, dtype=jnp.bfloat16), seed, x)


# three layers forward and back, product and bias each rounded once
PROGRAM = Program("mlp_bf16", build, compute_dtype="bfloat16", roundings=12)
