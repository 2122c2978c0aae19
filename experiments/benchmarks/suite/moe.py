"""Mixture of experts with top-1 routing and one-hot dispatch by einsum (Fedus et al. 2021, arXiv:2101.03961)."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from experiments.benchmarks.program import Program, scaled
from experiments.benchmarks.suite._data import linen_program, normal


class MoE(nn.Module):
    """Each token goes to its best expert, as far as the expert has room; the rest pass through by the residual."""

    width: int
    experts: int = 8

    @nn.compact
    def __call__(self, x):
        tokens = x.shape[0]
        capacity = max(1, 5 * tokens // (4 * self.experts))
        # the router sees the argument itself, so that rounding upstream cannot flip a choice between two programs
        gates = jax.nn.softmax(nn.Dense(self.experts)(x))
        chosen = jax.nn.one_hot(jnp.argmax(gates, axis=-1), self.experts)
        place = jnp.cumsum(chosen, axis=0) * chosen - 1.0
        dispatch = chosen[..., None] * jax.nn.one_hot(place.astype(jnp.int32), capacity)
        combine = dispatch * gates[..., None]

        shape = (self.experts, self.width, 2 * self.width)
        initializer = nn.initializers.lecun_normal(batch_axis=(0,))
        up = self.param("up", initializer, shape)
        down = self.param("down", initializer, (shape[0], shape[2], shape[1]))
        routed = jnp.einsum("tec,td->ecd", dispatch, x)
        hidden = nn.gelu(jnp.einsum("ecd,edh->ech", routed, up))
        return x + jnp.einsum("tec,ecd->td", combine, jnp.einsum("ech,ehd->ecd", hidden, down))


def build(seed, scale=1.0):
    """The program's callable and its arguments, see `Program`."""
    width = scaled(128, scale)
    return linen_program(MoE(width), seed, normal(seed, scaled(512, scale), width))


PROGRAM = Program("moe", build)
