"""What the attention kernel is specialized on, checked."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp

from pallas_kernels import _arguments, _mosaic
from pallas_kernels.attention import arguments
from pallas_kernels.attention.config import (
    HEADS,
    QUERY_ROWS,
    ForwardConfig,
    default_forward,
    is_head_dim,
)
from pallas_kernels.attention.scores import Band
from pallas_kernels.attention.sides import Arrays, Sides

_BIAS_DTYPES = ("bfloat16", "float16", "float32")

expect = functools.partial(_arguments.expect, "forward")

_NUMBERS = f"numbers of type {', '.join(_BIAS_DTYPES)}"
_TYPES = {"segments": "integers of at most 32 bits", "mask": "truth values", "bias": _NUMBERS, "key_bias": _NUMBERS}


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything the kernel is specialized on. `lower`, `upper`: which keys a query sees, see `forward`."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    dtype: Any
    layouts: tuple[str, ...]
    scale: float
    lower: int | None
    upper: int | None
    softcap: float | None
    sides: Sides
    with_statistics: bool
    config: ForwardConfig
    simulated: bool

    @property
    def group(self) -> int:
        """Heads of Q for each head of K and V."""
        return self.heads // self.kv_heads

    @property
    def band(self) -> Band:
        return Band(self.lower, self.upper)

    @property
    def key_blocks(self) -> int:
        return -(-self.keys // self.config.block_k)

    @property
    def query_blocks(self) -> int:
        return -(-self.queries // self.config.rows)

    @property
    def split_blocks(self) -> int:
        """Blocks of keys of each split."""
        return -(-self.key_blocks // self.config.splits)


def problem(
    q: Any, k: Any, v: Any, *, scale: float, lower: int | None, upper: int | None, softcap: float | None,
    arrays: Arrays, bias_factor: float, fill: float, layouts: Any, with_statistics: bool, config: ForwardConfig | None,
    simulated: bool,
) -> Problem:  # fmt: skip
    """The problem of these arguments of `forward`. Raises ValueError where they do not fit."""
    of = arguments.sizes("forward", q, k, v, layouts, is_head_dim, HEADS)
    arguments.check_scores("forward", of, scale=scale, lower=lower, upper=upper, softcap=softcap)
    batch, heads, kv_heads, queries, keys, head_dim = of
    _check_sides((batch, heads, queries, keys), arrays, bias_factor, fill)
    found = arrays.described(bias_factor, fill)
    ctas = batch * heads * -(-queries // QUERY_ROWS)
    config = config or default_forward(
        head_dim, found.per_score, found.per_key, ctas, queries, keys, _mosaic.sm_count()
    )
    return Problem(
        batch, heads, kv_heads, queries, keys, head_dim, jnp.dtype(q.dtype), tuple(layouts), float(scale), lower,
        upper, softcap, found, with_statistics, config, simulated,
    )  # fmt: skip


def _check_sides(sizes: tuple[int, int, int, int], arrays: Arrays, factor: float, fill: float) -> None:
    batch, heads, queries, keys = sizes

    def check(name: str, x: Any, is_type: bool, *lengths: int) -> None:
        allowed = [(1, batch), (1, heads), *((n,) for n in lengths)]
        ok = len(x.shape) == len(allowed) and all(n in a for n, a in zip(x.shape, allowed, strict=True))
        expected = f"for {' and '.join(map(str, lengths))}, of batches and heads that fit"
        expect(name, ok and is_type, f"{_TYPES[name]} {expected}", (x.shape, str(x.dtype)))

    for pair in arrays.segments:
        expect("segments", len(pair) == 2 and pair[1] is not None, "pairs with ids of keys", pair)
        for x, length in zip(pair, (queries, keys), strict=True):
            if x is not None:
                is_ids = jnp.issubdtype(x.dtype, jnp.signedinteger) and x.dtype.itemsize <= 4
                check("segments", x, is_ids, length)
    if arrays.mask is not None:
        check("mask", arrays.mask, arrays.mask.dtype == jnp.bool_, queries, keys)
    if arrays.bias is not None:
        check("bias", arrays.bias, str(arrays.bias.dtype) in _BIAS_DTYPES, queries, keys)
    if arrays.key_bias is not None:
        check("key_bias", arrays.key_bias, str(arrays.key_bias.dtype) in _BIAS_DTYPES, keys)
    expect("bias_factor", math.isfinite(factor) and factor != 0, "a number other than 0", factor)
    expect("fill", fill <= -1e4, "-inf, or a number so low that its exponential is 0 beside others", fill)
