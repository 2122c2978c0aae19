"""What the kernels of the backward do with a tile: weights, and gradients of the scores."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention import dropout, scores, sides
from pallas_kernels.attention.gradient_problem import Problem
from pallas_kernels.attention.scores import LOG2_E, Band
from pallas_kernels.attention.sides import Sides


class Tile(NamedTuple):
    """Which scores a tile is of.

    Attributes:
      sides: what lies beside it.
      mine: what `of_rows` gives.
      smem: the blocks in flight.
      slot: which of them it is.
      wg: the warpgroup.
      masked: whether a limit hides some of it, as the next ones say: see `scores.seen`.
      band: of its rows.
      first_row: the first of them.
      first_column: likewise.
      columns: None, or how many there are.
    """

    sides: Sides
    mine: Mapping[str, Any]
    smem: Any
    slot: Any
    wg: Any
    masked: bool
    band: Band
    first_row: Any
    first_column: Any
    columns: int | None


def of_rows(
    p: Problem, beside: Sides, refs: Mapping[str, Any], batch: Any, head: Any, rows: Any, turned: bool = False
) -> dict[str, Any]:
    """`sides.of_rows`, and ``"kept"``: what `dropout.reader` gives."""
    kept = dropout.reader(beside.keep, refs, (batch, head), (p.queries, p.keys), turned)
    return {**sides.of_rows(beside, refs, batch, head, rows, p.simulated), "kept": kept}


def statistics(p: Problem, m: Any, total: Any) -> list[Any]:
    """What weights are computed from: of each row ``log2 sum_j exp(X)``, or where scores are exact ``[m, log2 l]``.

    In one number the logarithm of the sum would be lost beside a maximum that is as large as a fill.
    """
    # Rows beyond the last query have sums of 0 and no maximum: infinite statistics make their weights 0.
    beyond = (total == 0) & (m == 0)
    log = jnp.log(total) * LOG2_E
    found = [m, log] if p.sides.is_exact else [m * LOG2_E + log]
    return [jnp.where(beyond, jnp.inf, x) for x in found]


def gradients(
    p: Problem, at: Tile, products: Any, dp: Any | None, numbers: Sequence[Any], with_weights: bool
) -> tuple[Any, Any, Any]:
    """``(P, dX, dZ)`` of a tile of ``Z = Q K^T``, dZ over `scale`; P without what is dropped, over dropout's factor.

    Hidden scores have a gradient of 0. They have a weight where a row has seen nothing but the fill: with
    `with_weights` it is part of P. Without arrays beside the scores rows that are NaN are so in all places.

    Args:
      p: the problem.
      at: which tile.
      products: Z, in float32.
      dp: the gradient of P without dropout; None where P alone is wanted.
      numbers: delta (None without dp) and `statistics` of each query, as large as the tile.
      with_weights: whether P is wanted.
    """
    s, (delta, *known) = at.sides, numbers
    unit = 1.0 if s.is_exact else LOG2_E
    if p.softcap is None:
        x, slope = products * (p.scale * unit), None
    else:
        # tanh x = 1 - 2 / (1 + e^2x)
        capped = 1 - 2 / (1 + jnp.exp2(products * (2 * p.scale / p.softcap * LOG2_E)))
        x, slope = capped * (p.softcap * unit), 1 - capped * capped
    x = sides.biased(s, at.mine, x, at.smem, at.slot, at.wg, p.simulated)
    visible = _visible(p, at, x.shape)
    if visible is not None and (with_weights or not s.has_arrays):
        # A hidden score, not a hidden weight: a row that is NaN stays so.
        x = jnp.where(visible, x, s.fill)
    weights = jnp.exp2((x - known[0]) * LOG2_E - known[1] if s.is_exact else x - known[0])
    kept = _kept(p, at, x.shape)
    left = weights if kept is None else jnp.where(kept, weights, 0.0)
    if dp is None:
        return left, None, None
    if kept is not None and s.keep is not None:
        dp = jnp.where(kept, dp * s.keep.factor, 0.0)
    dx = weights * (dp - delta)
    if visible is not None and s.has_arrays:
        dx = jnp.where(visible, dx, 0.0)
    return left, dx, dx if slope is None else dx * slope


def _kept(p: Problem, at: Tile, shape: Any) -> Any:
    tile = functools.partial(sides.tile, at.smem, "keep", at.slot, at.wg, p.simulated)
    reader = at.mine["kept"]
    return None if reader is None else reader(at.first_row, at.first_column, shape, tile)


def _visible(p: Problem, at: Tile, shape: Any) -> Any:
    conditions = sides.seen(at.sides, at.mine, shape, at.smem, at.slot, at.wg, p.simulated)
    if at.masked:
        in_band = scores.seen(at.band, shape, at.first_row, at.first_column, at.columns)
        conditions += [] if in_band is None else [in_band]
    return functools.reduce(jnp.logical_and, conditions) if conditions else None


def spread(vectors: Sequence[Any], shape: tuple[int, int], dim: int) -> list[Any]:
    """Numbers of each row (dim 0) or column (1), as large as the tile."""
    return [jax.lax.broadcast_in_dim(x, shape, (dim,)) for x in vectors]
