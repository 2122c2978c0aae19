"""How people write activations. Data for the `activation` rule: one row a spelling.

A spelling is an ordinary function of ``z``. It is traced once per dtype and reduced to an expression; a region of a
user's program with the same expression is that activation. Adding a spelling adds no risk to values: a fused region
evaluates the user's own equations, so all a row decides is the name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.scipy.special import erf, erfc
from jax.scipy.stats import norm


@dataclasses.dataclass(frozen=True)
class Spelling:
    """`function(z)`, or ``function(z, alpha)`` when `parametric`: then any constant in alpha's place is accepted.

    `from_output`: the derivative is a function of the output alone, by the very formula jax uses for this spelling (so
    that NaN and infinity end up in the same places); the composite backward then keeps Y and not Z. `dtypes`: where the
    function is defined.
    """

    activation: str
    function: Callable
    parametric: bool = False
    from_output: bool = False
    dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class NearMiss:
    """Looks like `activation`, is not: the refusal says why."""

    activation: str
    function: Callable
    code: str
    expected: str
    found: str


_C = math.sqrt(2 / math.pi)
_R = math.sqrt(0.5)

SPELLINGS: tuple[Spelling, ...] = (
    Spelling("relu", jax.nn.relu, from_output=True),
    Spelling("tanh", jnp.tanh, from_output=True),
    Spelling("sigmoid", jax.nn.sigmoid, from_output=True),
    Spelling("sigmoid", lambda z: 1 / (1 + jnp.exp(-z))),
    Spelling("gelu_tanh", lambda z: jax.nn.gelu(z, approximate=True)),
    Spelling("gelu_tanh", lambda z: 0.5 * z * (1 + jnp.tanh(_C * (z + 0.044715 * jnp.power(z, 3))))),
    Spelling("gelu_tanh", lambda z: 0.5 * z * (1 + jnp.tanh(_C * (z + 0.044715 * z * z * z)))),
    Spelling("gelu_tanh", lambda z: z * 0.5 * (1 + jnp.tanh(_C * z * (1 + 0.044715 * z * z)))),
    Spelling("gelu_tanh", lambda z: 0.5 * z * (1 + jnp.tanh(z * _C * (1 + 0.044715 * z * z)))),
    Spelling("gelu_exact", lambda z: jax.nn.gelu(z, approximate=False)),
    Spelling("gelu_exact", lambda z: 0.5 * z * (1 + erf(z / math.sqrt(2)))),
    Spelling("gelu_exact", lambda z: z * 0.5 * (1 + erf(z / math.sqrt(2)))),
    Spelling("gelu_exact", lambda z: 0.5 * z * (1 + erf(z * _R))),
    Spelling("gelu_exact", lambda z: z * 0.5 * (1 + erf(z * _R))),
    Spelling("gelu_exact", lambda z: 0.5 * z * erfc(-z * _R)),
    Spelling("gelu_exact", lambda z: z * norm.cdf(z), dtypes=("float64", "float32")),
    Spelling("silu", jax.nn.silu),
    Spelling("silu", lambda z: z * jax.nn.sigmoid(z)),
    Spelling("silu", lambda z: z / (1 + jnp.exp(-z))),
    Spelling("silu", lambda z: z * (1 / (1 + jnp.exp(-z)))),
    Spelling("elu", jax.nn.elu),
    Spelling("elu", jax.nn.elu, parametric=True),
    Spelling("elu", lambda z: jnp.where(z > 0, z, jnp.expm1(z))),
    Spelling("elu", lambda z, alpha: jnp.where(z > 0, z, alpha * jnp.expm1(z)), parametric=True),
    Spelling("leaky_relu", jax.nn.leaky_relu, parametric=True),
    Spelling("leaky_relu", lambda z, alpha: jnp.where(z > 0, z, alpha * z), parametric=True),
    Spelling("softplus", jax.nn.softplus),
    Spelling("softplus", lambda z: jnp.logaddexp(z, 0.0)),
    Spelling("softplus", lambda z: jnp.log1p(jnp.exp(z))),
)

NEAR_MISSES: tuple[NearMiss, ...] = (
    NearMiss(
        "relu",
        lambda z: jnp.maximum(z, 0),
        "tie_gradient",
        "relu: gradient 0 where z = 0",
        "maximum(z, 0): the gradient of a tie is split, 1/2 where z = 0",
    ),
    NearMiss(
        "relu",
        lambda z: jnp.clip(z, 0),
        "tie_gradient",
        "relu: gradient 0 where z = 0",
        "clip(z, 0): the gradient of a tie is split, 1/2 where z = 0",
    ),
)
