"""Which blocks of a stream `mcir.lower_jax` visits, and where the mask need not be computed."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mcir._tiles import Env


class Bounds:
    """Blocks of a stream at a position of the tiled loops: from `low` to before `high` are those that may be visible.

    Among them is a run of blocks without a hidden element, where the mask need not be computed.
    """

    def __init__(self, found: tuple[tuple[str, ...], np.ndarray, np.ndarray], position: Env, split: bool):
        self.split = split
        tiled, visible, full = found
        low, high = _run(visible)
        full_low, full_high = _run(full)
        # A run with a gap is not taken: then everything is masked.
        gaps = full.sum(-1) != full_high - full_low
        full_low, full_high = (np.where(gaps, low, x) for x in (full_low, full_high))
        none = full_low >= full_high
        full_low, full_high = np.where(none, high, full_low), np.where(none, high, full_high)
        # Blocks before the first visible one may have to be visited, too: see `needs_all`.
        self.before = bool((low < full_low).any() or (low > 0).any())
        index = tuple(position.get(a, 0) for a in tiled)
        integer = jnp.result_type(int)  # as the loops around
        self.low, self.high, self.full_low, self.full_high = (
            jnp.asarray(x, integer)[index] for x in (low, high, full_low, full_high)
        )

    def walk(self, low: Any, high: Any, body: Any, carry: Any) -> Any:
        """The blocks from `low` to before `high`, with the mask where it is needed.

        In one loop where arrays in memory are carried through it (`split` is False): XLA copies them between loops.
        """
        if not self.split:
            return jax.lax.fori_loop(low, high, functools.partial(body, False), carry)
        start, stop = jnp.clip(self.full_low, low, high), jnp.clip(self.full_high, low, high)
        masked = functools.partial(body, False)
        if self.before:
            carry = jax.lax.fori_loop(low, start, masked, carry)
        carry = jax.lax.fori_loop(start, stop, functools.partial(body, True), carry)
        return jax.lax.fori_loop(stop, high, masked, carry)


def _run(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First block of each row that is set, and the one after the last; 0 and 0 for a row without any."""
    some = blocks.any(-1)
    return np.where(some, blocks.argmax(-1), 0), np.where(some, blocks.shape[-1] - blocks[..., ::-1].argmax(-1), 0)
