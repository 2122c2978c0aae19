"""The online softmax of 64 queries in registers: scores by blocks, their exponentials, the sum of weighted values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat, _mosaic
from pallas_kernels.attention import dropout, scores, sides
from pallas_kernels.attention.config import QUERY_ROWS
from pallas_kernels.attention.gradient_problem import at
from pallas_kernels.attention.problem import Problem
from pallas_kernels.attention.scores import Band, Blocks

#: Registers of a thread that computes, beside one that loads, where two warpgroups compute.
_REGISTERS = 232


# -- which blocks of keys ----------------------------------------------------------------------------------------------


def visited(p: Problem, place: Any) -> Blocks:
    """The blocks of keys that the CTA of some rows visits; which are seen as a whole, as far as the band goes."""
    _, _, first_row, split = place
    last_row = jnp.minimum(first_row + p.config.rows, p.queries) - 1
    found = scores.blocks(p.band, first_row, last_row, p.keys, p.config.block_k, False)
    low = split * p.split_blocks
    high = jnp.minimum(low + p.split_blocks, p.key_blocks)
    first, stop = (jnp.maximum(found.first, low), jnp.minimum(found.stop, high)) if _skips(p) else (low, high)
    stop = jnp.maximum(stop, first)
    full = jnp.minimum(jnp.maximum(found.full, first), stop)
    return Blocks(first, full, jnp.minimum(jnp.maximum(found.ragged, full), stop), stop)


def _skips(p: Problem) -> bool:
    """Whether blocks that limits hide are left out: what they hold counts where a row has seen nothing else."""
    return p.sides.fill == -math.inf or may_go_on(p) or not p.sides.has_arrays


def may_go_on(p: Problem) -> bool:
    """Whether a CTA may turn back to the blocks it left out, for rows that arrays left nothing to see."""
    has_band = p.band != Band(None, None)
    return p.sides.fill != -math.inf and p.sides.has_arrays and has_band and p.config.splits == 1


def visit(p: Problem, place: Any, smem: Any, me: int, do: Callable[[Any, Any], None]) -> Any:
    """``do(step, block)`` for the blocks that a CTA visits; how many there were. `me`: which one waits to go on."""
    pl = _mosaic.mosaic().pl
    found = visited(p, place)

    @pl.loop(found.first, found.stop)
    def _visible(block: Any) -> None:
        do(block - found.first, block)

    steps = found.visited
    if not may_go_on(p):
        return steps
    rest = _rest(p, smem, me, steps)

    @pl.loop(0, rest)
    def _others(i: Any) -> None:
        do(steps + i, _left_out(i, found))

    return steps + rest


def _rest(p: Problem, smem: Any, me: Any, steps: Any) -> Any:
    """How many more blocks are visited, once all that compute have said whether they need to."""
    _mosaic.mosaic().gpu.barrier_wait(smem["decided"].at[me])
    wanted = [smem["unseen_smem"][wg] for wg in range(p.config.warpgroups)]
    return jnp.where(sum(wanted) > 0, p.key_blocks - steps, 0)


def _left_out(i: Any, found: Blocks) -> Any:
    return jnp.where(i < found.first, i, i + found.visited)


# -- one warpgroup -----------------------------------------------------------------------------------------------------


def compute(p: Problem, place: Any, q: Any, out: Any, statistics: Any, extra: Any, **smem: Any) -> None:
    """The rows of one warpgroup: all blocks of keys, then the results."""
    gpu, c = _mosaic.mosaic().gpu, p.config
    if c.warpgroups > 1:
        gpu.set_max_registers(_REGISTERS, action="increase")
    batch, head, first_row, _ = place
    wg = jax.lax.axis_index("wg")
    first_row = first_row + wg * QUERY_ROWS
    here = _mosaic.mosaic().pl.ds(first_row, QUERY_ROWS)
    loaded = smem["rows_loaded"].at[wg]
    gpu.copy_gmem_to_smem(at(q, p.layouts[0], batch, head, here), smem["rows"].at[wg], loaded)
    mine = sides.of_rows(p.sides, extra, batch, head, here, p.simulated)
    gpu.barrier_wait(loaded)
    kept = dropout.reader(p.sides.keep, extra, (batch, head), (p.queries, p.keys))
    found, step = visited(p, place), functools.partial(_step, p, first_row, mine, kept, smem)

    def visible(carry: Any) -> Any:
        def one(masked: bool, block: Any, carry: Any) -> Any:
            return step(masked, block - found.first, block, carry)

        return scores.sweep(found, p.band, bool(p.keys % c.block_k), one, carry)

    carry = _in_turns(p, wg, smem, visible, _nothing(p))
    if may_go_on(p):
        _say(p, wg, smem, carry[1])
        rest = _rest(p, smem, wg, found.visited)

        def others(carry: Any) -> Any:
            def one(i: Any, carry: Any) -> Any:
                return step(True, found.visited + i, _left_out(i, found), carry)

            return jax.lax.fori_loop(0, rest, one, carry)

        carry = _in_turns(p, wg, smem, others, carry)
    _write(p, place, wg, here, carry, out, statistics, smem)


def _nothing(p: Problem) -> tuple[Any, Any, Any]:
    """The state of rows that have seen nothing."""
    return (
        jnp.zeros((QUERY_ROWS, p.head_dim), jnp.float32),
        jnp.full((QUERY_ROWS,), -jnp.inf, jnp.float32),
        jnp.zeros((QUERY_ROWS,), jnp.float32),
    )


def _in_turns(p: Problem, wg: Any, smem: Any, run: Callable[[Any], Any], carry: Any) -> Any:
    """``run(carry)``, in which two warpgroups take turns on the tensor cores; the first one begins."""
    pl, gpu = _mosaic.mosaic().pl, _mosaic.mosaic().gpu
    if not p.config.ping_pong:
        return run(carry)
    pl.when(wg == 1)(lambda: gpu.barrier_arrive(smem["turn"].at[0]))
    gpu.barrier_wait(smem["turn"].at[wg])
    carry = run(carry)
    pl.when(wg == 0)(lambda: gpu.barrier_arrive(smem["turn"].at[1]))
    return carry


def _say(p: Problem, wg: Any, smem: Any, top: Any) -> None:
    """Whether a row of this warpgroup has seen nothing but the fill, told to all."""
    gpu = _mosaic.mosaic().gpu
    unseen = jnp.where(top <= p.sides.fill, 1.0, 0.0)
    smem["unseen_smem"][wg] = (jnp.max(unseen) > 0).astype(jnp.int32)
    gpu.commit_smem()
    for waiting in range(p.config.warpgroups + 1):
        gpu.barrier_arrive(smem["decided"].at[waiting])


def _write(p: Problem, place: Any, wg: Any, here: Any, carry: Any, out: Any, statistics: Any, smem: Any) -> None:
    gpu = _mosaic.mosaic().gpu
    batch, head, _, split = place
    total, power, weight = carry
    if p.sides.keep is not None:
        total = total * p.sides.keep.factor
    if p.config.splits > 1:
        found, result = smem["sums_smem"].at[wg], out.at[batch * p.config.splits + split, head, here]
        found[...] = total
        batch = batch * p.config.splits + split
    else:
        found, result = smem["rows"].at[wg], at(out, p.layouts[3], batch, head, here)
        found[...] = (total * jax.lax.broadcast_in_dim(1 / weight, total.shape, (0,))).astype(p.dtype)
    if statistics:
        smem["statistics_smem"][0, wg] = power if p.sides.is_exact else power * math.log(2)
        smem["statistics_smem"][1, wg] = weight
    gpu.commit_smem()
    gpu.copy_smem_to_gmem(found, result)
    for i, ref in enumerate(statistics):
        gpu.copy_smem_to_gmem(smem["statistics_smem"].at[i, wg], ref.at[batch, head, here])
    gpu.wait_smem_to_gmem(0)


# -- one block ---------------------------------------------------------------------------------------------------------


def _step(
    p: Problem, first_row: Any, mine: Any, kept: Any, smem: Any, masked: bool, step: Any, block: Any, carry: Any
) -> Any:
    """One block of keys: ``(sum of e V, power, sum of e)`` with it.

    ``e = exp(X) / 2^power``, at most 1; where scores are kept as they are, power is the largest of them instead, and
    ``e = exp(X - power)``.
    """
    pl, gpu = _mosaic.mosaic().pl, _mosaic.mosaic().gpu
    c, wg = p.config, jax.lax.axis_index("wg")
    slot = jax.lax.rem(step, jnp.int32(c.stages))
    total, old, weight = carry

    def products(acc: Any) -> Any:
        gpu.wgmma(acc, smem["rows"].at[wg], _compat.transposed(smem["k_smem"].at[slot]))
        if c.ping_pong:
            gpu.barrier_arrive(smem["turn"].at[1 - wg])
        return acc[...]

    gpu.barrier_wait(smem["k_loaded"].at[slot])
    x = pl.run_scoped(products, gpu.ACC((QUERY_ROWS, c.block_k), jnp.float32))
    x = _seen_scores(p, x, first_row, mine, smem, slot, masked, block)

    def release() -> None:
        if p.sides.copies(1):
            gpu.commit_smem()  # read, before TMA writes there again
        gpu.barrier_arrive(smem["k_used"].at[slot])

    reads_late = p.sides.keep is not None and p.sides.keep.is_read
    if not reads_late:
        release()
    power, correction, e = _exponentials(p, x, old)
    weight = weight * correction + jnp.sum(e, axis=1)
    total = total * jax.lax.broadcast_in_dim(correction, total.shape, (0,))
    e = e.astype(p.dtype)
    total, power, weight, e = jax.lax.optimization_barrier((total, power, weight, e))
    if kept is not None:
        tile = functools.partial(sides.tile, smem, "keep", slot, wg, p.simulated)
        e = jnp.where(kept(first_row, block * c.block_k, e.shape, tile), e, jnp.zeros((), p.dtype))
    if reads_late:
        release()
    if c.ping_pong:
        gpu.barrier_wait(smem["turn"].at[wg])
    gpu.barrier_wait(smem["v_loaded"].at[slot])
    staging = smem["p_smem"].at[wg] if p.simulated else None
    (total,) = scores.add_products((total,), ((e, smem["v_smem"].at[slot]),), staging)
    gpu.barrier_arrive(smem["v_used"].at[slot])
    return total, power, weight


def _unit(p: Problem) -> float:
    """The exponential of a score is 2 to the score, as `_seen_scores` gives it, times this."""
    scale = 1.0 if p.sides.is_exact else p.scale if p.softcap is None else p.softcap
    return scale * scores.LOG2_E


def _seen_scores(p: Problem, x: Any, first_row: Any, mine: Any, smem: Any, slot: Any, masked: bool, block: Any) -> Any:
    """Scores with all that stands between the product and the softmax, but for a factor: see `_unit`."""
    wg, s = jax.lax.axis_index("wg"), p.sides
    if p.softcap is not None:
        # tanh x = 1 - 2 / (1 + e^2x)
        x = 1 - 2 / (1 + jnp.exp2(x * (2 * p.scale / p.softcap * scores.LOG2_E)))
    if s.is_exact:
        x = x * (p.scale if p.softcap is None else p.softcap)
    x = sides.biased(s, mine, x, smem, slot, wg, p.simulated)
    first_key, tail = block * p.config.block_k, p.keys if p.keys % p.config.block_k else None
    one_mask = masked and s.fill == -math.inf
    conditions = sides.seen(s, mine, x.shape, smem, slot, wg, p.simulated)
    if masked:
        in_band = scores.seen(p.band, x.shape, first_row, first_key, tail if one_mask else None)
        conditions += [] if in_band is None else [in_band]
    if conditions:
        x = jnp.where(functools.reduce(jnp.logical_and, conditions), x, s.fill)
    if masked and not one_mask and tail is not None:
        # Where there is no key there is no fill either.
        x = jnp.where(scores.seen(Band(None, None), x.shape, first_row, first_key, tail), x, -jnp.inf)
    return x


def _exponentials(p: Problem, x: Any, old: Any) -> tuple[Any, Any, Any]:
    """``(power, factor of earlier sums, e)``."""
    unit = _unit(p)
    power = jnp.maximum(old, jnp.max(x, axis=1) * (1.0 if p.sides.is_exact else unit))
    # Rows that have seen nothing yet.
    known = jnp.where(power == -jnp.inf, 0.0, power)
    beside = jax.lax.broadcast_in_dim(known, x.shape, (0,))
    if p.sides.is_exact:
        return power, jnp.exp2((old - known) * unit), jnp.exp2((x - beside) * unit)
    return power, jnp.exp2(old - known), jnp.exp2(x * unit - beside)
