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

        2 (L u_float32 + R u_dtype),   R = 0 for float32.

    It is relative to the largest entry, not to the sum of magnitudes: cancellation is not in the formula. The room for
    it is the gap between the worst case n u and the usual sqrt(n) u, about sqrt(L) = 20 here.
    """
    widths = (NUM_FEATURES, *config.hidden, NUM_CLASSES)
    reduction_length = sum(widths[:-1]) + sum(widths[2:]) + config.batch_size // HALVES
    roundings = 0 if dtype == "float32" else 6 * (len(widths) - 1)
    return 2 * (reduction_length * unit_roundoff("float32") + roundings * unit_roundoff(dtype))


def relative_difference(expected, actual) -> jax.Array:
    """max over leaves of max|actual - expected| / max|expected|; inf where `actual` is not finite; a scalar.

    A leaf that is zero up to rounding beside the largest one is measured against the rounding of that one. Where
    `expected` is itself not finite there is nothing to compare with, and the result is 0.
    """
    sizes = [jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(expected)]
    gaps = [jnp.max(jnp.abs(a - e)) for e, a in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True)]
    sizes, gaps = jnp.stack(sizes), jnp.stack(gaps)
    floor = jnp.max(sizes) * unit_roundoff("float32") + jnp.finfo(jnp.float32).tiny
    difference = jnp.max(gaps / jnp.maximum(sizes, floor))
    difference = jnp.where(jnp.isfinite(difference), difference, jnp.inf)
    return jnp.where(jnp.all(jnp.isfinite(sizes)), difference, 0.0)


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
