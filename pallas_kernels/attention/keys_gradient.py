"""The kernel of dK and dV. Its tiles are turned over: a row is a key, a column a query."""

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
    """``(q, k, v, dout, *numbers, *flags, *beside) -> (dk, dv)``, lengths padded; numbers from `queries_gradient`.

    Behind them, where it is wanted, the gradient of a bias of keys, of each batch and head: float32, of whole CTAs.
    flags: where `Problem.may_see_all`, one for each batch and head: whether a row has seen nothing but the fill.
    """
    out_type = [p.like(layout, p.kv_heads, p.keys) for layout in p.layouts[1:3]]
    if p.of_keys:
        shape = p.batch, p.heads, p.keys + -p.keys % CTA_ROWS
        out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    grid = p.kv_heads, -(-p.keys // p.config.key_rows), p.batch
    return kernel(p, "attention_dkv", functools.partial(_body, p), grid, out_type, interpret)


def _body(p: Problem, *refs: Any) -> None:
    pl, gpu, c = _mosaic.mosaic().pl, _mosaic.mosaic().gpu, p.config
    owners = c.key_rows // ROWS
    own, blocks = p.tiles(owners, ROWS, c.block_q), p.tiles(c.stages, c.block_q, c.block_q)
    beside, results = 4 + p.numbers + p.may_see_all, 2 + p.of_keys
    extra = sides.named(p.turned, refs[beside:-results])
    allocations = {
        "k_smem": own,
        "v_smem": own,
        "q_smem": blocks,
        "dout_smem": blocks,
        "numbers": gpu.SMEM((c.stages, p.numbers, c.block_q), jnp.float32),
        "own_loaded": gpu.Barrier(num_arrivals=2, num_barriers=owners),
        "loaded": gpu.Barrier(num_arrivals=2 + p.numbers + p.turned.copies(owners), num_barriers=c.stages),
        "used": gpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=c.stages),
        **p.staging(c.block_q),
        **sides.allocations(p.turned, c.stages, owners, c.block_q, extra),
    }
    if c.split_sums:
        allocations["summed"] = gpu.Barrier()
    if p.of_keys:
        allocations["row_sums"] = gpu.SMEM((owners, ROWS), jnp.float32)
    refs = *refs[:4], refs[4 : 4 + p.numbers], refs[4 + p.numbers : beside], extra, *refs[-results:]
    pl.run_scoped(functools.partial(_rows, p, refs), collective_axes="wg", **allocations)


def _rows(p: Problem, refs: Any, **smem: Any) -> None:
    """The keys of one warpgroup: all blocks of queries, one head after the other, then the results."""
    pl, gpu, width = _mosaic.mosaic().pl, _mosaic.mosaic().gpu, p.config.block_q
    q, k, v, dout, numbers, flags, extra, dk, dv, *dbias = refs
    wg, batch, head = (jax.lax.axis_index(a) for a in ("wg", "batch", "head"))
    first_row, band = jax.lax.axis_index("block") * p.config.key_rows, p.band.turned
    last_row = jnp.minimum(first_row + p.config.key_rows, p.keys) - 1
    # Queries beyond the last one have weights of 0.
    found = scores.blocks(band, first_row, last_row, p.queries, width, True)
    for flag in flags:
        found = scores.all_if(flag[batch, head] > 0, found, p.queries, width)
    all_rows = [pl.ds(first_row + i * ROWS, ROWS) for i in range(p.config.key_rows // ROWS)]

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

    place = batch, head, first_row, owner
    sums = functools.partial(_sums, p, place, found, pipeline, keys, values, extra, dbias, smem)

    factor = 1.0 if p.turned.keep is None else p.turned.keep.factor

    def write(total: Any, tile: Any, ref: Any, layout: str) -> None:
        tile[...] = total.astype(p.dtype)
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(tile, at(ref, layout, batch, head, here))

    if not p.config.split_sums:
        dk_sum, dv_sum = sums(("dk", "dv"))
        write(dk_sum * p.scale, keys, dk, p.layouts[1])
        write(dv_sum * factor, values, dv, p.layouts[2])
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
            write(dv_sum * factor, keys, dv, p.layouts[2])

    pipeline.finish()
    gpu.wait_smem_to_gmem(0)


def _sums(
    p: Problem, place: Any, found: Any, pipeline: Pipeline, keys: Any, values: Any, extra: Any, dbias: Any, smem: Any,
    of: tuple[str, ...],
) -> Any:  # fmt: skip
    """Sums of what is asked for, ``"dk"`` (over scale) or ``"dv"``, over the heads that share the keys."""
    gpu, (batch, head, first_row, owner) = _mosaic.mosaic().gpu, place
    here = _mosaic.mosaic().pl.ds(first_row, ROWS)
    row_sums = [(smem["row_sums"].at[owner], ref) for ref in dbias if "dk" in of]

    def one_head(member: Any, carry: Any) -> Any:
        before = member * found.visited - found.first
        beside = gradient_tile.of_rows(p, p.turned, extra, batch, head * p.group + member, here, turned=True)
        step = functools.partial(_step, p, of, first_row, owner, pipeline, before, keys, values, beside, smem)
        zeros = (jnp.zeros((ROWS,), jnp.float32),) * len(row_sums)
        carry = scores.sweep(found, p.band.turned, False, step, (*carry, *zeros), p.is_long)
        for total, (tile, ref) in zip(carry[len(of) :], row_sums, strict=True):
            tile[...] = total
            gpu.commit_smem()
            gpu.copy_smem_to_gmem(tile, ref.at[batch, head * p.group + member, here])
            gpu.wait_smem_to_gmem(0)
        return carry[: len(of)]

    carry = (jnp.zeros((ROWS, p.head_dim), jnp.float32),) * len(of)
    return one_head(0, carry) if p.group == 1 else jax.lax.fori_loop(0, p.group, one_head, carry)


def _step(
    p: Problem, of: tuple[str, ...], first_row: Any, owner: Any, pipeline: Pipeline, before: Any, keys: Any,
    values: Any, beside: Any, smem: Any, masked: bool, block: Any, totals: Any,
) -> Any:  # fmt: skip
    """Sums of what is asked for, ``"dk"`` (over scale) or ``"dv"``, with one more block of queries.

    Behind them, if wanted, of the scores' gradients.
    """
    gpu, width = _mosaic.mosaic().gpu, p.config.block_q
    step = before + block
    slot = pipeline.slot(step)
    q, dout = smem["q_smem"].at[slot], smem["dout_smem"].at[slot]
    gpu.barrier_wait(smem["loaded"].at[slot])
    tiles = (keys, _compat.transposed(q)), (values, _compat.transposed(dout))
    products, *dp = scores.multiply(*(tiles if "dk" in of else tiles[:1]))
    # Nothing that is not used, as delta without dK: for what nothing constrains Mosaic tries all layouts.
    used = range(0 if dp else 1, p.numbers)
    numbers = spread([smem["numbers"][slot, i] for i in used], products.shape, 1)
    numbers = numbers if dp else [None, *numbers]
    tile = Tile(p.turned, beside, smem, slot, owner, masked, p.band.turned, first_row, block * width, None)
    weights, dx, dz = gradient_tile.gradients(p, tile, products, dp[0] if dp else None, numbers, "dv" in of)
    factors = {"dk": (dz, q), "dv": (weights, dout)}
    pairs = tuple((factors[name][0].astype(p.dtype), factors[name][1]) for name in of)
    gpu.commit_smem()  # numbers of rows are read, before TMA writes there again
    pipeline.refill(step)
    staging = smem["staging"].at[jax.lax.axis_index("wg")] if p.simulated else None
    row_sums = [x + jnp.sum(dx, axis=1) for x in totals[len(of) :]]
    found = scores.add_products(totals[: len(of)], pairs, staging)
    gpu.barrier_arrive(smem["used"].at[slot])
    return *found, *row_sums
