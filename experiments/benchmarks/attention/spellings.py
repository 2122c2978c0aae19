"""Causal attention as users write it with flax and with jax, and its two modes.

With q, k, v and out of shape (B, S, H, D): out_i = sum_{j <= i} p_ij v_j, p_i = softmax_j(q_i . k_j / sqrt(D)).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from experiments.benchmarks.suite._data import normal

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

MODES = ("forward", "grad")


def flax_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The function of flax with its mask made inside: (1, 1, S, S) elements exist only if the compiler stores them."""
    return nn.dot_product_attention(q, k, v, mask=nn.make_causal_mask(jnp.ones(q.shape[:2], q.dtype)))


def jax_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The function of jax with its own causal flag."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


SPELLINGS: dict[str, Attention] = {"flax": flax_attention, "jax_nn": jax_attention}


def attention_args(length: int, heads: int, head_dim: int, seed: int) -> tuple[jax.Array, ...]:
    """Query, key, value and cotangent of the output, each standard normal float32 (1, length, heads, head_dim)."""
    return tuple(normal(seed + number, 1, length, heads, head_dim) for number in range(4))


def attention_step(attention: Attention, mode: str) -> Callable[..., Any]:
    """The function of `(q, k, v, cotangent)` that is timed.

    `forward`: the output. `grad`: the gradient of `sum(out * cotangent)` with respect to q, k and v. The output itself
    is not returned then, so a compiler may leave its last product out; a fused program computes it all the same.

    Raises ValueError for another mode.
    """
    if mode == "forward":
        return lambda q, k, v, cotangent: attention(q, k, v)
    if mode == "grad":
        return jax.grad(lambda q, k, v, cotangent: jnp.sum(attention(q, k, v) * cotangent), argnums=(0, 1, 2))
    raise ValueError(f"mode of attention must be one of {MODES}, found {mode!r}; correct its spelling")


def attention_tolerance(length: int, head_dim: int) -> float:
    """Largest relative difference that float32 rounding allows between two orders of summation, worst case.

    A sum of n terms in two orders differs by at most n eps. Scores are sums of D products whose sizes add up to about
    sqrt(D) after the scale, so p is off by D^1.5 eps; the softmax, p v, and backward dp . p, ds k and ds^T q are sums
    of S: (D^1.5 + 4 S) eps. Random data stays near the square root of it.
    """
    return (head_dim**1.5 + 4 * length) * float(jnp.finfo(jnp.float32).eps)
