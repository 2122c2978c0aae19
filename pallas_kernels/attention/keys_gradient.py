"""The kernel of dK and dV. Its tiles are turned over: a row is a key, a column a query."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat, _mosaic
from pallas_kernels.attention import dropout, gradient_tile, scores, sides
from pallas_kernels.attention.gradient_problem import CTA_ROWS, ROWS, WARPGROUPS, Pipeline, Problem, at, kernel
from pallas_kernels.attention.gradient_tile import Tile, spread


def call(p: Problem, interpret: Any) -> Any:
    """``(q, k, v, dout, *numbers, *flags, *beside) -> (dk, dv)``, lengths padded; numbers from `queries_gradient`.

    Behind them, where it is wanted, the gradient of a bias of keys, of each batch and head: float32, of whole CTAs.
    flags: where `Problem.may_see_all`, one for each batch and head: whether a row has seen nothing but the fill.
    """
    out_type = [p.like(layout, p.kv_heads, p.keys) for layout in p.layouts[1:3]]
    if p.of_keys:
        shape = p.batch, p.heads, p.keys + -p.keys % CTA_ROWS
        out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    grid = p.kv_heads, -(-p.keys // CTA_ROWS), p.batch
    return kernel(p, "attention_dkv", functools.partial(_body, p), grid, out_type, interpret)


def _body(p: Problem, *refs: Any) -> None:
    pl, gpu, c = _mosaic.mosaic().pl, _mosaic.mosaic().gpu, p.config
    own, blocks = p.tiles(WARPGROUPS, ROWS), p.tiles(c.stages, c.block_q)
    beside, results = 4 + p.numbers + p.may_see_all, 2 + p.of_keys
    extra = sides.named(p.turned, refs[beside:-results])
    allocations = {
        "k_smem": own,
        "v_smem": own,
        "q_smem": blocks,
        "dout_smem": blocks,
        "numbers": gpu.SMEM((c.stages, p.numbers, c.block_q), jnp.float32),
        "own_loaded": gpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
        "loaded": gpu.Barrier(num_arrivals=2 + p.numbers + p.turned.copies(WARPGROUPS), num_barriers=c.stages),
        "used": gpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=c.stages),
        **p.staging(c.block_q),
        **sides.allocations(p.turned, c.stages, WARPGROUPS, c.block_q, extra),
    }
    if p.of_keys:
        allocations["row_sums"] = gpu.SMEM((WARPGROUPS, ROWS), jnp.float32)
    refs = *refs[:4], refs[4 : 4 + p.numbers], refs[4 + p.numbers : beside], extra, *refs[-results:]
    pl.run_scoped(functools.partial(_rows, p, refs), collective_axes="wg", **allocations)


def _rows(p: Problem, refs: Any, **smem: Any) -> None:
    """The keys of one warpgroup: all blocks of queries, one head after the other, then the results."""
    pl, gpu, width = _mosaic.mosaic().pl, _mosaic.mosaic().gpu, p.config.block_q
    q, k, v, dout, numbers, flags, extra, dk, dv, *dbias = refs
    wg, batch, head = (jax.lax.axis_index(a) for a in ("wg", "batch", "head"))
    first_row, band = jax.lax.axis_index("block") * CTA_ROWS, p.band.turned
    # Queries beyond the last one have weights of 0.
    found = scores.blocks(band, first_row, jnp.minimum(first_row + CTA_ROWS, p.keys) - 1, p.queries, width, True)
    for flag in flags:
        found = scores.all_if(flag[batch, head] > 0, found, p.queries, width)
    all_rows = [pl.ds(first_row + i * ROWS, ROWS) for i in range(WARPGROUPS)]

    def load(step: Any, slot: Any, barrier: Any) -> None:
        of_q, block = head, step
        if p.group > 1:
            of_q, block = head * p.group + jax.lax.div(step, found.visited), jax.lax.rem(step, found.visited)
        rows = pl.ds((found.first + block) * width, width)
        gpu.copy_gmem_to_smem(at(q, p.layouts[0], batch, of_q, rows), smem["q_smem"].at[slot], barrier)
        gpu.copy_gmem_to_smem(at(dout, p.layouts[3], batch, of_q, rows), smem["dout_smem"].at[slot], barrier)
        for i, ref in enumerate(numbers):
            gpu.copy_gmem_to_smem(ref.at[batch, of_q, rows], smem["numbers"].at[slot, i], barrier)
        sides.load(p.turned, extra, smem, (batch, of_q, all_rows), rows, slot, barrier)

    pipeline = Pipeline(p.config.stages, p.group * found.visited, load, smem["loaded"], smem["used"])
    pipeline.start()
    here = pl.ds(first_row + wg * ROWS, ROWS)
    keys, values, barrier = smem["k_smem"].at[wg], smem["v_smem"].at[wg], smem["own_loaded"].at[wg]
    gpu.copy_gmem_to_smem(at(k, p.layouts[1], batch, head, here), keys, barrier)
    gpu.copy_gmem_to_smem(at(v, p.layouts[2], batch, head, here), values, barrier)
    gpu.barrier_wait(barrier)

    def one_head(member: Any, carry: Any) -> Any:
        before = member * found.visited - found.first
        of_q = head * p.group + member
        kept = dropout.reader(p.turned.keep, extra, (batch, of_q), (p.queries, p.keys), turned=True)
        beside = sides.of_rows(p.turned, extra, batch, of_q, here, p.simulated), kept
        step = functools.partial(_step, p, first_row + wg * ROWS, pipeline, before, keys, values, beside, smem)
        row_sums = [jnp.zeros((ROWS,), jnp.float32)] * len(dbias)
        dk_sum, dv_sum, *row_sums = scores.sweep(found, band, False, step, (*carry, *row_sums))
        for total, ref in zip(row_sums, dbias, strict=True):
            smem["row_sums"][wg] = total
            gpu.commit_smem()
            gpu.copy_smem_to_gmem(smem["row_sums"].at[wg], ref.at[batch, head * p.group + member, here])
            gpu.wait_smem_to_gmem(0)
        return dk_sum, dv_sum

    zeros = jnp.zeros((ROWS, p.head_dim), jnp.float32)
    carry = zeros, zeros
    dk_sum, dv_sum = one_head(0, carry) if p.group == 1 else jax.lax.fori_loop(0, p.group, one_head, carry)
    keys[...] = (dk_sum * p.scale).astype(p.dtype)
    values[...] = (dv_sum if p.turned.keep is None else dv_sum * p.turned.keep.factor).astype(p.dtype)
    gpu.commit_smem()
    gpu.copy_smem_to_gmem(keys, at(dk, p.layouts[1], batch, head, here))
    gpu.copy_smem_to_gmem(values, at(dv, p.layouts[2], batch, head, here))
    pipeline.finish()
    gpu.wait_smem_to_gmem(0)


def _step(
    p: Problem, first_row: Any, pipeline: Pipeline, before: Any, keys: Any, values: Any, beside: Any, smem: Any,
    masked: bool, block: Any, totals: Any,
) -> Any:  # fmt: skip
    """``(dK over scale, dV)`` with one more block of queries; behind them, if wanted, sums of the scores' gradients."""
    gpu, width = _mosaic.mosaic().gpu, p.config.block_q
    step = before + block
    slot = pipeline.slot(step)
    q, dout = smem["q_smem"].at[slot], smem["dout_smem"].at[slot]
    gpu.barrier_wait(smem["loaded"].at[slot])
    products, dp = scores.multiply((keys, _compat.transposed(q)), (values, _compat.transposed(dout)))
    wg, numbers = jax.lax.axis_index("wg"), [smem["numbers"][slot, i] for i in range(p.numbers)]
    tile = Tile(p.turned, beside[0], smem, slot, wg, masked, p.band.turned, first_row, block * width, None, beside[1])
    weights, dx, dz = gradient_tile.gradients(p, tile, products, dp, spread(numbers, products.shape, 1), True)
    dz = dz.astype(p.dtype)
    gpu.commit_smem()  # numbers of rows are read, before TMA writes there again
    pipeline.refill(step)
    staging = smem["staging"].at[wg] if p.simulated else None
    row_sums = [x + jnp.sum(dx, axis=1) for x in totals[2:]]
    found = scores.add_products(totals[:2], ((dz, q), (weights.astype(p.dtype), dout)), staging)
    gpu.barrier_arrive(smem["used"].at[slot])
    return *found, *row_sums
