"""Reports of several kinds of program, for what shows them: pages, plots, the command line."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

import aicf_jax

F32 = jnp.float32


def struct(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


class Block(nn.Module):
    """A transformer block; its attention streams at this length."""

    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(128)(nn.LayerNorm()(x))))


class Stack(nn.Module):
    """Longer than what is drawn of a program, behind some operations that stay as written."""

    @nn.compact
    def __call__(self, x):
        x = jnp.cumsum(jnp.sin(jnp.abs(x)), 1)
        for _ in range(8):
            x = Block()(x)
        return x


def mlp(x, w1, b1, w2, b2):
    return jax.nn.gelu(x @ w1 + b1) @ w2 + b2


def turned_down(x, w, b):
    z = x @ w + b
    return jax.nn.gelu(z), z, jnp.maximum(x @ w, 0)


def scanned(x, ws):
    return jax.lax.scan(lambda c, w: (jax.nn.relu(c @ w), None), x, ws)[0]


def empty(x):
    return x


def _module(module, x):
    return aicf_jax.explain(module, jax.eval_shape(module.init, jax.random.key(0), x), x)


@functools.cache
def report(kind):
    """``"mlp"``, ``"block"``, ``"long"``, ``"refusals"``, ``"inner"`` or ``"empty"``."""
    match kind:
        case "mlp":
            return aicf_jax.explain(mlp, struct(8, 16), struct(16, 32), struct(32), struct(32, 4), struct(4))
        case "block":
            return _module(Block(), struct(1, 4096, 64))
        case "long":
            return _module(Stack(), struct(1, 64, 64))
        case "refusals":
            return aicf_jax.explain(turned_down, struct(8, 16), struct(16, 4), struct(4))
        case "inner":
            return aicf_jax.explain(scanned, struct(8, 16), struct(3, 16, 16))
    return aicf_jax.explain(empty, struct(8))


KINDS = ("mlp", "block", "long", "refusals", "inner", "empty")
