"""Training of both variants in turns, step by step: one machine, one moment, the same batch.

Who goes first changes with every step, because the second finds warm caches. A variant is a train step compiled ahead
of time: loss, gradient, adamw; the causal mask is made inside of it by the model.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.benchmarks.attention.gpt import GPT, Stack
from experiments.benchmarks.compare import relative_difference
from experiments.benchmarks.measure import Compiled, compile_ahead
from experiments.text_lm.config import TextConfig

VARIANTS = ("unfused", "fused")
TRAIN_STREAM, VALIDATION_STREAM = 1, 2

Apply = Callable[..., Any]
Pair = dict[str, Any]


@dataclasses.dataclass
class History:
    """What happened so far, a value for each finished step; pairs are [unfused, fused].

    losses before the update, times_ns, masses (see `agreement`, of the unfused run), gradients (relative differences in
    the first steps), validation ([steps done, unfused, fused]).
    """

    losses: list[list[float]] = dataclasses.field(default_factory=list)
    times_ns: list[list[int]] = dataclasses.field(default_factory=list)
    masses: list[float] = dataclasses.field(default_factory=list)
    gradients: list[float] = dataclasses.field(default_factory=list)
    validation: list[list[float]] = dataclasses.field(default_factory=list)


def build(config: TextConfig, vocabulary: int) -> GPT:
    """The unfused model: the GPT of the benchmarks, in the sizes of this run."""
    return GPT(Stack(config.layers, config.width, config.heads, config.sequence, vocabulary, config.batch))


def schedule(config: TextConfig) -> optax.Schedule:
    """The learning rate by step: linear to the peak, then along a cosine to a tenth of it."""
    rate = config.learning_rate
    return optax.warmup_cosine_decay_schedule(rate / 10, rate, config.warmup, config.steps, rate / 10)


def optimizer(config: TextConfig) -> optax.GradientTransformation:
    """The optimizer of both variants."""
    return optax.adamw(schedule(config), weight_decay=config.weight_decay)


def loss_function(apply: Apply) -> Callable[..., jax.Array]:
    """`(variables, tokens (batch, sequence + 1)) -> ` mean cross-entropy of the next character, in nats, float32."""

    def loss(variables, tokens):
        logits = apply(variables, tokens[:, :-1])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    return loss


def gradient_mass(gradient: Any) -> jax.Array:
    """M = sum over leaves of sqrt(n) ||g||_2, a scalar (see `agreement`)."""
    leaves = jax.tree.leaves(gradient)
    return jnp.sum(jnp.stack([math.sqrt(leaf.size) * jnp.linalg.norm(leaf.ravel()) for leaf in leaves]))


def step_function(config: TextConfig, apply: Apply) -> Callable[..., Any]:
    """`(state, tokens) -> (state, loss, mass)`; a state is (variables, optimizer state)."""
    transform, loss = optimizer(config), loss_function(apply)

    def step(state, tokens):
        variables, slots = state
        value, gradient = jax.value_and_grad(loss)(variables, tokens)
        updates, slots = transform.update(gradient, slots, variables)
        return (optax.apply_updates(variables, updates), slots), value, gradient_mass(gradient)

    return step


def initial_states(config: TextConfig, model: GPT) -> Pair:
    """The same state for each variant, from the unfused model: both start from the same bits."""
    tokens = jnp.zeros((1, config.sequence), jnp.int32)
    # the default generator, unrolled for each parameter, would take seconds to compile
    variables = jax.jit(model.init)(jax.random.key(config.seed, impl="rbg"), tokens)
    return dict.fromkeys(VARIANTS, (variables, optimizer(config).init(variables)))


class Trainer:
    """Both variants, compiled; `run` trains them from wherever `states` and `history` stand."""

    def __init__(self, config: TextConfig, applies: Pair, states: Pair, batches: np.ndarray, validation: np.ndarray):
        self._config, self._batches, self._validation = config, batches, validation
        self.states, self.history = states, History()
        args = states["unfused"], batches[0]
        self.steps: dict[str, Compiled] = {
            name: compile_ahead(step_function(config, applies[name]), args) for name in VARIANTS
        }
        losses = {name: loss_function(applies[name]) for name in VARIANTS}
        self._losses = {name: jax.jit(loss) for name, loss in losses.items()}
        self._gradients = {name: jax.jit(jax.grad(loss)) for name, loss in losses.items()}

    def run(self) -> Iterator[int]:
        """Trains the steps that are missing; yields the number of finished ones after each."""
        if len(self.history.losses) < self._config.steps:
            for name in VARIANTS:  # first calls allocate: not timed, results dropped
                jax.block_until_ready(self.steps[name].run(self.states[name], self._batches[0]))
        for step in range(len(self.history.losses), self._config.steps):
            if step < self._config.gradient_steps:
                self.history.gradients.append(self._gradient_difference(self._batches[step]))
            self._train_step(step)
            done = step + 1
            if done % self._config.eval_every == 0 or done == self._config.steps:
                self.history.validation.append([done, *(self._validation_loss(name) for name in VARIANTS)])
            yield done

    def _train_step(self, step: int) -> None:
        losses, times_ns = {}, {}
        for name in VARIANTS if step % 2 == 0 else VARIANTS[::-1]:
            started = time.perf_counter_ns()
            result = jax.block_until_ready(self.steps[name].run(self.states[name], self._batches[step]))
            times_ns[name] = time.perf_counter_ns() - started
            self.states[name], losses[name], mass = result
            if name == "unfused":
                self.history.masses.append(float(mass))
        self.history.losses.append([float(losses[name]) for name in VARIANTS])
        self.history.times_ns.append([times_ns[name] for name in VARIANTS])

    def _gradient_difference(self, tokens: np.ndarray) -> float:
        """Both gradients at the parameters of the unfused run."""
        variables = self.states["unfused"][0]
        unfused, fused = (self._gradients[name](variables, tokens) for name in VARIANTS)
        return relative_difference(unfused, fused)

    def _validation_loss(self, name: str) -> float:
        losses = [float(self._losses[name](self.states[name][0], tokens)) for tokens in self._validation]
        return sum(losses) / len(losses)
