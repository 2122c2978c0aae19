"""What a sweep is made of. An invalid configuration cannot be built: the constructors raise `ConfigError`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from experiments._arguments import ConfigError, check_count, check_positive, is_number

INPUTS = ("standardized", "unit", "unscaled")
OPTIMIZERS = ("sgd", "momentum", "adam")
DTYPES = ("float32", "bfloat16")
ACTIVATIONS = ("relu", "gelu")
LOSSES = ("squared_error", "cross_entropy")
DEFAULT_LEARNING_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
TRAIN_EXAMPLES = 1437  # four fifths of the 1797 bundled digits; data.py splits there


@dataclasses.dataclass(frozen=True, order=True)
class Cell:
    """One trained group: all learning rates of one (inputs, optimizer, dtype), fused and unfused."""

    inputs: str
    optimizer: str
    dtype: str

    def __post_init__(self):
        for name, known in (("inputs", INPUTS), ("optimizer", OPTIMIZERS), ("dtype", DTYPES)):
            _check_choice(name, getattr(self, name), known)

    def __str__(self) -> str:
        return f"{self.inputs} {self.optimizer} {self.dtype}"


@dataclasses.dataclass(frozen=True)
class SweepConfig:
    """All that decides the numbers of a sweep.

    Defaults are the setting that shows the origin's observation (convergence at 1e-3, NaN at 1e-2, for unscaled inputs
    and plain SGD). Three choices place the edge of stability between those two rates, none of which touches a gradient
    formula: `loss` is the squared error against one-hot targets, summed over classes (its gradient grows with the
    error, so it can run away; cross entropy's is bounded, and a ReLU net dies at ln 10 instead of reaching NaN);
    pixels stay 0..16; `init_scale` is 0.6. With PyTorch's default, 1/3, the edge lies near 1.5e-2, with flax's, 1,
    near 5e-3, and 1e-3 is then already unsteady.

    Attributes:
      learning_rates: positive and distinct; kept in ascending order.
      optimizers, dtypes, inputs: subsets of the names above. A dtype is the compute dtype; parameters, optimizer state
        and loss are always float32.
      steps: optimizer steps of every member. batch_size: examples a step; even, as the gradient check halves it.
      seed: decides split, initial parameters and batch order, the same for all members and both variants.
      hidden: widths of the hidden layers. activation: "relu" or "gelu".
      init_scale: kernels start with variance init_scale / fan_in.
      loss: "squared_error" or "cross_entropy", both averaged over the batch.
      momentum: decay of the momentum optimizer's trace.
      gradient_steps: in so many first steps the gradients of both variants are compared at the same parameters.
      blow_up: a member has blown up when its loss exceeds blow_up times its first loss.
    """

    learning_rates: tuple[float, ...] = DEFAULT_LEARNING_RATES
    optimizers: tuple[str, ...] = OPTIMIZERS
    dtypes: tuple[str, ...] = DTYPES
    inputs: tuple[str, ...] = ("standardized", "unscaled")
    steps: int = 400
    batch_size: int = 128
    seed: int = 0
    hidden: tuple[int, ...] = (128, 64)
    activation: str = "relu"
    init_scale: float = 0.6
    loss: str = "squared_error"
    momentum: float = 0.9
    gradient_steps: int = 8
    blow_up: float = 1e3

    def __post_init__(self):
        rates = _as_tuple("learning_rates", self.learning_rates)
        for rate in rates:
            check_positive("learning_rates", rate, "positive finite numbers", "leave it out")
        object.__setattr__(self, "learning_rates", tuple(sorted(float(rate) for rate in rates)))
        for name, known in (("optimizers", OPTIMIZERS), ("dtypes", DTYPES), ("inputs", INPUTS)):
            chosen = _as_tuple(name, getattr(self, name))
            for choice in chosen:
                _check_choice(name, choice, known)
            object.__setattr__(self, name, chosen)
        _check_choice("activation", self.activation, ACTIVATIONS)
        _check_choice("loss", self.loss, LOSSES)
        self._check_counts()
        check_positive("init_scale", self.init_scale, "a positive finite number", "flax's own default is 1.0")
        check_positive("blow_up", self.blow_up, "a finite factor above 1", "1000 is the default", above=1.0)
        if not (is_number(self.momentum) and 0.0 <= self.momentum < 1.0):
            raise ConfigError("momentum", "a number in [0, 1)", self.momentum, "0.9 is the default")

    def _check_counts(self):
        """Whole numbers and their ranges."""
        hidden = _as_tuple("hidden", self.hidden, distinct=False)
        for width in hidden:
            check_count("hidden", width, 1, None, "widths of the hidden layers, such as (128, 64)")
        object.__setattr__(self, "hidden", hidden)
        check_count("steps", self.steps, 1, None, "400 is the default")
        check_count("seed", self.seed, 0, 2**32 - 1, "any number in that range will do")
        check_count("batch_size", self.batch_size, 2, TRAIN_EXAMPLES, "128 is the default")
        if self.batch_size % 2:
            remedy = f"the gradient check halves each batch: try {self.batch_size - 1}"
            raise ConfigError("batch_size", "an even number", self.batch_size, remedy)
        check_count("gradient_steps", self.gradient_steps, 1, self.steps, "it cannot exceed steps")

    def cells(self) -> tuple[Cell, ...]:
        """Cells in the order they are trained: inputs innermost, because those share compiled programs."""
        order = itertools.product(self.optimizers, self.dtypes, self.inputs)
        return tuple(Cell(inputs, optimizer, dtype) for optimizer, dtype, inputs in order)

    def to_json(self) -> dict:
        """The fields as JSON values."""
        fields = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def quick() -> SweepConfig:
    """A small setting that still shows the origin's observation; a few seconds, for continuous integration."""
    return SweepConfig(
        learning_rates=(1e-3, 1e-2, 1.0), optimizers=("sgd", "adam"), inputs=("unscaled",), steps=100, gradient_steps=4
    )


def _as_tuple(argument: str, values: Sequence, distinct: bool = True) -> tuple:
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise ConfigError(argument, "a non-empty sequence", values, "name at least one")
    if distinct and len(set(values)) != len(values):
        raise ConfigError(argument, "distinct values", tuple(values), "remove the repeated ones")
    return tuple(values)


def _check_choice(argument: str, value: object, known: tuple[str, ...]):
    if value not in known:
        raise ConfigError(argument, f"one of {', '.join(known)}", value, "check the spelling")
