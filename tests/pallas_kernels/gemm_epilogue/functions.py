"""The activations as jax has them: what the kernels' own formulas are held against."""

import jax
import jax.numpy as jnp

FUNCTIONS = {
    "none": lambda z, alpha: z,
    "relu": lambda z, alpha: jax.nn.relu(z),
    "gelu_exact": lambda z, alpha: jax.nn.gelu(z, approximate=False),
    "gelu_tanh": lambda z, alpha: jax.nn.gelu(z, approximate=True),
    "silu": lambda z, alpha: jax.nn.silu(z),
    "tanh": lambda z, alpha: jnp.tanh(z),
    "sigmoid": lambda z, alpha: jax.nn.sigmoid(z),
    "elu": lambda z, alpha: jax.nn.elu(z, alpha),
    "leaky_relu": lambda z, alpha: jax.nn.leaky_relu(z, alpha),
    "softplus": lambda z, alpha: jax.nn.softplus(z),
}
