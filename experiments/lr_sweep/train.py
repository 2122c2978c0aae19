"""Training of all learning rates of a cell in one compiled program, with divergence detection for each member.

A member is one learning rate. Its rate is data, so one program serves every rate and nothing is traced again; members
are rows of a `jax.vmap`, so a row of NaN stays a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.lr_sweep import model as model_lib
from experiments.lr_sweep.config import SweepConfig
from experiments.lr_sweep.data import Dataset

KINDS = ("blow-up", "inf", "nan")  # by severity
NEVER = -1

Apply = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Divergence:
    """How a member went wrong: `step` is its first bad step, `kind` the worst it showed, `first` the step of each kind.

    Step t means that the loss or the gradient at step t (0-based, before its update) was bad; t = steps that the final
    parameters were.
    """

    step: int
    kind: str
    first: dict[str, int]

    @classmethod
    def from_steps(cls, steps: np.ndarray) -> Divergence | None:
        """From the first step of each of KINDS (NEVER where it did not occur); None if none did."""
        first = {kind: int(step) for kind, step in zip(KINDS, steps, strict=True) if step != NEVER}
        if not first:
            return None
        return cls(min(first.values()), next(kind for kind in reversed(KINDS) if kind in first), first)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one variant reached, a value for each learning rate: loss and accuracy on the test part after training."""

    initial_loss: float
    loss: tuple[float, ...]
    accuracy: tuple[float, ...]
    diverged: tuple[Divergence | None, ...]


def optimizer(name: str, momentum: float) -> optax.GradientTransformation:
    """The optimizer at learning rate 1 and before the sign: the step is params - rate * update.

    The rate is applied by hand because it is an array, one for each member; `optax.inject_hyperparams` would do the
    same with its own rounding.
    """
    if name == "momentum":
        return optax.trace(decay=momentum)
    return optax.scale_by_adam() if name == "adam" else optax.identity()


def apply_update(params, updates, learning_rate: jax.Array):
    """Params - learning_rate * updates, leaf by leaf, in float32."""
    return jax.tree.map(lambda value, update: value - learning_rate * update, params, updates)


def replicate(tree, count: int):
    """`count` copies of every leaf: (...) becomes (count, ...)."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), tree)


def signs_of_divergence(loss: jax.Array, gradient, initial_loss: jax.Array, blow_up: float) -> jax.Array:
    """Whether one member shows each of KINDS now, bool (3,), from its loss (scalar) and its gradient (any tree)."""
    # A maximum keeps a NaN, and an inf where there is no NaN: one reduction of each leaf tells both.
    sizes = jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves((loss, gradient))])
    return jnp.stack([loss > blow_up * initial_loss, jnp.any(jnp.isinf(sizes)), jnp.any(jnp.isnan(sizes))])


def note_first(first: jax.Array, signs: jax.Array, step: jax.Array | int) -> jax.Array:
    """`first` (3,) with `step` entered for each sign that is set for the first time."""
    return jnp.where((first == NEVER) & signs, step, first)


def make_trainer(config: SweepConfig, optimizer_name: str, apply: Apply) -> Callable:
    """A compiled `(variables, learning_rates (M,), train and test arrays, indices (steps, batch)) -> dict of (M, ...)`.

    One `lax.scan` over the steps whose body is a `vmap` over the M members. A diverged member is not stopped: what it
    would really have done is the result, and it costs nothing. Among the results is "visited": the parameters before
    each of the first `gradient_steps` steps, leaves (M, gradient_steps, ...), for the comparison of gradients.
    """
    transform = optimizer(optimizer_name, config.momentum)

    def loss_of(variables, x, labels):
        return model_lib.loss_value(config.loss, apply(variables, x), labels)

    def member_step(carry, learning_rate, x, labels, step):
        variables, state, initial_loss, first, visited = carry
        # Steps beyond the recorded ones all fall into one spare row.
        row = jnp.minimum(step, config.gradient_steps)
        visited = jax.tree.map(lambda rows, value: rows.at[row].set(value), visited, variables)
        loss, gradient = jax.value_and_grad(loss_of)(variables, x, labels)
        initial_loss = jnp.where(step == 0, loss, initial_loss)
        first = note_first(first, signs_of_divergence(loss, gradient, initial_loss, config.blow_up), step)
        updates, state = transform.update(gradient, state, variables)
        return apply_update(variables, updates, learning_rate), state, initial_loss, first, visited

    def member_end(carry, x, labels):
        variables, _, initial_loss, first, visited = carry
        logits = apply(variables, x)
        loss = model_lib.loss_value(config.loss, logits, labels)
        first = note_first(first, signs_of_divergence(loss, variables, initial_loss, config.blow_up), config.steps)
        # argmax of a row with NaN is an arbitrary class, which would score as a guess.
        correct = (jnp.argmax(logits, axis=-1) == labels) & jnp.all(jnp.isfinite(logits), axis=-1)
        accuracy = jnp.mean(correct.astype(jnp.float32))
        visited = jax.tree.map(lambda rows: rows[:-1], visited)
        return {
            "initial_loss": initial_loss,
            "loss": loss,
            "accuracy": accuracy,
            "first": first,
            "visited": visited,
        }

    @jax.jit
    def train(variables, learning_rates, train_features, train_labels, test_features, test_labels, indices):
        def body(carry, inputs):
            step, index = inputs
            in_axes = (0, 0, None, None, None)
            step_all = jax.vmap(member_step, in_axes=in_axes)
            return step_all(carry, learning_rates, train_features[index], train_labels[index], step), None

        visited = replicate(variables, config.gradient_steps + 1)
        first = jnp.full(len(KINDS), NEVER, jnp.int32)
        start = replicate((variables, transform.init(variables), jnp.float32(0), first, visited), len(learning_rates))
        end, _ = jax.lax.scan(body, start, (jnp.arange(len(indices), dtype=jnp.int32), indices))
        return jax.vmap(member_end, in_axes=(0, None, None))(end, test_features, test_labels)

    return train


def run_trainer(
    trainer: Callable, config: SweepConfig, variables: dict, data: Dataset, indices: np.ndarray
) -> tuple[Outcome, dict]:
    """Train every learning rate: the outcome, and the parameters visited in the first steps (see `make_trainer`)."""
    rates = jnp.asarray(config.learning_rates, jnp.float32)
    arrays = (data.train_features, data.train_labels, data.test_features, data.test_labels)
    result = jax.device_get(trainer(variables, rates, *arrays, indices))
    outcome = Outcome(
        float(result["initial_loss"][0]),
        tuple(float(value) for value in result["loss"]),
        tuple(float(value) for value in result["accuracy"]),
        tuple(Divergence.from_steps(steps) for steps in result["first"]),
    )
    return outcome, result["visited"]
