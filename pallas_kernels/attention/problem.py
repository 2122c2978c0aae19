"""What the attention kernel is specialized on, checked."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels import _mosaic
from pallas_kernels.attention import arguments
from pallas_kernels.attention.arguments import Sizes
from pallas_kernels.attention.config import (
    HEADS,
    QUERY_ROWS,
    ForwardConfig,
    default_forward,
    is_head_dim,
)
from pallas_kernels.attention.scores import Band
from pallas_kernels.attention.sides import Arrays, Sides


@dataclasses.dataclass(frozen=True)
class Problem(Sizes):
    """Everything the kernel is specialized on. `lower`, `upper`: which keys a query sees, see `forward`."""

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
    arrays: Arrays, bias_factor: float, fill: float, keep_factor: float, layouts: Any, with_statistics: bool,
    config: ForwardConfig | None, simulated: bool,
) -> Problem:  # fmt: skip
    """The problem of these arguments of `forward`. Raises ValueError where they do not fit."""
    of = arguments.sizes("forward", q, k, v, layouts, is_head_dim, HEADS)
    arguments.check_scores("forward", of, scale=scale, lower=lower, upper=upper, softcap=softcap)
    arguments.check_sides("forward", of, arrays, bias_factor, fill, keep_factor)
    found = arrays.described(bias_factor, fill, keep_factor)
    ctas = of.batch * of.heads * -(-of.queries // QUERY_ROWS)
    config = config or default_forward(
        of.head_dim, found.per_score, found.per_column, ctas, of.queries, of.keys, _mosaic.sm_count(),
        found.keep is not None,
    )  # fmt: skip
    return Problem(
        **dataclasses.asdict(of), dtype=jnp.dtype(q.dtype), layouts=tuple(layouts), scale=float(scale), lower=lower,
        upper=upper, softcap=softcap, sides=found, with_statistics=with_statistics, config=config, simulated=simulated,
    )  # fmt: skip
