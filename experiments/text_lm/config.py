"""What a run is made of. An invalid configuration cannot be built: the constructor raises `ConfigError`."""

from __future__ import annotations

import dataclasses

from experiments._arguments import ConfigError, check_count, check_positive, is_number

PROMPT_LENGTH = 32


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """All that decides the numbers of a run.

    Attributes:
      sequence: characters a training window has; long enough by default that the scores of attention are what memory
        and time go into.
      width, layers, heads: of the model; heads divide width.
      batch: windows a step. steps: optimizer steps.
      learning_rate: the peak; it rises over `warmup` steps and falls to a tenth along a cosine.
      weight_decay: of adamw. seed: decides files, initial parameters, batches and samples.
      corpus_bytes: size of the text that is read; a tenth of it, whole files, is for validation.
      eval_every: steps between two validation losses. eval_batches: batches of each.
      gradient_steps: in so many first steps the gradients of both are compared at the same parameters.
      save_every: steps between two checkpoints.
      samples, sample_length, temperature: texts written at the end, characters of each, and how freely (near 0 takes
        the most likely character).
    """

    sequence: int = 1024
    width: int = 128
    layers: int = 2
    heads: int = 4
    batch: int = 4
    steps: int = 120
    learning_rate: float = 3e-3
    warmup: int = 10
    weight_decay: float = 0.01
    seed: int = 0
    corpus_bytes: int = 2_000_000
    eval_every: int = 40
    eval_batches: int = 2
    gradient_steps: int = 3
    save_every: int = 20
    samples: int = 2
    sample_length: int = 200
    temperature: float = 0.8

    def __post_init__(self):
        for name in ("width", "layers", "heads", "batch", "eval_every", "eval_batches", "save_every", "samples"):
            check_count(name, getattr(self, name), 1, None, "give a whole number")
        check_count("sequence", self.sequence, PROMPT_LENGTH + 1, None, "1024 is the default")
        check_count("steps", self.steps, 1, None, "120 is the default")
        check_count("seed", self.seed, 0, 2**32 - 1, "any number in that range will do")
        check_count("warmup", self.warmup, 0, self.steps - 1, "it must be below steps")
        check_count("gradient_steps", self.gradient_steps, 1, self.steps, "it cannot exceed steps")
        check_count("sample_length", self.sample_length, 1, self.sequence - PROMPT_LENGTH, "the model sees no further")
        least = 20 * (self.sequence + 1)
        check_count("corpus_bytes", self.corpus_bytes, least, None, f"{least} are twenty windows, two for validation")
        if self.width % self.heads:
            raise ConfigError("heads", f"a divisor of width {self.width}", self.heads, "change either")
        for name in ("learning_rate", "temperature"):
            check_positive(name, getattr(self, name), "a positive finite number", "leave it out for the default")
        if not is_number(self.weight_decay) or self.weight_decay < 0:
            raise ConfigError("weight_decay", "a number >= 0", self.weight_decay, "0.01 is the default")


def quick() -> TextConfig:
    """A small model for some steps; a few seconds, for continuous integration."""
    return TextConfig(
        sequence=64,
        width=32,
        layers=1,
        heads=2,
        batch=2,
        steps=12,
        warmup=2,
        corpus_bytes=100_000,
        eval_every=6,
        eval_batches=1,
        save_every=4,
        sample_length=20,
    )
