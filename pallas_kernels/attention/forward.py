"""``O = softmax(scale Q K^T) V`` on Hopper, with the maximum and the sum of each row where the backward wants them.

A CTA takes 128 queries of one head. A warpgroup loads blocks of K and V by TMA; two of 64 queries each multiply them by
wgmma, with the online softmax between the two products, in float32. Exponentials are powers of two: log2(e) is part of
the scale. The two take turns: while one takes exponentials, the other one has the tensor cores. Blocks of keys that no
query of a CTA sees are neither loaded nor multiplied.

Read: Q once, K and V once for each CTA of their heads (mostly from L2); written: O, and two float32 numbers a row.
Dao et al., "FlashAttention", 2022; Shah et al., "FlashAttention-3", 2024.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat, _mosaic
from pallas_kernels.attention.config import (
    CTA_ROWS,
    HEAD_DIMS,
    QUERY_ROWS,
    WARPGROUPS,
    ForwardConfig,
    default_forward,
)

#: Registers of a thread of the warpgroup that loads, and of the others.
_MEMORY_REGISTERS, _COMPUTE_REGISTERS = 40, 232

#: Lengths are padded to multiples of it: a TMA descriptor tiles arrays by atoms of shared memory of so many rows.
_ATOM_ROWS = 8

LAYOUTS = ("bshd", "bhsd")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything the kernel is specialized on. `lower`, `upper`: which keys a query sees, see `forward`."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    dtype: Any
    layouts: tuple[str, ...]
    scale: float
    lower: int | None
    upper: int | None
    softcap: float | None
    with_statistics: bool
    config: ForwardConfig
    simulated: bool

    @property
    def group(self) -> int:
        """Heads of Q for each head of K and V."""
        return self.heads // self.kv_heads

    @property
    def key_blocks(self) -> int:
        return -(-self.keys // self.config.block_k)


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float = 1.0,
    lower: int | None = None,
    upper: int | None = None,
    softcap: float | None = None,
    layouts: tuple[str, ...] = ("bshd",) * 4,
    with_statistics: bool = False,
    config: ForwardConfig | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """``O = softmax(X) V``, ``X = scale Q K^T`` or ``X = softcap tanh(scale Q K^T / softcap)``, accumulated in float32.

    Args:
      q: ``[B, S, H, D]``, or ``[B, H, S, D]`` where its layout is ``"bhsd"``. bfloat16 or float16; D is 64, 128 or 256.
      k: ``[B, T, K, D]``, likewise; K divides H, and head h of q attends to head ``h // (H // K)``.
      v: like k.
      scale: a positive number.
      lower: query i sees key j only if ``j - i >= lower``; None: no such limit.
      upper: query i sees key j only if ``j - i <= upper``; None: no such limit. Causal: 0, or T - S where the last
        query sees the last key. Every query must see a key.
      softcap: a positive number; None: none.
      layouts: of q, k, v and O.
      with_statistics: whether the backward wants ``m`` and ``l``.
      config: tiles; by shape unless told otherwise.
      interpret: parameters of the simulator (`pallas_kernels._mosaic.interpret`).

    Returns:
      ``(O,)`` or ``(O, m, l)``: float32 ``[B, H, S]``, ``m = max_j X`` and ``l = sum_j exp(X - m)`` over the keys seen.

    Raises:
      ValueError: naming the argument, what was expected, what was found.
    """
    problem = _problem(q, k, v, scale, lower, upper, softcap, layouts, with_statistics, config, interpret is not None)
    padded = [_padded(x, layout) for x, layout in zip((q, k, v), layouts, strict=False)]
    out, *statistics = _call(problem, interpret)(*padded)
    return _cut(out, layouts[3].index("s"), problem.queries), *(_cut(x, 2, problem.queries) for x in statistics)


def _padded(x: Any, layout: str) -> Any:
    dim = layout.index("s")
    more = -x.shape[dim] % _ATOM_ROWS
    return jnp.pad(x, [(0, more if d == dim else 0) for d in range(4)]) if more else x


def _cut(x: Any, dim: int, length: int) -> Any:
    return x if x.shape[dim] == length else jax.lax.slice_in_dim(x, 0, length, axis=dim)


def _expect(name: str, ok: bool, expected: str, found: object) -> None:
    if not ok:
        raise ValueError(f"forward({name}=...): expected {expected}, found {found!r}")


def _problem(
    q: Any, k: Any, v: Any, scale: float, lower: int | None, upper: int | None, softcap: float | None, layouts: Any,
    with_statistics: bool, config: ForwardConfig | None, simulated: bool,
) -> Problem:  # fmt: skip
    _expect("layouts", len(layouts) == 4 and set(layouts) <= set(LAYOUTS), f"four of {', '.join(LAYOUTS)}", layouts)
    _expect("q", str(q.dtype) in ("bfloat16", "float16"), "bfloat16 or float16", str(q.dtype))
    sizes = {}
    for name, x, layout in zip("qkv", (q, k, v), layouts, strict=False):
        _expect(name, x.dtype == q.dtype, f"q's dtype {q.dtype}", str(x.dtype))
        _expect(name, x.ndim == 4, "four dimensions", x.shape)
        _expect(name, 0 not in x.shape, "no empty dimension", x.shape)
        sizes[name] = dict(zip(layout, x.shape, strict=True))
    head_dim = sizes["q"]["d"]
    _expect("q", head_dim in HEAD_DIMS, f"heads of length {HEAD_DIMS}", q.shape)
    _expect("k", all(sizes["k"][d] == sizes["q"][d] for d in "bd"), "the batch and the head length of q", k.shape)
    _expect("k", sizes["q"]["h"] % sizes["k"]["h"] == 0, f"a number of heads that divides {sizes['q']['h']}", k.shape)
    _expect("v", sizes["v"] == sizes["k"], f"the sizes of k, {sizes['k']}", v.shape)
    _expect("scale", 0 < scale < 1e6, "a positive number", scale)
    _expect("softcap", softcap is None or 0 < softcap < 1e6, "None or a positive number", softcap)
    queries, keys = sizes["q"]["s"], sizes["k"]["s"]
    _expect("lower", lower is None or queries - 1 + lower < keys, "a key for each query", lower)
    _expect("upper", upper is None or upper >= 0, "a key for each query", upper)
    _expect("upper", lower is None or upper is None or lower <= upper, f"at least the lower limit {lower}", upper)
    return Problem(
        sizes["q"]["b"], sizes["q"]["h"], sizes["k"]["h"], queries, keys, head_dim, jnp.dtype(q.dtype), tuple(layouts),
        float(scale), lower, upper, softcap, with_statistics, config or default_forward(head_dim), simulated,
    )  # fmt: skip


def _call(p: Problem, interpret: Any) -> Any:
    gpu = _mosaic.mosaic().gpu
    rows = p.queries + -p.queries % _ATOM_ROWS
    sizes = {"b": p.batch, "h": p.heads, "s": rows, "d": p.head_dim}
    out_type = [jax.ShapeDtypeStruct(tuple(sizes[d] for d in p.layouts[3]), p.dtype)]
    if p.with_statistics:
        out_type += [jax.ShapeDtypeStruct((p.batch, p.heads, rows), jnp.float32)] * 2
    return gpu.kernel(
        functools.partial(_body, p),
        out_type=out_type,
        grid=(p.heads, -(-p.queries // CTA_ROWS), p.batch),
        grid_names=("head", "block", "batch"),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=gpu.CompilerParams(approx_math=True, lowering_semantics=gpu.LoweringSemantics.Warpgroup),
        kernel_name="attention",
        interpret=interpret,
    )


def _at(ref: Any, layout: str, batch: Any, head: Any, rows: Any) -> Any:
    """Some rows of one head."""
    return ref.at[batch, rows, head] if layout == "bshd" else ref.at[batch, head, rows]


def _body(p: Problem, q: Any, k: Any, v: Any, out: Any, *statistics: Any) -> None:
    """The kernel: allocate, then load with one warpgroup and compute with the others."""
    pl, gpu = _mosaic.mosaic().pl, _mosaic.mosaic().gpu
    c = p.config
    tiled = gpu.TilingTransform((_ATOM_ROWS, 64)), gpu.SwizzleTransform(128)
    keys = gpu.SMEM((c.stages, c.block_k, p.head_dim), p.dtype, transforms=tiled)
    allocations: dict[str, Any] = {
        "rows": gpu.SMEM((WARPGROUPS, QUERY_ROWS, p.head_dim), p.dtype, transforms=tiled),
        "k_smem": keys,
        "v_smem": keys,
        "rows_loaded": gpu.Barrier(num_barriers=WARPGROUPS),
        **{name: gpu.Barrier(num_barriers=c.stages) for name in ("k_loaded", "v_loaded")},
        **{name: gpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=c.stages) for name in ("k_used", "v_used")},
        "turn": gpu.Barrier(num_barriers=WARPGROUPS),
    }
    if p.with_statistics:
        allocations["statistics_smem"] = gpu.SMEM((2, WARPGROUPS, QUERY_ROWS), jnp.float32)
    if p.simulated:
        allocations["p_smem"] = gpu.SMEM((WARPGROUPS, QUERY_ROWS, c.block_k), p.dtype, transforms=tiled)

    @functools.partial(pl.run_scoped, collective_axes="wg", **allocations)
    def _scope(**smem: Any) -> None:
        block = jax.lax.axis_index("block")
        if p.upper is not None:
            block = -(-p.queries // CTA_ROWS) - 1 - block  # those with the most keys first
        place = jax.lax.axis_index("batch"), jax.lax.axis_index("head"), block * CTA_ROWS
        wg = jax.lax.axis_index("wg")
        pl.when(wg == WARPGROUPS)(lambda: _load(p, place, k, v, **smem))
        pl.when(wg < WARPGROUPS)(lambda: _compute(p, place, q, out, statistics, **smem))


def _limits(p: Problem, first_row: Any) -> tuple[Any, Any, Any, Any]:
    """``(first, full, ragged, stop)``: the blocks of keys that the CTA of some rows visits.

    Those in ``full <= block < ragged`` are seen by all its rows as a whole.
    """
    width, last_row = p.config.block_k, jnp.minimum(first_row + CTA_ROWS, p.queries) - 1
    first, stop = jnp.int32(0), jnp.int32(p.key_blocks)
    full, ragged = jnp.int32(0), jnp.int32(p.keys // width)
    if p.lower is not None:
        first = jax.lax.div(jnp.maximum(first_row + p.lower, 0), jnp.int32(width))
        full = jax.lax.div(jnp.maximum(last_row + p.lower, 0) + (width - 1), jnp.int32(width))
    if p.upper is not None:
        stop = jnp.minimum(stop, jax.lax.div(last_row + p.upper, jnp.int32(width)) + 1)
        ragged = jnp.minimum(ragged, jax.lax.div(first_row + p.upper + 1, jnp.int32(width)))
    full = jnp.minimum(full, stop)
    return first, full, jnp.maximum(ragged, full), stop


def _load(p: Problem, place: Any, k: Any, v: Any, **smem: Any) -> None:
    """Blocks of K and V, one after the other, into the slots that are free."""
    pl, gpu = _mosaic.mosaic().pl, _mosaic.mosaic().gpu
    gpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")
    batch, head, first_row = place
    first, _, _, stop = _limits(p, first_row)
    head = jax.lax.div(head, jnp.int32(p.group))

    @pl.loop(first, stop)
    def _blocks(block: Any) -> None:
        step = block - first
        slot = jax.lax.rem(step, jnp.int32(p.config.stages))
        keys = pl.ds(block * p.config.block_k, p.config.block_k)
        for name, ref, layout in (("k", k, p.layouts[1]), ("v", v, p.layouts[2])):

            @pl.when(step >= p.config.stages)
            def _wait(name: str = name) -> None:
                gpu.barrier_wait(smem[name + "_used"].at[slot])

            source = _at(ref, layout, batch, head, keys)
            gpu.copy_gmem_to_smem(source, smem[name + "_smem"].at[slot], smem[name + "_loaded"].at[slot])

    # What is released for good is waited for too, so that each phase of a barrier has been seen.
    @pl.loop(jnp.maximum(first, stop - p.config.stages), stop)
    def _rest(block: Any) -> None:
        slot = jax.lax.rem(block - first, jnp.int32(p.config.stages))
        for name in ("k_used", "v_used"):
            gpu.barrier_wait(smem[name].at[slot])


def _compute(p: Problem, place: Any, q: Any, out: Any, statistics: Any, **smem: Any) -> None:
    """The rows of one warpgroup: all blocks of keys, then the results."""
    pl, gpu = _mosaic.mosaic().pl, _mosaic.mosaic().gpu
    gpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
    batch, head, first_row = place
    wg = jax.lax.axis_index("wg")
    here = pl.ds(first_row + wg * QUERY_ROWS, QUERY_ROWS)
    rows, loaded = smem["rows"].at[wg], smem["rows_loaded"].at[wg]
    gpu.copy_gmem_to_smem(_at(q, p.layouts[0], batch, head, here), rows, loaded)
    gpu.barrier_wait(loaded)
    first, full, ragged, stop = _limits(p, first_row)
    if p.config.ping_pong:
        pl.when(wg == 1)(lambda: gpu.barrier_arrive(smem["turn"].at[0]))
        gpu.barrier_wait(smem["turn"].at[wg])
    carry = (
        jnp.zeros((QUERY_ROWS, p.head_dim), jnp.float32),
        jnp.full((QUERY_ROWS,), -jnp.inf, jnp.float32),
        jnp.zeros((QUERY_ROWS,), jnp.float32),
    )
    step = functools.partial(_step, p, first, first_row + wg * QUERY_ROWS, smem)
    if p.lower is not None:
        carry = jax.lax.fori_loop(first, full, functools.partial(step, True), carry)
    carry = jax.lax.fori_loop(full, ragged, functools.partial(step, False), carry)
    if p.upper is not None or p.lower is not None or p.keys % p.config.block_k:
        carry = jax.lax.fori_loop(ragged, stop, functools.partial(step, True), carry)
    if p.config.ping_pong:
        pl.when(wg == 0)(lambda: gpu.barrier_arrive(smem["turn"].at[1]))
    total, power, weight = carry
    total = total * jax.lax.broadcast_in_dim(1 / weight, total.shape, (0,))
    rows[...] = total.astype(p.dtype)
    if p.with_statistics:
        smem["statistics_smem"][0, wg] = power * math.log(2)
        smem["statistics_smem"][1, wg] = weight
    gpu.commit_smem()
    gpu.copy_smem_to_gmem(rows, _at(out, p.layouts[3], batch, head, here))
    for i, ref in enumerate(statistics):
        gpu.copy_smem_to_gmem(smem["statistics_smem"].at[i, wg], ref.at[batch, head, here])
    gpu.wait_smem_to_gmem(0)


def _unit(p: Problem) -> float:
    """The exponential of a score inside of the kernel is 2 to the score times this."""
    return (p.scale if p.softcap is None else p.softcap) * math.log2(math.e)


def _step(p: Problem, first: Any, first_row: Any, smem: Any, masked: bool, block: Any, carry: Any) -> Any:
    """One block of keys: ``(sum of e V, power, sum of e)`` with it: ``e = exp(X) / 2^power``, at most 1."""
    pl, gpu = _mosaic.mosaic().pl, _mosaic.mosaic().gpu
    c, wg = p.config, jax.lax.axis_index("wg")
    slot = jax.lax.rem(block - first, jnp.int32(c.stages))
    total, old, weight = carry

    def products(acc: Any) -> Any:
        gpu.wgmma(acc, smem["rows"].at[wg], _compat.transposed(smem["k_smem"].at[slot]))
        if c.ping_pong:
            gpu.barrier_arrive(smem["turn"].at[1 - wg])
        return acc[...]

    gpu.barrier_wait(smem["k_loaded"].at[slot])
    scores = pl.run_scoped(products, gpu.ACC((QUERY_ROWS, c.block_k), jnp.float32))
    gpu.barrier_arrive(smem["k_used"].at[slot])
    if p.softcap is not None:
        # tanh x = 1 - 2 / (1 + e^2x)
        scores = 1 - 2 / (1 + jnp.exp2(scores * (2 * p.scale / p.softcap * math.log2(math.e))))
    if masked:
        scores = jnp.where(_seen(p, first_row, block), scores, -jnp.inf)
    unit = _unit(p)
    power = jnp.maximum(old, jnp.max(scores, axis=1) * unit)
    # Rows that have seen nothing yet.
    known = jnp.where(power == -jnp.inf, 0.0, power)
    correction = jnp.exp2(old - known)
    e = jnp.exp2(scores * unit - jax.lax.broadcast_in_dim(known, scores.shape, (0,)))
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


def _seen(p: Problem, first_row: Any, block: Any) -> Any:
    shape = QUERY_ROWS, p.config.block_k
    key = jax.lax.broadcasted_iota(jnp.int32, shape, 1) + block * p.config.block_k
    query = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + first_row
    conditions = []
    if p.upper is not None:
        conditions.append(key <= query + p.upper)
    if p.lower is not None:
        conditions.append(key >= query + p.lower)
    if p.keys % p.config.block_k:
        conditions.append(key < p.keys)
    return functools.reduce(jnp.logical_and, conditions)


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
