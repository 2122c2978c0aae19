"""The kernel of dQ, which also leaves what the kernel of dK and dV wants to know of each query."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat, _mosaic
from pallas_kernels.attention import gradient_tile, scores, sides
from pallas_kernels.attention.gradient_problem import CTA_ROWS, ROWS, WARPGROUPS, Pipeline, Problem, at, kernel
from pallas_kernels.attention.gradient_tile import Tile, spread


def call(p: Problem, interpret: Any) -> Any:
    """``(q, k, v, out, dout, m, l, *beside) -> (dq, delta, *statistics)``, lengths padded.

    delta and `gradient_tile.statistics`: float32, of whole CTAs.
    """
    out_type = [p.like(p.layouts[0], p.heads, p.queries), *[p.row_numbers()] * p.numbers]
    grid = p.heads, -(-p.queries // CTA_ROWS), p.batch
    return kernel(p, "attention_dq", functools.partial(_body, p), grid, out_type, interpret)


def _body(p: Problem, *refs: Any) -> None:
    pl, gpu, c = _mosaic.mosaic().pl, _mosaic.mosaic().gpu, p.config
    own, blocks = p.tiles(WARPGROUPS, ROWS, c.block_k), p.tiles(c.stages, c.block_k, c.block_k)
    beside = len(refs) - 8 - p.numbers
    extra = sides.named(p.sides, refs[7 : 7 + beside])
    allocations = {
        **dict.fromkeys(_own(p), own),
        "k_smem": blocks,
        "v_smem": blocks,
        "numbers": gpu.SMEM((2 + p.numbers, WARPGROUPS, ROWS), jnp.float32),
        "own_loaded": gpu.Barrier(num_arrivals=4 if p.is_long else 5, num_barriers=WARPGROUPS),
        "loaded": gpu.Barrier(num_arrivals=2 + p.sides.copies(WARPGROUPS), num_barriers=c.stages),
        "used": gpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=c.stages),
        **p.staging(c.block_k),
        **sides.allocations(p.sides, c.stages, WARPGROUPS, c.block_k, extra),
    }
    if p.is_long:
        allocations["q_loaded"] = gpu.Barrier(num_barriers=WARPGROUPS)
    refs = *refs[:7], extra, *refs[7 + beside :]
    pl.run_scoped(functools.partial(_rows, p, refs), collective_axes="wg", **allocations)


def _rows(p: Problem, refs: Any, **smem: Any) -> None:
    """The rows of one warpgroup: what belongs to them, all blocks of keys, then the results."""
    pl, gpu = _mosaic.mosaic().pl, _mosaic.mosaic().gpu
    q, k, v, out, dout, m, l, extra, dq, *numbers_refs = refs
    wg, batch, head, block = (jax.lax.axis_index(a) for a in ("wg", "batch", "head", "block"))
    if p.band.upper is not None:
        block = -(-p.queries // CTA_ROWS) - 1 - block  # those with the most keys first
    first_row = block * CTA_ROWS
    found = scores.blocks(
        p.band, first_row, jnp.minimum(first_row + CTA_ROWS, p.queries) - 1, p.keys, p.config.block_k, False
    )
    kv_head = jax.lax.div(head, jnp.int32(p.group))
    all_rows = [pl.ds(first_row + i * ROWS, ROWS) for i in range(WARPGROUPS)]

    def load(step: Any, slot: Any, barrier: Any) -> None:
        keys = pl.ds((found.first + step) * p.config.block_k, p.config.block_k)
        gpu.copy_gmem_to_smem(at(k, p.layouts[1], batch, kv_head, keys), smem["k_smem"].at[slot], barrier)
        gpu.copy_gmem_to_smem(at(v, p.layouts[2], batch, kv_head, keys), smem["v_smem"].at[slot], barrier)
        sides.load(p.sides, extra, smem, (batch, head, all_rows), keys, slot, barrier)

    pipeline = Pipeline(p.config.stages, found.visited, load, smem["loaded"], smem["used"])
    pipeline.start()
    here = pl.ds(first_row + wg * ROWS, ROWS)
    mine, numbers, barrier = {n: smem[n].at[wg] for n in _own(p)}, smem["numbers"], smem["own_loaded"].at[wg]
    # Where rows of O and of Q take turns, O comes first and dQ last.
    for_out = mine["q_smem" if p.is_long else "out_smem"]

    def load_own(ref: Any, layout: str, tile: Any, barrier: Any) -> None:
        gpu.copy_gmem_to_smem(at(ref, layout, batch, head, here), tile, barrier)

    load_own(out, p.layouts[3], for_out, barrier)
    load_own(dout, p.layouts[3], mine["dout_smem"], barrier)
    for i, ref in enumerate((m, l)):
        gpu.copy_gmem_to_smem(ref.at[batch, head, here], numbers.at[i, wg], barrier)
    if not p.is_long:
        load_own(q, p.layouts[0], mine["q_smem"], barrier)
    beside = gradient_tile.of_rows(p, p.sides, extra, batch, head, here)
    gpu.barrier_wait(barrier)
    delta = jnp.sum(for_out[...].astype(jnp.float32) * mine["dout_smem"][...].astype(jnp.float32), axis=1)
    if p.is_long:
        gpu.commit_smem()  # read, before TMA writes there
        load_own(q, p.layouts[0], for_out, smem["q_loaded"].at[wg])
    found_numbers = [delta, *gradient_tile.statistics(p, numbers[0, wg], numbers[1, wg])]
    if p.is_long:
        gpu.barrier_wait(smem["q_loaded"].at[wg])
    step = functools.partial(_step, p, first_row + wg * ROWS, pipeline, found.first, found_numbers, mine, beside, smem)
    zeros = jnp.zeros((ROWS, p.head_dim), jnp.float32)
    dq_sum = scores.sweep(found, p.band, bool(p.keys % p.config.block_k), step, zeros, p.is_long)
    for_out[...] = (dq_sum * p.scale).astype(p.dtype)
    for i, x in enumerate(found_numbers):
        numbers[2 + i, wg] = x
    gpu.commit_smem()
    gpu.copy_smem_to_gmem(for_out, at(dq, p.layouts[0], batch, head, here))
    for i, ref in enumerate(numbers_refs):
        gpu.copy_smem_to_gmem(numbers.at[2 + i, wg], ref.at[batch, head, here])
    pipeline.finish()
    gpu.wait_smem_to_gmem(0)


def _own(p: Problem) -> tuple[str, ...]:
    """Names of the tiles that hold rows of one warpgroup."""
    return ("q_smem", "dout_smem") if p.is_long else ("q_smem", "out_smem", "dout_smem")


def _step(
    p: Problem, first_row: Any, pipeline: Pipeline, first: Any, numbers: Any, mine: Any, beside: Any, smem: Any,
    masked: bool, block: Any, total: Any,
) -> Any:  # fmt: skip
    """Returns dQ over `scale` with one more block of keys."""
    gpu, width = _mosaic.mosaic().gpu, p.config.block_k
    step = block - first
    slot = pipeline.slot(step)
    keys, values = smem["k_smem"].at[slot], smem["v_smem"].at[slot]
    gpu.barrier_wait(smem["loaded"].at[slot])
    products, dp = scores.multiply(
        (mine["q_smem"], _compat.transposed(keys)), (mine["dout_smem"], _compat.transposed(values))
    )
    wg, tail = jax.lax.axis_index("wg"), p.keys if p.keys % width else None
    tile = Tile(p.sides, beside, smem, slot, wg, masked, p.band, first_row, block * width, tail)
    _, _, dz = gradient_tile.gradients(p, tile, products, dp, spread(numbers, products.shape, 0), False)
    dz = dz.astype(p.dtype)
    if p.sides.copies(1):
        gpu.commit_smem()  # read, before TMA writes there again
    pipeline.refill(step)
    staging = smem["staging"].at[wg] if p.simulated else None
    (total,) = scores.add_products((total,), ((dz, keys),), staging)
    gpu.barrier_arrive(smem["used"].at[slot])
    return total
