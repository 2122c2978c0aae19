"""Gradients of fused and unfused at the same parameters, step by step, and how far rounding may drive them apart."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lr_sweep import model as model_lib
from experiments.lr_sweep import train as train_lib
from experiments.lr_sweep.config import SweepConfig
from experiments.lr_sweep.data import NUM_CLASSES, NUM_FEATURES, Dataset

HALVES = 2


@dataclasses.dataclass(frozen=True)
class GradientAgreement:
    """Relative gradient differences: the largest of each step, of each learning rate, and of all; and their bound."""

    per_step: tuple[float, ...]
    per_rate: tuple[float, ...]
    max_difference: float
    bound: float
    unit_roundoff: float

    @property
    def within_bound(self) -> bool:
        """False also for a difference that is not finite."""
        return self.max_difference <= self.bound


def unit_roundoff(dtype: str) -> float:
    """Largest relative error of rounding to nearest: half the spacing at 1. 2^-24 for float32, 2^-8 for bfloat16."""
    return float(jnp.finfo(dtype).eps) / 2


def bound(config: SweepConfig, dtype: str) -> float:
    """Largest relative difference that rounding explains: unit roundoff x reduction length, for two computations.

    A sum of n products, in any order, is off by at most n u_acc relative to the sum of magnitudes (Higham, Accuracy and
    Stability, 3.1), and every sum is accumulated in float32, fused or not. A gradient passes through
    L = (inputs of every layer: forward) + (outputs of every layer but the first: dX) + (examples: dW, db) terms.
    A narrower compute dtype adds one rounding for each stored array on the way: product, bias and activation of each
    layer forward, their three cotangents backward, R = 6 a layer, each off by at most u. Both variants err, hence 2:

        2 (L u_float32 + R u_dtype) + K,   R = K = 0 for float32.

    It is relative to the norm of the gradient, not to that of the magnitudes summed: cancellation is not in the
    formula. The room for it is the gap between the worst case n u and the usual sqrt(n) u, about sqrt(L) = 20 here.

    K is for ReLU in a narrower dtype. A pre-activation of unit spread lies within its 3 roundings of the kink with
    probability p = 3 u (a normal density is below 1/2, on two sides), and there the two variants may pick different
    subgradients, 0 and 1. A share p of the entries of dZ that changes wholly moves its 2-norm by sqrt(p); K sums that
    over the hidden layers. In float32 p is 1e-7, too rare to meet in both halves of a batch (see `make_comparer`).
    """
    widths = (NUM_FEATURES, *config.hidden, NUM_CLASSES)
    reduction_length = sum(widths[:-1]) + sum(widths[2:]) + config.batch_size // HALVES
    limit = 2 * reduction_length * unit_roundoff("float32")
    if dtype == "float32":
        return limit
    limit += 2 * 6 * (len(widths) - 1) * unit_roundoff(dtype)
    kinks = len(config.hidden) if config.activation == "relu" else 0
    return limit + kinks * math.sqrt(3 * unit_roundoff(dtype))


def relative_difference(expected, actual) -> jax.Array:
    """Max over leaves of ||actual - expected||_2 / ||expected||_2, a scalar; inf where `actual` is not finite.

    A leaf that is zero up to rounding beside the largest one is measured against the rounding of that one. Where
    `expected` is itself not finite there is nothing to compare with, and the result is 0.
    """
    expected, actual = jax.tree.leaves(expected), jax.tree.leaves(actual)
    # Divided by the largest entry before squaring: gradients of a member about to diverge would overflow.
    scale = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in expected]))
    safe = jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)
    sizes = jnp.stack([_norm(leaf / safe) for leaf in expected])
    gaps = jnp.stack([_norm(a / safe - e / safe) for e, a in zip(expected, actual, strict=True)])
    difference = jnp.max(gaps / jnp.maximum(sizes, unit_roundoff("float32")))
    difference = jnp.where(jnp.isfinite(difference), difference, jnp.inf)
    return jnp.where(jnp.isfinite(scale), difference, 0.0)


def _norm(leaf: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(leaf)))


def make_comparer(config: SweepConfig, unfused: train_lib.Apply, fused: train_lib.Apply) -> Callable:
    """A compiled `(visited (M, N, ...), features, labels, indices (N, batch)) -> differences (N, M)`.

    `visited` are the parameters that the unfused run had before each of its first N steps, so both gradients are taken
    at the same ones. Each batch is compared as two halves and the smaller difference counts: a pre-activation within
    rounding of a ReLU's kink may fall to either side, and either subgradient of that one example is right; it sits in
    one half, while a wrong rule shows in both.
    """

    def gradient_of(apply, variables, x, labels):
        return jax.grad(lambda v: model_lib.loss_value(config.loss, apply(v, x), labels))(variables)

    def member(variables, x, labels):
        def of_half(half_x, half_labels):
            expected = gradient_of(unfused, variables, half_x, half_labels)
            return relative_difference(expected, gradient_of(fused, variables, half_x, half_labels))

        return jnp.min(jax.vmap(of_half)(x, labels))

    @jax.jit
    def compare(visited, features, labels, indices):
        def body(_, inputs):
            variables, index = inputs
            index = index.reshape(HALVES, -1)
            return None, jax.vmap(member, in_axes=(0, None, None))(variables, features[index], labels[index])

        by_step = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), visited)
        return jax.lax.scan(body, None, (by_step, indices))[1]

    return compare


def run_comparer(
    comparer: Callable,
    config: SweepConfig,
    dtype: str,
    visited: dict,
    data: Dataset,
    indices: np.ndarray,
    unfused: train_lib.Outcome,
) -> GradientAgreement:
    """Compare in the first `gradient_steps` steps, each member only until its unfused run goes bad."""
    steps = config.gradient_steps
    differences = np.asarray(comparer(visited, data.train_features, data.train_labels, indices[:steps]))
    last = np.asarray([math.inf if member is None else member.step for member in unfused.diverged])
    differences = np.where(np.arange(steps)[:, None] < last, differences, 0.0)
    return GradientAgreement(
        tuple(float(value) for value in differences.max(axis=1)),
        tuple(float(value) for value in differences.max(axis=0)),
        float(differences.max()),
        bound(config, dtype),
        unit_roundoff(dtype),
    )
