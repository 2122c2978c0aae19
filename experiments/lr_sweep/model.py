"""The swept model and its loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from experiments.lr_sweep.config import SweepConfig
from experiments.lr_sweep.data import NUM_CLASSES, NUM_FEATURES

_ACTIVATIONS = {"relu": nn.relu, "gelu": nn.gelu}


class MLP(nn.Module):
    """Dense layers with an activation between them: (batch, 64) -> logits (batch, 10) in `dtype`.

    Each hidden layer is act(x W + b), the chain that `aicf_jax.fuse` turns into one `gemm_epilogue`. Kernels start
    with variance init_scale / fan_in, biases at zero. Parameters are `param_dtype`, arithmetic is `dtype`.
    """

    hidden: tuple[int, ...] = (128, 64)
    activation: str = "relu"
    init_scale: float = 1.0
    dtype: jnp.dtype = jnp.float32
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel_init = nn.initializers.variance_scaling(self.init_scale, "fan_in", "truncated_normal")
        options = {"dtype": self.dtype, "param_dtype": self.param_dtype, "kernel_init": kernel_init}
        for width in self.hidden:
            x = _ACTIVATIONS[self.activation](nn.Dense(width, **options)(x))
        return nn.Dense(NUM_CLASSES, **options)(x)


def build(config: SweepConfig, dtype: str) -> MLP:
    """The unfused model of a configuration."""
    return MLP(config.hidden, config.activation, config.init_scale, jnp.dtype(dtype))


def init(model: MLP, seed: int) -> dict:
    """Initial variables, float32; always from the unfused model, so both variants start from the same bits."""
    return dict(model.init(jax.random.key(seed), jnp.zeros((1, NUM_FEATURES), jnp.float32)))


def loss_value(name: str, logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over the batch, in float32, of sum_c (logit_c - onehot_c)^2, or of the softmax cross entropy.

    Args: logits (batch, 10) in any float dtype; labels int (batch,).
    """
    logits = logits.astype(jnp.float32)
    if name == "squared_error":
        return jnp.mean(jnp.sum(jnp.square(logits - jax.nn.one_hot(labels, NUM_CLASSES, dtype=jnp.float32)), axis=-1))
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))
