"""The kernel of the gradient of a bias of queries x keys.

A CTA owns a tile of the bias and goes through the batches and heads that share it, one after the other: scores and
gradients of weights are computed again and the gradients of scores added up in float32 registers, in one order. No
array is larger than the bias.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat, _mosaic
from pallas_kernels.attention import gradient_tile, scores, sides
from pallas_kernels.attention.gradient_problem import ROWS, WARPGROUPS, Pipeline, Problem, at, kernel
from pallas_kernels.attention.gradient_tile import Tile, spread
from pallas_kernels.attention.scores import Band

#: Queries of a CTA.
_ROWS = ROWS * WARPGROUPS


def call(p: Problem, interpret: Any, bias: Any) -> Any:
    """``(q, k, v, dout, *numbers, *beside) -> dbias``; lengths padded, of `bias` to whole atoms, as it is read."""
    tiles = -(-p.queries // _ROWS) * -(-p.keys // _width(p))
    batches, heads = _owned(p)
    grid = heads, tiles, batches
    out_type = [jax.ShapeDtypeStruct(bias.shape, bias.dtype)]
    return kernel(p, "attention_dbias", functools.partial(_body, p), grid, out_type, interpret)


def _owned(p: Problem) -> tuple[int, int]:
    """Batches and heads that the bias has."""
    assert p.sides.bias is not None
    return p.sides.bias


def _width(p: Problem) -> int:
    """Keys of a CTA."""
    return 64 if p.head_dim <= 64 else 32


def _stages(p: Problem) -> int:
    """Blocks in flight: as many as there is shared memory for, at most 3."""
    width, s = _width(p), _others(p)
    row = 4 * p.head_dim
    stage = (_ROWS + width) * row + 4 * p.numbers * _ROWS + (_ROWS * s.per_score + s.per_column) * width
    rest = 4096 + _ROWS * width * jnp.dtype(s.bias_dtype).itemsize
    return max(1, min(3, (_mosaic.HOPPER_SMEM_BYTES - rest) // stage))


def _body(p: Problem, *refs: Any) -> None:
    pl, gpu, stages, width = _mosaic.mosaic().pl, _mosaic.mosaic().gpu, _stages(p), _width(p)
    beside = 4 + p.numbers
    extra = sides.named(p.sides, refs[beside:-1])
    others = _others(p)
    tiles = sides.allocations(dataclasses.replace(p.sides, mask=None, keep=None), 1, WARPGROUPS, width, extra)
    allocations = {
        "q_smem": p.tiles(stages * WARPGROUPS, ROWS, width),
        "dout_smem": p.tiles(stages * WARPGROUPS, ROWS, width),
        "k_smem": p.tiles(stages, width, width),
        "v_smem": p.tiles(stages, width, width),
        "numbers": gpu.SMEM((stages, p.numbers, WARPGROUPS, ROWS), jnp.float32),
        "tile": tiles["bias_smem"],
        "own_loaded": gpu.Barrier(num_barriers=WARPGROUPS),
        "loaded": gpu.Barrier(
            num_arrivals=2 + WARPGROUPS * (2 + p.numbers) + others.copies(WARPGROUPS), num_barriers=stages
        ),
        "used": gpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        **sides.allocations(others, stages, WARPGROUPS, width, extra),
    }
    refs = *refs[:4], refs[4:beside], extra, refs[-1]
    pl.run_scoped(functools.partial(_tile, p, refs), collective_axes="wg", **allocations)


def _others(p: Problem) -> sides.Sides:
    """What comes with each batch and head: the tile of the bias is the same for all."""
    return dataclasses.replace(p.sides, bias=None)


def _tile(p: Problem, refs: Any, **smem: Any) -> None:
    """The rows of one warpgroup: all batches and heads that share them."""
    pl, gpu, width = _mosaic.mosaic().pl, _mosaic.mosaic().gpu, _width(p)
    q, k, v, dout, numbers, extra, dbias = refs
    wg, batch, head, block = (jax.lax.axis_index(a) for a in ("wg", "batch", "head", "block"))
    key_blocks = -(-p.keys // width)
    first_row, key_block = jax.lax.div(block, jnp.int32(key_blocks)) * _ROWS, jax.lax.rem(block, jnp.int32(key_blocks))
    rows = [pl.ds(first_row + i * ROWS, ROWS) for i in range(WARPGROUPS)]
    keys = pl.ds(key_block * width, width)

    def load(step: Any, slot: Any, barrier: Any) -> None:
        of_batch, of_head = _member(p, batch, head, step)
        kv_head = jax.lax.div(of_head, jnp.int32(p.group))
        for ref, layout, name in ((q, p.layouts[0], "q_smem"), (dout, p.layouts[3], "dout_smem")):
            for i, mine in enumerate(rows):
                gpu.copy_gmem_to_smem(
                    at(ref, layout, of_batch, of_head, mine), smem[name].at[slot * WARPGROUPS + i], barrier
                )
        gpu.copy_gmem_to_smem(at(k, p.layouts[1], of_batch, kv_head, keys), smem["k_smem"].at[slot], barrier)
        gpu.copy_gmem_to_smem(at(v, p.layouts[2], of_batch, kv_head, keys), smem["v_smem"].at[slot], barrier)
        for j, ref in enumerate(numbers):
            for i, mine in enumerate(rows):
                gpu.copy_gmem_to_smem(ref.at[of_batch, of_head, mine], smem["numbers"].at[slot, j, i], barrier)
        sides.load(_others(p), extra, smem, (of_batch, of_head, rows), keys, slot, barrier)

    found = scores.blocks(p.band, first_row, jnp.minimum(first_row + _ROWS, p.queries) - 1, p.keys, width, True)
    is_seen = (found.first <= key_block) & (key_block < found.stop)
    batches, heads = _owned(p)
    members = jnp.where(is_seen, (p.batch // batches) * (p.heads // heads), 0)
    pipeline = Pipeline(_stages(p), members, load, smem["loaded"], smem["used"])
    pipeline.start()
    here = pl.ds(first_row + wg * ROWS, ROWS)
    mine, barrier = smem["tile"].at[0, wg], smem["own_loaded"].at[wg]
    gpu.copy_gmem_to_smem(extra["bias"].at[batch, head, here, keys], mine, barrier)
    gpu.barrier_wait(barrier)
    bias = _compat.load(mine, gpu.Layout.WGMMA, p.simulated).astype(jnp.float32)

    def step(i: Any, total: Any) -> Any:
        place = *_member(p, batch, head, i), here, first_row + wg * ROWS, key_block * width
        return total + _step(p, place, pipeline, i, bias, extra, smem)

    total = jax.lax.fori_loop(0, members, step, jnp.zeros((ROWS, width), jnp.float32))
    mine[...] = (total * p.sides.bias_factor).astype(dbias.dtype)
    gpu.commit_smem()
    gpu.copy_smem_to_gmem(mine, dbias.at[batch, head, here, keys])
    pipeline.finish()
    gpu.wait_smem_to_gmem(0)


def _member(p: Problem, batch: Any, head: Any, step: Any) -> tuple[Any, Any]:
    """Batch and head of a step, of those that share the tile."""
    heads = jnp.int32(p.heads // _owned(p)[1])
    return batch + jax.lax.div(step, heads), head + jax.lax.rem(step, heads)


def _step(p: Problem, place: Any, pipeline: Pipeline, step: Any, bias: Any, extra: Any, smem: Any) -> Any:
    """The gradient of the scores of one batch and head."""
    gpu, wg = _mosaic.mosaic().gpu, jax.lax.axis_index("wg")
    batch, head, here, first_row, first_key = place
    slot = pipeline.slot(step)
    beside = {**gradient_tile.of_rows(p, p.sides, extra, batch, head, here), "bias": bias}
    q, dout = (smem[name].at[slot * WARPGROUPS + wg] for name in ("q_smem", "dout_smem"))
    keys, values = smem["k_smem"].at[slot], smem["v_smem"].at[slot]
    gpu.barrier_wait(smem["loaded"].at[slot])
    products, dp = scores.multiply((q, _compat.transposed(keys)), (dout, _compat.transposed(values)))
    numbers = [smem["numbers"][slot, i, wg] for i in range(p.numbers)]
    # Keys beyond the last one have gradients that nobody reads.
    masked = p.band != Band(None, None)
    tile = Tile(p.sides, beside, smem, slot, wg, masked, p.band, first_row, first_key, None)
    _, dx, _ = gradient_tile.gradients(p, tile, products, dp, spread(numbers, products.shape, 0), False)
    gpu.commit_smem()  # numbers of rows are read, before TMA writes there again
    if pipeline.stages > 1:
        pipeline.refill(step)
    gpu.barrier_arrive(smem["used"].at[slot])
    if pipeline.stages == 1:
        pipeline.refill(step + 1)
    return dx
