"""Dropout of the weights: which of them are kept, read by tiles or made in the kernel from a counter.

`Bernoulli` is ``jax.random.bernoulli(key, probability, shape)`` under jax's default generator: the bits of an element
are ``hi ^ lo`` of ``threefry2x32(key, (0, flat index))``, and with ``u = (bits >> 9) / 2^23`` it is kept where
``u < float32(probability)``. Both sides times 2^23 are exact in float32, and an integer is below a number where it is
below that number rounded up. So it is kept where ``bits >> 9 < ceil(2^23 float32(probability))``, or where ``bits`` is
below 2^9 times that: no number of type float is made. About 75 integer operations an element, of which a Hopper
multiprocessor does 64 a cycle: more than both products of heads of 64 take.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._arguments import expect, expect_attribute

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["key"], meta_fields=["probability", "shape"])
@dataclasses.dataclass(frozen=True)
class Bernoulli:
    """Truth values that need no array: ``jax.random.bernoulli(key, probability, shape)``.

    Attributes:
      key: a key of jax's default generator (threefry), or its data, two uint32.
      probability: of true, a number in (0, 1].
      shape: ``[B, H, S, T]``, of which B and H may be 1 where they are shared; less than 2^32 elements.
    """

    key: Any
    probability: float
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        expect_attribute(self, "probability", 0 < float(np.float32(self.probability)) <= 1, "a number in (0, 1]")
        expect_attribute(self, "shape", 0 < math.prod(self.shape) < 2**32, "less than 2^32 elements")

    @property
    def dtype(self) -> Any:
        """Of what it stands for."""
        return jnp.dtype(bool)

    @property
    def words(self) -> Any:
        """The data of the key."""
        return jax.random.key_data(self.key) if jnp.issubdtype(self.key.dtype, jax.dtypes.prng_key) else self.key


@dataclasses.dataclass(frozen=True)
class Keep:
    """Which of the weights are kept, as far as a kernel is specialized on it.

    Attributes:
      shape: ``(B or 1, H or 1)``; a dimension of 1 is shared.
      factor: what kept weights are multiplied by.
      last: None where there is an array; else the largest bits that are kept.
    """

    shape: tuple[int, int]
    factor: float
    last: int | None

    @property
    def is_read(self) -> bool:
        return self.last is None


def check(function: str, keep: Any, factor: float) -> None:
    """Raises ValueError unless a `Bernoulli` has a key that kernels draw from, and the factor is a number."""
    expect(function, "keep_factor", math.isfinite(factor), "a number", factor)
    if isinstance(keep, Bernoulli):
        is_ours = not jnp.issubdtype(keep.key.dtype, jax.dtypes.prng_key) or str(keep.key.dtype) == "key<fry>"
        ok = is_ours and keep.words.shape == (2,) and keep.words.dtype == jnp.uint32
        expect(function, "keep", ok, "one key of jax's default generator", (keep.key.shape, str(keep.key.dtype)))


def described(keep: Any, factor: float) -> Keep | None:
    """What kernels are specialized on: of an array of truth values, a `Bernoulli`, or None."""
    if keep is None:
        return None
    last = last_kept(keep.probability) if isinstance(keep, Bernoulli) else None
    return Keep((keep.shape[0], keep.shape[1]), float(factor), last)


def last_kept(probability: float) -> int:
    """The largest bits that are kept."""
    return (math.ceil(float(np.float32(probability)) * 2**23) << 9) - 1


def threefry(first: Any, second: Any, counter: Any) -> Any:
    """The 32 bits of elements at positions below 2^32, for the two words of a key. All of type uint32."""
    keys = first, second, first ^ second ^ np.uint32(0x1BD11BDA)
    x, y = first, counter + second
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            x = x + y
            y = x ^ ((y << np.uint32(r)) | (y >> np.uint32(32 - r)))
        x = x + keys[(i + 1) % 3]
        y = y + (keys[(i + 2) % 3] + np.uint32(i + 1))
    return x ^ y


def drawn(words: Any, last: int, start: Any, strides: tuple[int, int], shape: tuple[int, int]) -> Any:
    """Which elements of a tile are kept.

    Args:
      words: the two words of the key.
      last: `last_kept`.
      start: flat index of the tile's first element.
      strides: how far rows and columns are apart.
      shape: of the tile.
    """
    counter = start
    for dim, stride in enumerate(strides):
        at = jax.lax.broadcasted_iota(jnp.int32, shape, dim).astype(jnp.uint32)
        counter = counter + (at if stride == 1 else at * np.uint32(stride))
    return threefry(words[0], words[1], counter) <= np.uint32(last)


def reader(
    keep: Keep | None, refs: Mapping[str, Any], place: tuple[Any, Any], sizes: tuple[int, int], turned: bool = False
) -> Callable[[Any, Any, tuple[int, int], Callable[[], Any]], Any] | None:
    """``(first row, first column, shape, tile) -> which elements of a tile are kept``; None where all are.

    Args:
      keep: what there is.
      refs: the kernel's, by name.
      place: batch and head of Q.
      sizes: queries and keys.
      turned: whether rows are keys.

    `tile` returns the array's tile, and is called where there is an array.
    """
    if keep is None:
        return None
    if keep.last is None:
        return lambda row, column, shape, tile: tile() != 0
    queries, keys = sizes
    words, last = (refs["words"][0], refs["words"][1]), keep.last
    first = jnp.uint32(0)
    for size, x in zip(keep.shape, place, strict=True):
        first = first * np.uint32(size) + (x.astype(jnp.uint32) if size > 1 else np.uint32(0))
    first = first * np.uint32(queries * keys)

    def made(row: Any, column: Any, shape: tuple[int, int], tile: Callable[[], Any]) -> Any:
        query, key = (column, row) if turned else (row, column)
        start = first + query.astype(jnp.uint32) * np.uint32(keys) + key.astype(jnp.uint32)
        return drawn(words, last, start, (1, keys) if turned else (keys, 1), shape)

    return made
