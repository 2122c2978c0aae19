"""``O = softmax(scale Q K^T) V`` on Hopper, with the maximum and the sum of each row where the backward wants them.

A CTA takes 128 queries of one head. A warpgroup loads blocks of K and V by TMA, and what lies beside the scores; two of
64 queries each multiply them by wgmma, with the online softmax between the two products, in float32 (`online`). Blocks
of keys that no query of a CTA sees are neither loaded nor multiplied. Where queries are few, several CTAs share the
keys of the same queries, and their states are merged (`merge`).

Read: Q once, K and V once for each CTA of their heads (mostly from L2), and arrays beside the scores likewise; written:
O, and two float32 numbers a row.
Dao et al., "FlashAttention", 2022; Shah et al., "FlashAttention-3", 2024; Dao et al., "Flash-Decoding", 2023.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _mosaic
from pallas_kernels._padding import cut, padded
from pallas_kernels.attention import merge, online, sides
from pallas_kernels.attention.config import QUERY_ROWS, ForwardConfig, head_swizzle
from pallas_kernels.attention.dropout import Bernoulli
from pallas_kernels.attention.gradient_problem import at
from pallas_kernels.attention.problem import Problem, problem
from pallas_kernels.attention.sides import ATOM_ROWS, Arrays

#: Registers of a thread of the warpgroup that loads.
_MEMORY_REGISTERS = 40


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float = 1.0,
    lower: int | None = None,
    upper: int | None = None,
    softcap: float | None = None,
    segments: Sequence[tuple[jax.Array | None, jax.Array]] = (),
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    bias_factor: float = 1.0,
    key_bias: jax.Array | None = None,
    fill: float = -math.inf,
    keep: jax.Array | Bernoulli | None = None,
    keep_factor: float = 1.0,
    layouts: tuple[str, ...] = ("bshd",) * 4,
    with_statistics: bool = False,
    config: ForwardConfig | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """``O = softmax(X) V``, ``X = scale Q K^T`` or ``X = softcap tanh(scale Q K^T / softcap)``, accumulated in float32.

    Args:
      q: ``[B, S, H, D]``, or ``[B, H, S, D]`` where its layout is ``"bhsd"``. bfloat16 or float16; D is a multiple of
        16 up to 256.
      k: ``[B, T, K, D]``, likewise; K divides H, and head h of q attends to head ``h // (H // K)``.
      v: like k.
      scale: a positive number.
      lower: query i sees key j only if ``j - i >= lower``; None: no such limit.
      upper: query i sees key j only if ``j - i <= upper``; None: no such limit. Causal: 0, or T - S where the last
        query sees the last key. Every query must see a key.
      softcap: a positive number; None: none.
      segments: pairs of integers ``[B, H, S]`` (None: all 0) and ``[B, H, T]``: a query sees a key only if each pair is
        the same for both. Of these arrays and those below, dimensions B and H may be 1.
      mask: ``[B, H, S, T]``, boolean: a query sees a key only where it is true.
      bias: ``[B, H, S, T]``, ``bias_factor`` times it is added to X. bfloat16, float16 or float32.
      bias_factor: a number.
      key_bias: ``[B, H, T]``, likewise added, for all queries.
      fill: what X is where a query does not see a key. A query that sees no key has NaN where it is -inf, and
        otherwise the mean of V over the keys whose X is the fill.
      keep: ``[B, H, S, T]``, boolean, B and H as above: behind the softmax, weights are multiplied by ``keep_factor``
        where it is true, and by 0 elsewhere. Or a `Bernoulli`, which the kernel makes tile by tile.
      keep_factor: a number.
      layouts: of q, k, v and O.
      with_statistics: whether the backward wants ``m`` and ``l``.
      config: tiles; by shape unless told otherwise.
      interpret: parameters of the simulator (`pallas_kernels._mosaic.interpret`).

    Returns:
      ``(O,)`` or ``(O, m, l)``: float32 ``[B, H, S]``, ``m = max_j X`` and ``l = sum_j exp(X - m)``.

    Raises:
      ValueError: naming the argument, what was expected, what was found.
    """
    arrays, unpack = Arrays(tuple(segments), mask, bias, key_bias, keep), None
    if merge.is_one_query(q, k, layouts, lower, upper, arrays):
        q, arrays, unpack = merge.heads_as_queries(q, k, arrays, layouts)
        layouts, lower, upper = ("bhsd", *layouts[1:3], "bhsd"), None, None
    p = problem(
        q, k, v, scale=scale, lower=lower, upper=upper, softcap=softcap, arrays=arrays, bias_factor=bias_factor,
        fill=fill, keep_factor=keep_factor, layouts=layouts, with_statistics=with_statistics, config=config,
        simulated=interpret is not None,
    )  # fmt: skip
    operands = [padded(x, layout.index("s"), ATOM_ROWS) for x, layout in zip((q, k, v), layouts, strict=False)]
    beside = arrays.prepared(p.query_blocks * p.config.rows, p.key_blocks * p.config.block_k)
    out, *statistics = _call(p, interpret, beside)(*operands, *beside)
    if p.config.splits > 1:
        out, *statistics = merge.merged(p, out, *statistics)
    found = cut(out, layouts[3].index("s"), p.queries), *(cut(x, 2, p.queries) for x in statistics)
    return found if unpack is None else unpack(*found)


def _call(p: Problem, interpret: Any, beside: Sequence[Any]) -> Any:
    gpu = _mosaic.mosaic().gpu
    return gpu.kernel(
        functools.partial(_body, p, len(beside)),
        out_type=_results(p),
        grid=(p.heads, p.query_blocks * p.config.splits, p.batch),
        grid_names=("head", "block", "batch"),
        num_threads=p.config.warpgroups + 1,
        thread_name="wg",
        compiler_params=gpu.CompilerParams(approx_math=True, lowering_semantics=gpu.LoweringSemantics.Warpgroup),
        kernel_name="attention",
        interpret=interpret,
    )


def _results(p: Problem) -> list[Any]:
    rows = p.queries + -p.queries % ATOM_ROWS
    if p.config.splits > 1:
        lead = p.batch * p.config.splits, p.heads, rows
        return [jax.ShapeDtypeStruct((*lead, p.head_dim), jnp.float32)] + [jax.ShapeDtypeStruct(lead, jnp.float32)] * 2
    sizes = {"b": p.batch, "h": p.heads, "s": rows, "d": p.head_dim}
    found = [jax.ShapeDtypeStruct(tuple(sizes[d] for d in p.layouts[3]), p.dtype)]
    if p.with_statistics:
        found += [jax.ShapeDtypeStruct((p.batch, p.heads, rows), jnp.float32)] * 2
    return found


def _body(p: Problem, beside: int, q: Any, k: Any, v: Any, *refs: Any) -> None:
    """The kernel: allocate, then load with one warpgroup and compute with the others."""
    pl = _mosaic.mosaic().pl
    extra, out, statistics = sides.named(p.sides, refs[:beside]), refs[beside], refs[beside + 1 :]

    @functools.partial(pl.run_scoped, collective_axes="wg", **_allocations(p, extra))
    def _scope(**smem: Any) -> None:
        block = jax.lax.axis_index("block")
        split = jax.lax.rem(block, jnp.int32(p.config.splits))
        block = jax.lax.div(block, jnp.int32(p.config.splits))
        if p.upper is not None:
            block = p.query_blocks - 1 - block  # those with the most keys first
        place = jax.lax.axis_index("batch"), jax.lax.axis_index("head"), block * p.config.rows, split
        wg = jax.lax.axis_index("wg")
        pl.when(wg == p.config.warpgroups)(lambda: _load(p, place, k, v, extra, **smem))
        pl.when(wg < p.config.warpgroups)(lambda: online.compute(p, place, q, out, statistics, extra, **smem))


def _allocations(p: Problem, extra: Any) -> dict[str, Any]:
    gpu, c = _mosaic.mosaic().gpu, p.config
    swizzle = head_swizzle(p.head_dim)
    tiled = gpu.TilingTransform((ATOM_ROWS, swizzle // 2)), gpu.SwizzleTransform(swizzle)
    keys = gpu.SMEM((c.stages, c.block_k, p.head_dim), p.dtype, transforms=tiled)
    barriers = {"rows_loaded": c.warpgroups, "v_loaded": c.stages}
    found = {
        "rows": gpu.SMEM((c.warpgroups, QUERY_ROWS, p.head_dim), p.dtype, transforms=tiled),
        "k_smem": keys,
        "v_smem": keys,
        **{name: gpu.Barrier(num_barriers=n) for name, n in barriers.items()},
        "k_loaded": gpu.Barrier(num_arrivals=1 + p.sides.copies(c.warpgroups), num_barriers=c.stages),
        **{name: gpu.Barrier(num_arrivals=c.warpgroups, num_barriers=c.stages) for name in ("k_used", "v_used")},
        **sides.allocations(p.sides, c.stages, c.warpgroups, c.block_k, extra),
    }
    if c.ping_pong:
        found["turn"] = gpu.Barrier(num_barriers=c.warpgroups)
    if online.may_go_on(p):
        found["decided"] = gpu.Barrier(num_arrivals=c.warpgroups, num_barriers=c.warpgroups + 1)
        found["unseen_smem"] = gpu.SMEM((c.warpgroups,), jnp.int32)
    if p.with_statistics or c.splits > 1:
        found["statistics_smem"] = gpu.SMEM((2, c.warpgroups, QUERY_ROWS), jnp.float32)
    if c.splits > 1:
        found["sums_smem"] = gpu.SMEM((c.warpgroups, QUERY_ROWS, p.head_dim), jnp.float32)
    if p.simulated:
        atoms = gpu.TilingTransform((ATOM_ROWS, 64)), gpu.SwizzleTransform(128)
        found["p_smem"] = gpu.SMEM((c.warpgroups, QUERY_ROWS, c.block_k), p.dtype, transforms=atoms)
    return found


def _load(p: Problem, place: Any, k: Any, v: Any, extra: Any, **smem: Any) -> None:
    """Blocks of K and V, and of what lies beside the scores, one after the other, into the slots that are free."""
    pl, gpu = _mosaic.mosaic().pl, _mosaic.mosaic().gpu
    gpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")
    batch, head, first_row, _ = place
    rows = [pl.ds(first_row + wg * QUERY_ROWS, QUERY_ROWS) for wg in range(p.config.warpgroups)]
    kv_head = jax.lax.div(head, jnp.int32(p.group))

    def load(step: Any, block: Any) -> None:
        slot = jax.lax.rem(step, jnp.int32(p.config.stages))
        keys = pl.ds(block * p.config.block_k, p.config.block_k)
        for name, ref, layout in (("k", k, p.layouts[1]), ("v", v, p.layouts[2])):

            @pl.when(step >= p.config.stages)
            def _wait(name: str = name) -> None:
                gpu.barrier_wait(smem[name + "_used"].at[slot])

            loaded = smem[name + "_loaded"].at[slot]
            gpu.copy_gmem_to_smem(at(ref, layout, batch, kv_head, keys), smem[name + "_smem"].at[slot], loaded)
            if name == "k":
                sides.load(p.sides, extra, smem, (batch, head, rows), keys, slot, loaded)

    steps = online.visit(p, place, smem, p.config.warpgroups, load)

    # What is released for good is waited for too, so that each phase of a barrier has been seen.
    @pl.loop(jnp.maximum(0, steps - p.config.stages), steps)
    def _rest(step: Any) -> None:
        slot = jax.lax.rem(step, jnp.int32(p.config.stages))
        for name in ("k_used", "v_used"):
            gpu.barrier_wait(smem[name].at[slot])
