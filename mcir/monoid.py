"""Reductions as monoids: what lets a global reduction take in one tile after the other, in any grouping.

A monoid has an empty state, a `lift` of one tile, and an associative `combine`; laws that the tests check:

- identity: ``combine(empty, s) = s = combine(s, empty)``
- associativity: ``combine(combine(a, b), c) = combine(a, combine(b, c))``
- split-invariance: however a sequence is cut into tiles, lifting and combining gives the state of the whole.

`Rescaled` is what makes softmax streamable: ``exp`` turns the shift of a running maximum into a factor, and the factor
distributes over the sums. Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018;
Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979 (`Moments`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from mcir.operations import empty_value, shifted_exp

State = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Simple:
    """``sum``, ``max`` or ``min`` of one value."""

    kind: str

    def empty(self, shape: Sequence[int], dtype: Any) -> State:
        return (jnp.full(shape, empty_value(self.kind, dtype)),)

    def lift(self, x: Any, axis: Any) -> State:
        return ({"sum": jnp.sum, "max": jnp.max, "min": jnp.min}[self.kind](x, axis=axis),)

    def combine(self, a: State, b: State) -> State:
        return ({"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}[self.kind](a[0], b[0]),)


@dataclasses.dataclass(frozen=True)
class Rescaled:
    """``(m, s_1, ..., s_n)``: the maximum of x and sums ``sum_j exp(base (x_j - m)) w_j`` relative to it.

    ``combine``: with ``M = max(m_a, m_b)``, each sum is multiplied by ``exp(base (m - M))`` and added. -inf maxima
    (nothing seen, or everything masked) combine without NaN.
    """

    base: float = 1.0

    def empty(self, shape: Sequence[int], weights: Sequence[Sequence[int]], dtype: Any) -> State:
        return (jnp.full(shape, empty_value("max", dtype)), *(jnp.zeros((*shape, *w), dtype) for w in weights))

    def lift(self, x: Any, *weights: Any) -> State:
        """One tile: scores ``x[..., j]`` and weights ``w[..., j]`` or ``w[..., j, e]``."""
        m = jnp.max(x, axis=-1)
        p = shifted_exp(x, m[..., None], self.base)
        sums = (jnp.sum(p * w, axis=-1) if w.ndim == x.ndim else jnp.einsum("...j,...je->...e", p, w) for w in weights)
        return (m, *sums)

    def combine(self, a: State, b: State) -> State:
        m = jnp.maximum(a[0], b[0])
        ca, cb = (shifted_exp(s[0], m, self.base) for s in (a, b))
        return (m, *(_times(x, ca) + _times(y, cb) for x, y in zip(a[1:], b[1:], strict=True)))


def _times(x: Any, c: Any) -> Any:
    return x * c.reshape(c.shape + (1,) * (x.ndim - c.ndim))


@dataclasses.dataclass(frozen=True)
class Moments:
    """``(n, mean, M2)``: count, mean and sum of squared deviations.

    ``combine``: with ``d = mean_b - mean_a`` and ``n = n_a + n_b``, ``mean = mean_a + d n_b / n`` and
    ``M2 = M2_a + M2_b + d^2 n_a n_b / n``.
    """

    def empty(self, shape: Sequence[int], dtype: Any) -> State:
        zero = jnp.zeros(shape, dtype)
        return zero, zero, zero

    def lift(self, x: Any, axis: int, valid: Any = None) -> State:
        """One tile; `valid` marks the elements that count (all by default)."""
        ones = jnp.ones_like(x) if valid is None else jnp.broadcast_to(valid, x.shape).astype(x.dtype)
        n = jnp.sum(ones, axis=axis)
        mean = jnp.sum(jnp.where(ones > 0, x, 0), axis=axis) / jnp.maximum(n, 1)
        deviation = jnp.where(ones > 0, x - jnp.expand_dims(mean, axis), 0)
        return n, mean, jnp.sum(deviation * deviation, axis=axis)

    def combine(self, a: State, b: State) -> State:
        n = a[0] + b[0]
        share = b[0] / jnp.maximum(n, 1)
        # Where one side is empty nothing is added. In this order, for d * d may overflow where its factor is 0.
        d = jnp.where(b[0] > 0, b[1] - a[1], 0)
        return n, a[1] + d * share, a[2] + b[2] + d * (d * (a[0] * share))
