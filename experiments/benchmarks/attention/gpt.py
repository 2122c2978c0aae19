"""The GPT block stack: embedding, pre-norm blocks, untied head, softmax cross-entropy over a vocabulary."""

from __future__ import annotations

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
    """Sizes of a stack. Raises ValueError when one is not positive or the heads do not divide the width."""

    layers: int = 4
    width: int = 512
    heads: int = 8
    length: int = 1024
    vocabulary: int = 16384
    batch: int = 2

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.length, self.vocabulary, self.batch) < 1:
            raise ValueError(f"sizes of a stack must be at least 1, found {self}; correct the one that is not")
        if self.width % self.heads:
            raise ValueError(f"heads must divide width, found {self}; change either")


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + W2 gelu(W1 norm(x))`."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
        y = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(y)


class GPT(nn.Module):
    """Tokens (B, S) int32 -> logits (B, S, vocabulary) float32."""

    stack: Stack

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        sizes = self.stack
        places = self.param("places", nn.initializers.normal(0.02), (sizes.length, sizes.width))
        x = nn.Embed(sizes.vocabulary, sizes.width)(tokens) + places[: tokens.shape[1]]
        mask = nn.make_causal_mask(tokens)
        for _ in range(sizes.layers):
            x = Block(sizes.heads)(x, mask)
        return nn.Dense(sizes.vocabulary, use_bias=False)(nn.LayerNorm()(x))


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
