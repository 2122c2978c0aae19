"""The kernel of dK and dV. Its tiles are turned over: a row is a key, a column a query."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat, _mosaic
from pallas_kernels.attention import scores
from pallas_kernels.attention.gradient_problem import ROWS, WARPGROUPS, Pipeline, Problem, at, kernel


def call(p: Problem, interpret: Any) -> Any:
    """``(q, k, v, dout, logs, delta) -> (dk, dv)``, lengths padded; logs and delta from `queries_gradient`."""
    out_type = [p.like(layout, p.kv_heads, p.keys) for layout in p.layouts[1:3]]
    grid = p.kv_heads, -(-p.keys // p.config.key_rows), p.batch
    return kernel(p, "attention_dkv", functools.partial(_body, p), grid, out_type, interpret)


def _body(p: Problem, *refs: Any) -> None:
    pl, gpu, c = _mosaic.mosaic().pl, _mosaic.mosaic().gpu, p.config
    owners = c.key_rows // ROWS
    own, blocks = p.tiles(owners, ROWS, c.block_q), p.tiles(c.stages, c.block_q, c.block_q)
    numbers = gpu.SMEM((c.stages, c.block_q), jnp.float32)
    allocations = {
        "k_smem": own,
        "v_smem": own,
        "q_smem": blocks,
        "dout_smem": blocks,
        "logs_smem": numbers,
        "delta_smem": numbers,
        "own_loaded": gpu.Barrier(num_arrivals=2, num_barriers=owners),
        "loaded": gpu.Barrier(num_arrivals=4, num_barriers=c.stages),
        "used": gpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=c.stages),
        **p.staging(c.block_q),
    }
    if c.split_sums:
        allocations["summed"] = gpu.Barrier()
    pl.run_scoped(functools.partial(_rows, p, refs), collective_axes="wg", **allocations)


def _rows(p: Problem, refs: Any, **smem: Any) -> None:
    """The keys of one warpgroup: all blocks of queries, one head after the other, then the results."""
    pl, gpu, width = _mosaic.mosaic().pl, _mosaic.mosaic().gpu, p.config.block_q
    q, k, v, dout, logs, delta, dk, dv = refs
    wg, batch, head = (jax.lax.axis_index(a) for a in ("wg", "batch", "head"))
    first_row, band = jax.lax.axis_index("block") * p.config.key_rows, p.band.turned
    last_row = jnp.minimum(first_row + p.config.key_rows, p.keys) - 1
    # Queries beyond the last one have weights of 0.
    found = scores.blocks(band, first_row, last_row, p.queries, width, True)

    def load(step: Any, slot: Any, barrier: Any) -> None:
        of_q, block = head, step
        if p.group > 1:
            of_q, block = head * p.group + jax.lax.div(step, found.visited), jax.lax.rem(step, found.visited)
        rows = pl.ds((found.first + block) * width, width)
        gpu.copy_gmem_to_smem(at(q, p.layouts[0], batch, of_q, rows), smem["q_smem"].at[slot], barrier)
        gpu.copy_gmem_to_smem(at(dout, p.layouts[3], batch, of_q, rows), smem["dout_smem"].at[slot], barrier)
        gpu.copy_gmem_to_smem(logs.at[batch, of_q, rows], smem["logs_smem"].at[slot], barrier)
        gpu.copy_gmem_to_smem(delta.at[batch, of_q, rows], smem["delta_smem"].at[slot], barrier)

    pipeline = Pipeline(p.config.stages, p.group * found.visited, load, smem["loaded"], smem["used"])
    pipeline.start()
    owner = 0 if p.config.split_sums else wg
    first_row = first_row + owner * ROWS
    here = pl.ds(first_row, ROWS)
    keys, values, barrier = smem["k_smem"].at[owner], smem["v_smem"].at[owner], smem["own_loaded"].at[owner]

    def load_own() -> None:
        gpu.copy_gmem_to_smem(at(k, p.layouts[1], batch, head, here), keys, barrier)
        gpu.copy_gmem_to_smem(at(v, p.layouts[2], batch, head, here), values, barrier)

    if p.config.split_sums:
        pl.when(wg == 0)(load_own)
    else:
        load_own()
    gpu.barrier_wait(barrier)

    def sums(of: tuple[str, ...]) -> list[Any]:
        def one_head(member: Any, carry: Any) -> Any:
            before = member * found.visited - found.first
            step = functools.partial(_step, p, of, first_row, pipeline, before, keys, values, smem)
            return scores.sweep(found, band, False, step, carry, p.is_long)

        carry = (jnp.zeros((ROWS, p.head_dim), jnp.float32),) * len(of)
        return one_head(0, carry) if p.group == 1 else jax.lax.fori_loop(0, p.group, one_head, carry)

    def write(total: Any, tile: Any, ref: Any, layout: str) -> None:
        tile[...] = total.astype(p.dtype)
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(tile, at(ref, layout, batch, head, here))

    if not p.config.split_sums:
        dk_sum, dv_sum = sums(("dk", "dv"))
        write(dk_sum * p.scale, keys, dk, p.layouts[1])
        write(dv_sum, values, dv, p.layouts[2])
    else:

        @pl.when(wg == 0)
        def _of_keys() -> None:
            (dk_sum,) = sums(("dk",))
            gpu.barrier_arrive(smem["summed"])
            write(dk_sum * p.scale, values, dk, p.layouts[1])  # which the other one does not read

        @pl.when(wg == 1)
        def _of_values() -> None:
            (dv_sum,) = sums(("dv",))
            gpu.barrier_wait(smem["summed"])
            write(dv_sum, keys, dv, p.layouts[2])

    pipeline.finish()
    gpu.wait_smem_to_gmem(0)


def _step(
    p: Problem, of: tuple[str, ...], first_row: Any, pipeline: Pipeline, before: Any, keys: Any, values: Any, smem: Any,
    masked: bool, block: Any, totals: Any,
) -> Any:  # fmt: skip
    """Sums of what is asked for, ``"dk"`` (over scale) or ``"dv"``, with one more block of queries."""
    gpu, width = _mosaic.mosaic().gpu, p.config.block_q
    step = before + block
    slot = pipeline.slot(step)
    q, dout = smem["q_smem"].at[slot], smem["dout_smem"].at[slot]
    gpu.barrier_wait(smem["loaded"].at[slot])
    tiles = (keys, _compat.transposed(q)), (values, _compat.transposed(dout))
    products, *dp = scores.multiply(*(tiles if "dk" in of else tiles[:1]))
    shape = ROWS, width
    logs = jax.lax.broadcast_in_dim(smem["logs_smem"][slot], shape, (1,))
    visible = scores.seen(p.band.turned, shape, first_row, block * width, None) if masked else None
    weights, slope = scores.weights(products, logs, p.scale, p.softcap, visible)
    pairs = []
    if "dk" in of:
        delta = jax.lax.broadcast_in_dim(smem["delta_smem"][slot], shape, (1,))
        pairs.append((scores.gradient(weights, dp[0], delta, slope).astype(p.dtype), q))
    if "dv" in of:
        pairs.append((weights.astype(p.dtype), dout))
    gpu.commit_smem()  # numbers of rows are read, before TMA writes there again
    pipeline.refill(step)
    staging = smem["staging"].at[jax.lax.axis_index("wg")] if p.simulated else None
    totals = scores.add_products(totals, tuple(pairs), staging)
    gpu.barrier_arrive(smem["used"].at[slot])
    return totals
