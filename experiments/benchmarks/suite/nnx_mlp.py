"""Three layers of nnx Linear and relu, split into graph and state: the parameters are an nnx state tree."""

import jax
from flax import nnx

from experiments.benchmarks.program import Program, scaled
from experiments.benchmarks.suite._data import normal, random_leaves


class MLP(nnx.Module):
    """The nnx twin of the linen MLP."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.first = nnx.Linear(width, width, rngs=rngs)
        self.second = nnx.Linear(width, width, rngs=rngs)
        self.third = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in (self.first, self.second, self.third):
            x = nnx.relu(layer(x))
        return x


def build(seed, scale=1.0):
    """The program's callable and its arguments, see `Program`."""
    width = scaled(512, scale)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: MLP(width, nnx.Rngs(seed))))

    def target(state, x):
        return nnx.merge(graph, state)(x)

    return target, (random_leaves(shapes, seed + 1), normal(seed, scaled(256, scale), width))


PROGRAM = Program("nnx_mlp", build)
