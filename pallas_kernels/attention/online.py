"""The online softmax of 64 queries in registers: scores by blocks, their exponentials, the sum of weighted values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat, _mosaic
from pallas_kernels.attention import sides
from pallas_kernels.attention.config import QUERY_ROWS
from pallas_kernels.attention.problem import Problem

#: Registers of a thread that computes, beside one that loads, where two warpgroups compute.
_REGISTERS = 232


def at(ref: Any, layout: str, batch: Any, head: Any, rows: Any) -> Any:
    """Some rows of one head."""
    return ref.at[batch, rows, head] if layout == "bshd" else ref.at[batch, head, rows]


# -- which blocks of keys ----------------------------------------------------------------------------------------------


def limits(p: Problem, place: Any) -> tuple[Any, Any, Any, Any]:
    """``(first, full, ragged, stop)``: the blocks of keys that the CTA of some rows visits.

    Those in ``full <= block < ragged`` are seen by all its rows as a whole, as far as limits on the distance go.
    """
    _, _, first_row, split = place
    width, last_row = p.config.block_k, jnp.minimum(first_row + p.config.rows, p.queries) - 1
    first = split * p.split_blocks
    stop = jnp.minimum(first + p.split_blocks, p.key_blocks)
    skips = _skips(p)
    full, ragged = jnp.int32(0), jnp.int32(p.keys // width)
    if p.lower is not None:
        low = jnp.maximum(first_row + p.lower, 0)
        first = jnp.maximum(first, jax.lax.div(low, jnp.int32(width))) if skips else first
        full = jax.lax.div(jnp.maximum(last_row + p.lower, 0) + (width - 1), jnp.int32(width))
    if p.upper is not None:
        high = jax.lax.div(last_row + p.upper, jnp.int32(width)) + 1
        stop = jnp.minimum(stop, high) if skips else stop
        ragged = jnp.minimum(ragged, jax.lax.div(first_row + p.upper + 1, jnp.int32(width)))
    stop = jnp.maximum(stop, first)
    full = jnp.minimum(jnp.maximum(full, first), stop)
    return first, full, jnp.minimum(jnp.maximum(ragged, full), stop), stop


def _skips(p: Problem) -> bool:
    """Whether blocks that limits hide are left out: what they hold counts where a row has seen nothing else."""
    return p.sides.fill == -math.inf or may_go_on(p) or not p.sides.has_arrays


def may_go_on(p: Problem) -> bool:
    """Whether a CTA may turn back to the blocks it left out, for rows that arrays left nothing to see."""
    has_limits = (p.lower, p.upper) != (None, None)
    return p.sides.fill != -math.inf and p.sides.has_arrays and has_limits and p.config.splits == 1


def visit(p: Problem, place: Any, smem: Any, me: int, do: Callable[[Any, Any], None]) -> Any:
    """``do(step, block)`` for the blocks that a CTA visits; how many there were. `me`: which one waits to go on."""
    pl = _mosaic.mosaic().pl
    first, _, _, stop = limits(p, place)

    @pl.loop(first, stop)
    def _visible(block: Any) -> None:
        do(block - first, block)

    steps = stop - first
    if not may_go_on(p):
        return steps
    rest = _rest(p, smem, me, steps)

    @pl.loop(0, rest)
    def _others(i: Any) -> None:
        do(steps + i, _left_out(i, first, stop))

    return steps + rest


def _rest(p: Problem, smem: Any, me: Any, steps: Any) -> Any:
    """How many more blocks are visited, once all that compute have said whether they need to."""
    _mosaic.mosaic().gpu.barrier_wait(smem["decided"].at[me])
    wanted = [smem["unseen_smem"][wg] for wg in range(p.config.warpgroups)]
    return jnp.where(sum(wanted) > 0, p.key_blocks - steps, 0)


def _left_out(i: Any, first: Any, stop: Any) -> Any:
    return jnp.where(i < first, i, i - first + stop)


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
    ids = sides.query_ids(p.sides, extra, batch, head, here, p.simulated)
    gpu.barrier_wait(loaded)
    first, full, ragged, stop = limits(p, place)
    step = functools.partial(_step, p, first_row, ids, smem)
    has_limits, has_tail = (p.lower, p.upper) != (None, None), bool(p.keys % c.block_k)

    def visible(carry: Any) -> Any:
        def run(masked: bool, start: Any, end: Any, carry: Any) -> Any:
            return jax.lax.fori_loop(start, end, lambda b, x: step(masked, b - first, b, x), carry)

        if p.lower is not None:
            carry = run(True, first, full, carry)
        carry = run(False, full, ragged, carry)
        return run(True, ragged, stop, carry) if has_limits or has_tail else carry

    carry = _in_turns(p, wg, smem, visible, _nothing(p))
    if may_go_on(p):
        steps = stop - first
        _say(p, wg, smem, carry[1])
        rest = _rest(p, smem, wg, steps)

        def others(carry: Any) -> Any:
            return jax.lax.fori_loop(0, rest, lambda i, x: step(True, steps + i, _left_out(i, first, stop), x), carry)

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


def _step(p: Problem, first_row: Any, ids: Any, smem: Any, masked: bool, step: Any, block: Any, carry: Any) -> Any:
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
    scores = pl.run_scoped(products, gpu.ACC((QUERY_ROWS, c.block_k), jnp.float32))
    scores = _seen_scores(p, scores, first_row, ids, smem, slot, masked, block)
    if p.sides.has_arrays:
        gpu.commit_smem()  # read, before TMA writes there again
    gpu.barrier_arrive(smem["k_used"].at[slot])
    power, correction, e = _exponentials(p, scores, old)
    weight = weight * correction + jnp.sum(e, axis=1)
    total = total * jax.lax.broadcast_in_dim(correction, total.shape, (0,))
    e = e.astype(p.dtype)
    total, power, weight, e = jax.lax.optimization_barrier((total, power, weight, e))
    if c.ping_pong:
        gpu.barrier_wait(smem["turn"].at[wg])
    gpu.barrier_wait(smem["v_loaded"].at[slot])
    total = _add_product(p, total, e, smem["v_smem"].at[slot], smem)
    gpu.barrier_arrive(smem["v_used"].at[slot])
    return total, power, weight


def _unit(p: Problem) -> float:
    """The exponential of a score is 2 to the score, as `_seen_scores` gives it, times this."""
    scale = 1.0 if p.sides.is_exact else p.scale if p.softcap is None else p.softcap
    return scale * math.log2(math.e)


def _seen_scores(
    p: Problem, scores: Any, first_row: Any, ids: Any, smem: Any, slot: Any, masked: bool, block: Any
) -> Any:
    """Scores with all that stands between the product and the softmax, but for a factor: see `_unit`."""
    wg, s = jax.lax.axis_index("wg"), p.sides
    if p.softcap is not None:
        # tanh x = 1 - 2 / (1 + e^2x)
        scores = 1 - 2 / (1 + jnp.exp2(scores * (2 * p.scale / p.softcap * math.log2(math.e))))
    if s.is_exact:
        scores = scores * (p.scale if p.softcap is None else p.softcap)
    scores = sides.biased(s, scores, smem, slot, wg, p.simulated)
    seen = [sides.seen(s, ids, scores.shape, smem, slot, wg, p.simulated)]
    tail = None
    if masked:
        inside, tail = _inside(p, first_row, block)
        seen.append(inside)
    found = [x for x in seen if x is not None]
    if found:
        scores = jnp.where(functools.reduce(jnp.logical_and, found), scores, s.fill)
    return scores if tail is None else jnp.where(tail, scores, -jnp.inf)


def _inside(p: Problem, first_row: Any, block: Any) -> tuple[Any, Any]:
    """Which scores of a block limits leave, and which belong to a key there is; None: all."""
    shape = QUERY_ROWS, p.config.block_k
    key = jax.lax.broadcasted_iota(jnp.int32, shape, 1) + block * p.config.block_k
    query = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + first_row
    conditions = []
    if p.upper is not None:
        conditions.append(key <= query + p.upper)
    if p.lower is not None:
        conditions.append(key >= query + p.lower)
    inside = functools.reduce(jnp.logical_and, conditions) if conditions else None
    tail = key < p.keys if p.keys % p.config.block_k else None
    return inside, tail


def _exponentials(p: Problem, scores: Any, old: Any) -> tuple[Any, Any, Any]:
    """``(power, factor of earlier sums, e)``."""
    unit = _unit(p)
    power = jnp.maximum(old, jnp.max(scores, axis=1) * (1.0 if p.sides.is_exact else unit))
    # Rows that have seen nothing yet.
    known = jnp.where(power == -jnp.inf, 0.0, power)
    beside = jax.lax.broadcast_in_dim(known, scores.shape, (0,))
    if p.sides.is_exact:
        return power, jnp.exp2((old - known) * unit), jnp.exp2((scores - beside) * unit)
    return power, jnp.exp2(old - known), jnp.exp2(scores * unit - beside)


def _add_product(p: Problem, total: Any, e: Any, values: Any, smem: Any) -> Any:
    """``total + e V``. The simulator knows no product of registers, and no accumulator that starts with a value."""
    pl, gpu = _mosaic.mosaic().pl, _mosaic.mosaic().gpu
    if not p.simulated:

        def add(acc: Any) -> None:
            gpu.wgmma(acc, e, values)

        return pl.run_state(add)(gpu.ACC.init(total))
    staged = smem["p_smem"].at[jax.lax.axis_index("wg")]
    staged[...] = e
    gpu.commit_smem()

    def product(acc: Any) -> Any:
        gpu.wgmma(acc, staged, values)
        return acc[...]

    return total + pl.run_scoped(product, gpu.ACC(total.shape, jnp.float32))
