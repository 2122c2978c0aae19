"""The numbers of each row of ``x = X W`` that a loss is made of, on Hopper: no logit is stored.

A CTA takes 128 rows and a part of the vocabulary. A warpgroup loads tiles of X and W by TMA, two multiply them by wgmma
into float32 registers; of a tile of logits only the running maximum, the sum of exponentials, the logit at the label
and the sum of logits are kept. Loads of the next tile go on meanwhile. Parts of the vocabulary are merged by a second,
small kernel: ``(m, l)`` of two parts is ``(max m, sum l exp(m - max m))``.

Read: X and W once for each tile that needs them (mostly from the cache); written: four numbers a row and part. Milakov
and Gimelshein, "Online normalizer calculation for softmax", 2018; Wijmans et al., "Cut your losses in large-vocabulary
language models", 2024.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _mosaic
from pallas_kernels.linear_cross_entropy._products import Logits, beside, columns, load, product, start_computing
from pallas_kernels.linear_cross_entropy.arguments import aligned, labels_of, logits
from pallas_kernels.linear_cross_entropy.config import (
    TILE_ROWS,
    WARPGROUP_ROWS,
    WARPGROUPS,
    ForwardConfig,
    cdiv,
    default_forward,
)

#: Classes that are worked on at a time.
_PART = 16


class Numbers(NamedTuple):
    """Of each row, float32 ``[R]``: max x, ``sum exp(base (x - m))``, x at the label, ``sum x`` (None: not wanted)."""

    m: Any
    l: Any
    taken: Any
    sum: Any


def forward(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    *,
    trans_w: bool = False,
    scale: float = 1.0,
    softcap: float | None = None,
    base: float = 1.0,
    with_sum: bool = False,
    config: ForwardConfig | None = None,
    interpret: Any = None,
) -> Numbers:
    """Numbers of the rows of ``x = scale X W`` or ``x = softcap tanh(scale X W / softcap)``, accumulated in float32.

    Args:
      x: ``[R, D]``, bfloat16 or float16.
      w: ``[D, V]``, or ``[V, D]`` if `trans_w`; of x's dtype.
      labels: integers ``[R]``; of one that is no class, 0 is taken.
      trans_w: how w is stored.
      scale: a positive number.
      softcap: a positive number; None: none.
      base: a positive number; of the exponentials, see `Numbers`.
      with_sum: whether the sum of a row's logits is wanted.
      config: tiles; by shape unless told otherwise.
      interpret: parameters of the simulator (`pallas_kernels._mosaic.interpret`).

    Returns:
      `Numbers`. An array whose last dimension is not a multiple of 16, or whose first is not one of 8, is copied with
      zeros at its end first: TMA needs it.

    Raises:
      ValueError: naming the argument, what was expected, what was found.
    """
    problem = logits("forward", x, w, labels, trans_w, scale, softcap, base, interpret is not None)
    if config is None:
        plain = softcap is None and not with_sum
        config = default_forward(problem.rows, problem.classes, problem.depth, plain)
    problem = dataclasses.replace(problem, tile_v=config.tile_v, stages=config.stages)
    count = 4 if with_sum else 3
    parts = _call(problem, config, count, interpret)(*aligned(x, w), labels_of(labels, problem.classes))
    return _merged(problem, parts[:, :, : problem.rows])


def _merged(p: Logits, parts: Any) -> Numbers:
    """Of all parts of the vocabulary, in the units of the logits. `parts`: what `_add_tile` makes."""
    power, weight, taken, *total = parts
    top = jnp.max(power, axis=0)
    weight = jnp.sum(weight * jnp.exp2(power - _finite(top)), axis=0)
    taken, *total = (p.factor * jnp.sum(part, axis=0) for part in (taken, *total))
    return Numbers(top * (math.log(2) / p.base), weight, taken, *total or (None,))


def _finite(power: Any) -> Any:
    """What exponents are relative to: 0 where there is no number that could be, as in `jax.nn.logsumexp`."""
    return jnp.where(jnp.abs(power) == jnp.inf, 0.0, power)


def _call(p: Logits, c: ForwardConfig, count: int, interpret: Any) -> Any:
    gpu = _mosaic.mosaic().gpu
    return gpu.kernel(
        functools.partial(_body, p, c.splits),
        out_type=jax.ShapeDtypeStruct((count, c.splits, p.row_blocks * TILE_ROWS), jnp.float32),
        grid=(p.row_blocks * c.splits,),
        grid_names=("cta",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=gpu.CompilerParams(approx_math=True, lowering_semantics=gpu.LoweringSemantics.Warpgroup),
        kernel_name="loss_of_logits",
        interpret=interpret,
    )


def _body(p: Logits, splits: int, x: Any, w: Any, labels: Any, out: Any) -> None:
    """The kernel: allocate, then load with one warpgroup and compute with the others."""
    pl, gpu = _mosaic.mosaic().pl, _mosaic.mosaic().gpu
    numbers = out.shape[0]

    @functools.partial(
        pl.run_scoped,
        collective_axes="wg",
        numbers_smem=gpu.SMEM((numbers, WARPGROUPS, WARPGROUP_ROWS), jnp.float32),
        labels_smem=gpu.SMEM((WARPGROUPS, WARPGROUP_ROWS), jnp.int32),
        labels_loaded=gpu.Barrier(num_barriers=WARPGROUPS),
        **p.allocations(),
    )
    def _scope(**smem: Any) -> None:
        # Parts of the vocabulary first: what runs at the same time has few rows, which stay in the cache.
        cta, each = jax.lax.axis_index("cta"), cdiv(p.tiles, splits)
        row = jax.lax.div(cta, jnp.int32(splits)) * TILE_ROWS
        split = jax.lax.rem(cta, jnp.int32(splits))
        first = split * each
        count = jnp.minimum(first + each, p.tiles) - first
        wg = jax.lax.axis_index("wg")

        @pl.when(wg == WARPGROUPS)
        def _load() -> None:
            load(p, count, lambda tile: (row, (first + tile) * p.tile_v), x, w, smem)

        @pl.when(wg < WARPGROUPS)
        def _compute() -> None:
            start_computing()
            here = pl.ds(row + wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
            found = _rows(p, first, count, numbers, labels.at[here], smem)
            for i, value in enumerate(found):
                smem["numbers_smem"][i, wg] = value
            gpu.commit_smem()
            for i in range(numbers):
                gpu.copy_smem_to_gmem(smem["numbers_smem"].at[i, wg], out.at[i, split, here])
            gpu.wait_smem_to_gmem(0)


def _rows(p: Logits, first: Any, count: Any, numbers: int, labels: Any, smem: dict[str, Any]) -> tuple[Any, ...]:
    """The numbers of this warpgroup's rows, of `count` tiles from the tile `first` on."""
    gpu = _mosaic.mosaic().gpu
    wg = jax.lax.axis_index("wg")
    loaded = smem["labels_loaded"].at[wg]
    gpu.copy_gmem_to_smem(labels, smem["labels_smem"].at[wg], loaded)
    gpu.barrier_wait(loaded)

    def step(ragged: bool, tile: Any, carry: Any) -> Any:
        total = product(p, tile, smem)
        return _add_tile(p, total, (first + tile) * p.tile_v, smem["labels_smem"].at[wg], carry, ragged)

    zeros = jnp.zeros((WARPGROUP_ROWS,), jnp.float32)
    carry = (jnp.full((WARPGROUP_ROWS,), -jnp.inf, jnp.float32), *(zeros,) * (numbers - 1))
    whole = jnp.minimum(p.classes // p.tile_v - first, count)
    carry = jax.lax.fori_loop(0, whole, functools.partial(step, False), carry)
    if p.classes % p.tile_v:
        carry = jax.lax.fori_loop(whole, count, functools.partial(step, True), carry)
    return carry


def _add_tile(p: Logits, total: Any, column: Any, labels: Any, carry: Any, ragged: bool) -> Any:
    """``(power, sum of 2^(unit z - power), z at the label, sum of z)`` with a tile, of which `total` is X W.

    Some classes at a time, added up element beside element: little is in registers besides the tile, and what goes
    from thread to thread does so once.
    """
    old, weight, taken, *sums = carry
    shape = WARPGROUP_ROWS, _PART
    label = beside(labels[...], shape)
    parts, here, every = [], [], []
    for j in range(0, p.tile_v, _PART):
        z = p.capped(total[:, j : j + _PART])
        where = columns(shape, column + j)
        here.append(jnp.where(where == label, z, 0.0))
        every.append(z)  # beyond W there are zeros
        parts.append(jnp.where(where < p.classes, z, -jnp.inf) if ragged else z)
    taken = taken + jnp.sum(functools.reduce(jnp.add, here), axis=1)
    if sums:
        sums = [sums[0] + jnp.sum(functools.reduce(jnp.add, every), axis=1)]
    power = jnp.maximum(old, jnp.max(functools.reduce(jnp.maximum, parts), axis=1) * p.unit)
    taken, power, parts = jax.lax.optimization_barrier((taken, power, parts))
    known = _finite(power)
    shift = beside(known, shape)
    e = functools.reduce(jnp.add, [jnp.exp2(z * p.unit - shift) for z in parts])
    return power, weight * jnp.exp2(old - known) + jnp.sum(e, axis=1), taken, *sums
