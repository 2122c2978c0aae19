"""The GPT block stack: embedding, pre-norm blocks, untied head, softmax cross-entropy over a vocabulary."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.benchmarks.suite._data import linen_variables


@dataclass(frozen=True)
class Stack:
    """Sizes of a stack. Raises ValueError when one is not positive or the heads do not divide the width.

    `dtype` is that of the arithmetic; parameters are float32.
    """

    layers: int = 4
    width: int = 512
    heads: int = 8
    length: int = 1024
    vocabulary: int = 16384
    batch: int = 2
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.length, self.vocabulary, self.batch) < 1:
            raise ValueError(f"sizes of a stack must be at least 1, found {self}; correct the one that is not")
        if self.width % self.heads:
            raise ValueError(f"heads must divide width, found {self}; change either")


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + W2 gelu(W1 norm(x))`."""

    heads: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        norm, dense = functools.partial(nn.LayerNorm, dtype=self.dtype), functools.partial(nn.Dense, dtype=self.dtype)
        x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(norm()(x), mask=mask)
        return x + dense(x.shape[-1])(nn.gelu(dense(4 * x.shape[-1])(norm()(x))))


class GPT(nn.Module):
    """Tokens (B, S) int32 -> logits (B, S, vocabulary) in the stack's dtype."""

    stack: Stack

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        sizes, dtype = self.stack, jnp.dtype(self.stack.dtype)
        places = self.param("places", nn.initializers.normal(0.02), (sizes.length, sizes.width))
        x = nn.Embed(sizes.vocabulary, sizes.width, dtype=dtype)(tokens) + places[: tokens.shape[1]].astype(dtype)
        mask = nn.make_causal_mask(tokens)
        for _ in range(sizes.layers):
            x = Block(sizes.heads, dtype)(x, mask)
        return nn.Dense(sizes.vocabulary, use_bias=False, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x))


def build(stack: Stack, seed: int) -> tuple[Callable[..., jax.Array], tuple[Any, ...]]:
    """`(loss, (params, tokens))`: mean cross-entropy of the next token, tokens int32 (B, S + 1), random parameters.

    The loss is part of what is fused: the head and the cross-entropy over the vocabulary belong together.
    """
    model = GPT(stack)
    shape = (stack.batch, stack.length + 1)
    tokens = jnp.asarray(np.random.default_rng(seed).integers(0, stack.vocabulary, shape), jnp.int32)
    params = linen_variables(model, seed, tokens[:, :-1])["params"]

    def loss(params, tokens):
        logits: Any = model.apply({"params": params}, tokens[:, :-1])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    return loss, (params, tokens)


def stack_tolerance(stack: Stack) -> float:
    """Largest relative difference of value and gradients that float32 rounding allows, worst case (n eps, n = chain).

    The chain: per layer the products over the width (four projections), S of the softmax and of its product, W1 and W2
    over width and 4 width, two norms over the width; the head over the width and the vocabulary; the same backward;
    a weight's gradient sums over B S positions.
    """
    layer = 11 * stack.width + 2 * stack.length
    chain = 2 * (stack.layers * layer + stack.width + stack.vocabulary) + stack.batch * stack.length
    return chain * float(jnp.finfo(jnp.float32).eps)
