"""The multilayer perceptron that several programs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class MLP(nn.Module):
    """`layers` times Dense and activation, all of one width."""

    width: int
    layers: int = 3
    activation: Callable[[jax.Array], jax.Array] = nn.relu
    dtype: Any = jnp.float32
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.layers):
            x = self.activation(nn.Dense(self.width, dtype=self.dtype)(x))
            if self.dropout:
                x = nn.Dropout(self.dropout, deterministic=False)(x)
        return x
