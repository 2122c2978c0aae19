"""Text from a trained model, one character after the other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.text_lm.config import PROMPT_LENGTH, TextConfig
from experiments.text_lm.corpus import Corpus
from experiments.text_lm.train import Apply


def prompts(config: TextConfig, corpus: Corpus) -> np.ndarray:
    """The beginnings of `samples` windows, evenly spread over the validation text: int32 (samples, PROMPT_LENGTH)."""
    starts = np.linspace(0, len(corpus.validation) - PROMPT_LENGTH, config.samples, endpoint=False, dtype=int)
    return corpus.validation[starts[:, None] + np.arange(PROMPT_LENGTH)]


def generate(config: TextConfig, corpus: Corpus, apply: Apply, variables: Any) -> list[str]:
    """Prompts with `sample_length` characters after each, drawn from softmax(logits / temperature).

    Every character evaluates the whole text again: padding stands after the last character, where a causal model does
    not look. Equal parameters and seeds give equal texts.
    """
    start = prompts(config, corpus)
    tokens = jnp.asarray(np.pad(start, ((0, 0), (0, config.sample_length))))

    @jax.jit
    def extend(variables, tokens, position):
        logits = apply(variables, tokens)[:, position - 1]
        key = jax.random.fold_in(jax.random.key(config.seed), position)
        return tokens.at[:, position].set(jax.random.categorical(key, logits / config.temperature))

    for position in range(PROMPT_LENGTH, tokens.shape[1]):
        tokens = extend(variables, tokens, position)
    return [corpus.decode(row) for row in np.asarray(tokens)]
