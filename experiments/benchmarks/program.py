"""What a benchmark program is, and the two ways in which it is run."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Target = Callable[..., Any]
Identity = Callable[[Target], Target]

MODES = ("forward", "value_and_grad")


@dataclass(frozen=True)
class Program:
    """A model to time fused and unfused.

    `build(seed, scale)` returns `(target, args)`: `target(params, *inputs)` gives the model's output and `args` are
    its arguments, random normal arrays (zeros and ones hide work). `scale` multiplies widths and batch sizes: 1.0 is
    the timed size (2 to 60 ms a call on two cores), tests use a small one.

    With `has_aux`, the target returns `(output, aux)`: only the output is differentiated, aux (batch statistics) is
    returned beside the gradients as a training step would.

    `sum_length` and `roundings` bound how far two correct evaluations may lie apart (see `tolerance`): the longest
    chain of float32 additions behind one output value, and the number of roundings to `compute_dtype` on it.

    Raises ValueError for a name that is no identifier, for no or unknown modes, and for non-positive bounds.
    """

    name: str
    build: Callable[[int, float], tuple[Target, tuple[Any, ...]]]
    modes: tuple[str, ...] = MODES
    has_aux: bool = False
    compute_dtype: str = "float32"
    sum_length: int = 4096
    roundings: int = 16

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name):
            raise ValueError(f"program name must match [a-z][a-z0-9_]*, found {self.name!r}")
        if not self.modes or set(self.modes) - set(MODES):
            raise ValueError(f"modes of {self.name} must be some of {MODES}, found {self.modes}")
        if self.sum_length < 1 or self.roundings < 1:
            raise ValueError(f"sum_length and roundings of {self.name} must be positive")

    @property
    def tolerance(self) -> float:
        """Largest relative difference allowed between fused and unfused.

        A sum of n float32 terms in two orders differs by at most 2 (n - 1) u = n eps relative to the terms' sizes; each
        rounding to a narrower compute dtype adds eps of that dtype, because one side may skip it.
        """
        wide = float(jnp.finfo(jnp.float32).eps)
        narrow = float(jnp.finfo(self.compute_dtype).eps)
        return self.sum_length * wide + (self.roundings * narrow if narrow > wide else 0.0)


def step(program: Program, target: Target, mode: str) -> Target:
    """The function that is timed: the target itself, or the value and gradient of its mean square.

    `forward`: `target(params, *inputs)`. `value_and_grad`: `(L, dL/dparams)` with L the sum over output leaves of
    `mean(leaf ** 2)`, accumulated in float32; the fused target is differentiated from outside, as users do.

    Raises ValueError for a mode that the program does not have.
    """
    if mode not in program.modes:
        raise ValueError(f"{program.name} has no mode {mode!r}; its modes are {program.modes}")
    if mode == "forward":
        return target

    def loss(params, *inputs):
        result = target(params, *inputs)
        output, aux = result if program.has_aux else (result, None)
        value = sum(jnp.mean(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(output))
        return (value, aux) if program.has_aux else value

    return jax.value_and_grad(loss, has_aux=program.has_aux)


def scaled(value: int, scale: float, multiple: int = 8) -> int:
    """`value * scale` rounded down to a multiple, and at least one multiple."""
    return max(multiple, int(value * scale) // multiple * multiple)
