"""The kernels of `portable` in Triton's language. Importing this module imports Triton.

Exponentials are powers of two: `unit` is log2(e) times what a product of a query and a key, or its tanh, is worth.
"""

# Triton's language: `tl` is no module to pyright where it is not installed, and branches on constants are not run.
# pyright: reportInvalidTypeForm=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false

from __future__ import annotations

import importlib
from typing import Any

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")


@triton.jit
def add(a, b):
    """How sums are reduced."""
    return a + b


@triton.jit
def larger(a, b):
    """How maxima are reduced."""
    return tl.maximum(a, b)


@triton.jit
def tile_of(
    step: tl.constexpr, first, count: tl.constexpr, rows: tl.constexpr, depth: tl.constexpr, width: tl.constexpr
):
    """``(offsets, which are inside)`` of some rows of a head, `count` in all, `step` elements apart."""
    row, column = tl.arange(0, rows), tl.arange(0, width)
    at = first.to(tl.int64) * step + (row[:, None] * step + column[None, :])
    return at, (first + row < count)[:, None] & (column < depth)[None, :]


@triton.jit
def loaded(
    x, step: tl.constexpr, first, count: tl.constexpr, rows: tl.constexpr, depth: tl.constexpr, width: tl.constexpr,
    whole: tl.constexpr,
):  # fmt: skip
    """Some rows of a head, with zeros beyond its ends; `whole`: all of the rows are there."""
    at, inside = tile_of(step, first, count, rows, depth, width)
    if whole and depth == width:
        found = tl.load(x + at)
    else:
        found = tl.load(x + at, mask=inside, other=0.0)
    return found


@triton.jit
def saved(
    x, values, step: tl.constexpr, first, count: tl.constexpr, rows: tl.constexpr, depth: tl.constexpr,
    width: tl.constexpr,
):  # fmt: skip
    """Stores some rows of a head."""
    at, inside = tile_of(step, first, count, rows, depth, width)
    tl.store(x + at, values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def squashed(products, slope: tl.constexpr):
    """``tanh``, of products whose twofold argument of a power of two is `slope` times them."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(products * slope))


@triton.jit
def seen(query, key, queries: tl.constexpr, keys: tl.constexpr, lower: tl.constexpr, upper: tl.constexpr):
    """Which keys which queries see; nothing beyond the ends."""
    found = (query < queries) & (key < keys)
    if lower is not None:
        found = found & (key - query >= lower)
    if upper is not None:
        found = found & (key - query <= upper)
    return found


@triton.jit
def key_limits(
    first_query, queries: tl.constexpr, keys: tl.constexpr, lower: tl.constexpr, upper: tl.constexpr,
    block_q: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """``(first, full, ragged, stop)``: the blocks of keys that a block of queries visits.

    Those in ``full <= block < ragged`` are seen by all its queries as a whole.
    """
    last_query = tl.minimum(first_query + block_q, queries) - 1
    first, stop = first_query * 0, first_query * 0 + (keys + block_k - 1) // block_k
    full, ragged = first_query * 0, first_query * 0 + keys // block_k
    if lower is not None:
        first = tl.maximum(first_query + lower, 0) // block_k
        full = (tl.maximum(last_query + lower, 0) + (block_k - 1)) // block_k
    if upper is not None:
        stop = tl.minimum(stop, (last_query + upper) // block_k + 1)
        ragged = tl.minimum(ragged, (first_query + upper + 1) // block_k)
    full = tl.minimum(full, stop)
    return first, full, tl.maximum(ragged, full), stop


@triton.jit
def query_limits(
    first_key, queries: tl.constexpr, keys: tl.constexpr, lower: tl.constexpr, upper: tl.constexpr,
    block_q: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """``(first, full, ragged, stop)``: the blocks of queries that see some of a block of keys, as in `key_limits`."""
    last_key = tl.minimum(first_key + block_k, keys) - 1
    first, stop = first_key * 0, first_key * 0 + (queries + block_q - 1) // block_q
    full, ragged = first_key * 0, first_key * 0 + queries // block_q
    if upper is not None:
        first = tl.maximum(first_key - upper, 0) // block_q
        full = (tl.maximum(last_key - upper, 0) + (block_q - 1)) // block_q
    if lower is not None:
        stop = tl.minimum(stop, tl.maximum(last_key - lower + block_q, 0) // block_q)
        ragged = tl.minimum(ragged, tl.maximum(first_key - lower + 1, 0) // block_q)
    full = tl.minimum(tl.maximum(full, first), stop)
    return first, full, tl.minimum(tl.maximum(ragged, full), stop), stop


# -- forward ---------------------------------------------------------------------------------------------


@triton.jit
def forward_blocks(
    total, power, weight, rows, k, v, first_query, first, stop,
    k_row: tl.constexpr, v_row: tl.constexpr, queries: tl.constexpr, keys: tl.constexpr, depth: tl.constexpr,
    width: tl.constexpr, unit: tl.constexpr, slope: tl.constexpr, lower: tl.constexpr, upper: tl.constexpr,
    block_q: tl.constexpr, block_k: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """Some blocks of keys: ``(sum of e V, power, sum of e)`` with them: ``e = exp(X) / 2^power``, at most 1."""
    for block in range(first, stop):
        first_key = block * block_k
        some_k = loaded(k, k_row, first_key, keys, block_k, depth, width, not masked)
        scores = tl.dot(rows, tl.trans(some_k))
        if slope is not None:
            scores = squashed(scores, slope)
        scores *= unit
        if masked:
            query, key = first_query + tl.arange(0, block_q), first_key + tl.arange(0, block_k)
            scores = tl.where(seen(query[:, None], key[None, :], queries, keys, lower, upper), scores, float("-inf"))
        old = power
        power = tl.maximum(old, tl.reduce(scores, 1, larger))
        # Rows that have seen nothing yet.
        known = tl.where(power == float("-inf"), 0.0, power)
        correction = tl.exp2(old - known)
        e = tl.exp2(scores - known[:, None])
        weight = weight * correction + tl.reduce(e, 1, add)
        some_v = loaded(v, v_row, first_key, keys, block_k, depth, width, not masked)
        total = tl.dot(e.to(some_v.dtype), some_v, total * correction[:, None])
    return total, power, weight


@triton.jit
def attention_forward(
    q, k, v, out, m, l,
    q_batch: tl.constexpr, q_head: tl.constexpr, q_row: tl.constexpr,
    k_batch: tl.constexpr, k_head: tl.constexpr, k_row: tl.constexpr,
    v_batch: tl.constexpr, v_head: tl.constexpr, v_row: tl.constexpr,
    out_batch: tl.constexpr, out_head: tl.constexpr, out_row: tl.constexpr,
    heads: tl.constexpr, group: tl.constexpr, queries: tl.constexpr, keys: tl.constexpr, depth: tl.constexpr,
    width: tl.constexpr, unit: tl.constexpr, slope: tl.constexpr, lower: tl.constexpr, upper: tl.constexpr,
    block_q: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head: the online softmax over the keys it sees."""
    blocks: tl.constexpr = (queries + block_q - 1) // block_q
    block, which = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    if upper is not None:
        block = blocks - 1 - block  # those with the most keys first
    batch, head = (which // heads).to(tl.int64), (which % heads).to(tl.int64)
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head // group * k_head
    v += batch * v_batch + head // group * v_head
    out += batch * out_batch + head * out_head
    first_query = block * block_q
    rows = loaded(q, q_row, first_query, queries, block_q, depth, width, False)
    total = tl.full((block_q, width), 0.0, tl.float32)
    power = tl.full((block_q,), float("-inf"), tl.float32)
    weight = tl.full((block_q,), 0.0, tl.float32)
    first, full, ragged, stop = key_limits(first_query, queries, keys, lower, upper, block_q, block_k)
    if lower is not None:
        total, power, weight = forward_blocks(
            total, power, weight, rows, k, v, first_query, first, full, k_row, v_row, queries, keys, depth, width, unit,
            slope, lower, upper, block_q, block_k, True,
        )  # fmt: skip
    total, power, weight = forward_blocks(
        total, power, weight, rows, k, v, first_query, full, ragged, k_row, v_row, queries, keys, depth, width, unit,
        slope, lower, upper, block_q, block_k, False,
    )  # fmt: skip
    if lower is not None or upper is not None or keys % block_k != 0:
        total, power, weight = forward_blocks(
            total, power, weight, rows, k, v, first_query, ragged, stop, k_row, v_row, queries, keys, depth, width,
            unit, slope, lower, upper, block_q, block_k, True,
        )  # fmt: skip
    saved(out, total * (1.0 / weight)[:, None], out_row, first_query, queries, block_q, depth, width)
    if m is not None:
        query = first_query + tl.arange(0, block_q)
        at = which.to(tl.int64) * queries + query
        tl.store(m + at, power * 0.6931471805599453, mask=query < queries)
        tl.store(l + at, weight, mask=query < queries)


# -- backward --------------------------------------------------------------------------------------------


@triton.jit
def attention_rows(
    out, dout, m, l, power, delta,
    out_batch: tl.constexpr, out_head: tl.constexpr, out_row: tl.constexpr,
    heads: tl.constexpr, queries: tl.constexpr, depth: tl.constexpr, width: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Of each row ``power``, so that ``P = exp(X) / 2^power``, and ``delta = sum dO O``, in float32."""
    blocks: tl.constexpr = (queries + rows - 1) // rows
    first, which = tl.program_id(0) % blocks * rows, tl.program_id(0) // blocks
    batch, head = (which // heads).to(tl.int64), (which % heads).to(tl.int64)
    place = batch * out_batch + head * out_head
    y = loaded(out + place, out_row, first, queries, rows, depth, width, False).to(tl.float32)
    dy = loaded(dout + place, out_row, first, queries, rows, depth, width, False).to(tl.float32)
    query = first + tl.arange(0, rows)
    at, inside = which.to(tl.int64) * queries + query, query < queries
    tl.store(delta + at, tl.reduce(y * dy, 1, add), mask=inside)
    largest, sum = tl.load(m + at, mask=inside, other=0.0), tl.load(l + at, mask=inside, other=1.0)
    tl.store(power + at, largest * 1.4426950408889634 + tl.log2(sum), mask=inside)


@triton.jit
def weights_and_slopes(products, dp, row_power, row_delta, unit: tl.constexpr, slope: tl.constexpr):
    """``(P, dS)`` of some products of queries and keys, of dO and values, and what their rows have."""
    x = products
    if slope is not None:
        x = squashed(products, slope)
    p = tl.exp2(x * unit - row_power)
    ds = p * (dp - row_delta)
    if slope is not None:
        ds *= 1.0 - x * x
    return p, ds


@triton.jit
def query_gradient_blocks(
    total, rows, drows, row_power, row_delta, k, v, first_query, first, stop,
    k_row: tl.constexpr, v_row: tl.constexpr, queries: tl.constexpr, keys: tl.constexpr, depth: tl.constexpr,
    width: tl.constexpr, unit: tl.constexpr, slope: tl.constexpr, lower: tl.constexpr, upper: tl.constexpr,
    block_q: tl.constexpr, block_k: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """``sum dS K`` with some blocks of keys."""
    for block in range(first, stop):
        first_key = block * block_k
        some_k = loaded(k, k_row, first_key, keys, block_k, depth, width, not masked)
        some_v = loaded(v, v_row, first_key, keys, block_k, depth, width, not masked)
        products, dp = tl.dot(rows, tl.trans(some_k)), tl.dot(drows, tl.trans(some_v))
        _, ds = weights_and_slopes(products, dp, row_power[:, None], row_delta[:, None], unit, slope)
        if masked:
            query, key = first_query + tl.arange(0, block_q), first_key + tl.arange(0, block_k)
            ds = tl.where(seen(query[:, None], key[None, :], queries, keys, lower, upper), ds, 0.0)
        total = tl.dot(ds.to(some_k.dtype), some_k, total)
    return total


@triton.jit
def attention_query_gradient(
    q, k, v, dout, power, delta, dq,
    q_batch: tl.constexpr, q_head: tl.constexpr, q_row: tl.constexpr,
    k_batch: tl.constexpr, k_head: tl.constexpr, k_row: tl.constexpr,
    v_batch: tl.constexpr, v_head: tl.constexpr, v_row: tl.constexpr,
    out_batch: tl.constexpr, out_head: tl.constexpr, out_row: tl.constexpr,
    heads: tl.constexpr, group: tl.constexpr, queries: tl.constexpr, keys: tl.constexpr, depth: tl.constexpr,
    width: tl.constexpr, scale: tl.constexpr, unit: tl.constexpr, slope: tl.constexpr, lower: tl.constexpr,
    upper: tl.constexpr, block_q: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """DQ of a block of queries of one head."""
    blocks: tl.constexpr = (queries + block_q - 1) // block_q
    block, which = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    if upper is not None:
        block = blocks - 1 - block
    batch, head = (which // heads).to(tl.int64), (which % heads).to(tl.int64)
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head // group * k_head
    v += batch * v_batch + head // group * v_head
    dout += batch * out_batch + head * out_head
    dq += batch * q_batch + head * q_head
    first_query = block * block_q
    rows = loaded(q, q_row, first_query, queries, block_q, depth, width, False)
    drows = loaded(dout, out_row, first_query, queries, block_q, depth, width, False)
    query = first_query + tl.arange(0, block_q)
    at = which.to(tl.int64) * queries + query
    row_power = tl.load(power + at, mask=query < queries, other=0.0)
    row_delta = tl.load(delta + at, mask=query < queries, other=0.0)
    total = tl.full((block_q, width), 0.0, tl.float32)
    first, full, ragged, stop = key_limits(first_query, queries, keys, lower, upper, block_q, block_k)
    if lower is not None:
        total = query_gradient_blocks(
            total, rows, drows, row_power, row_delta, k, v, first_query, first, full, k_row, v_row, queries, keys,
            depth, width, unit, slope, lower, upper, block_q, block_k, True,
        )  # fmt: skip
    total = query_gradient_blocks(
        total, rows, drows, row_power, row_delta, k, v, first_query, full, ragged, k_row, v_row, queries, keys, depth,
        width, unit, slope, lower, upper, block_q, block_k, False,
    )  # fmt: skip
    if lower is not None or upper is not None or keys % block_k != 0:
        total = query_gradient_blocks(
            total, rows, drows, row_power, row_delta, k, v, first_query, ragged, stop, k_row, v_row, queries, keys,
            depth, width, unit, slope, lower, upper, block_q, block_k, True,
        )  # fmt: skip
    saved(dq, total * scale, q_row, first_query, queries, block_q, depth, width)


@triton.jit
def key_gradient_blocks(
    dk_total, dv_total, some_k, some_v, q, dout, power, delta, first_key, first, stop,
    q_row: tl.constexpr, out_row: tl.constexpr, queries: tl.constexpr, keys: tl.constexpr, depth: tl.constexpr,
    width: tl.constexpr, unit: tl.constexpr, slope: tl.constexpr, lower: tl.constexpr, upper: tl.constexpr,
    block_q: tl.constexpr, block_k: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """``sum dS^T Q`` and ``sum P^T dO`` with some blocks of queries. Keys are rows here, so that nothing is turned."""
    for block in range(first, stop):
        first_query = block * block_q
        query = first_query + tl.arange(0, block_q)
        rows = loaded(q, q_row, first_query, queries, block_q, depth, width, not masked)
        drows = loaded(dout, out_row, first_query, queries, block_q, depth, width, not masked)
        if masked:
            row_power = tl.load(power + query, mask=query < queries, other=0.0)
            row_delta = tl.load(delta + query, mask=query < queries, other=0.0)
        else:
            row_power, row_delta = tl.load(power + query), tl.load(delta + query)
        products, dp = tl.dot(some_k, tl.trans(rows)), tl.dot(some_v, tl.trans(drows))
        p, ds = weights_and_slopes(products, dp, row_power[None, :], row_delta[None, :], unit, slope)
        if masked:
            key = first_key + tl.arange(0, block_k)
            is_seen = seen(query[None, :], key[:, None], queries, keys, lower, upper)
            p, ds = tl.where(is_seen, p, 0.0), tl.where(is_seen, ds, 0.0)
        dv_total = tl.dot(p.to(drows.dtype), drows, dv_total)
        dk_total = tl.dot(ds.to(rows.dtype), rows, dk_total)
    return dk_total, dv_total


@triton.jit
def attention_key_gradient(
    q, k, v, dout, power, delta, dk, dv,
    q_batch: tl.constexpr, q_head: tl.constexpr, q_row: tl.constexpr,
    k_batch: tl.constexpr, k_head: tl.constexpr, k_row: tl.constexpr,
    v_batch: tl.constexpr, v_head: tl.constexpr, v_row: tl.constexpr,
    out_batch: tl.constexpr, out_head: tl.constexpr, out_row: tl.constexpr,
    heads: tl.constexpr, group: tl.constexpr, queries: tl.constexpr, keys: tl.constexpr, depth: tl.constexpr,
    width: tl.constexpr, scale: tl.constexpr, unit: tl.constexpr, slope: tl.constexpr, lower: tl.constexpr,
    upper: tl.constexpr, block_q: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """DK and dV of a block of keys of one head, summed over the heads of Q that share it, in their order."""
    blocks: tl.constexpr = (keys + block_k - 1) // block_k
    block, which = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    if lower is not None and upper is None:
        block = blocks - 1 - block  # those that the most queries see first
    kv_heads: tl.constexpr = heads // group
    batch, kv_head = (which // kv_heads).to(tl.int64), (which % kv_heads).to(tl.int64)
    k += batch * k_batch + kv_head * k_head
    v += batch * v_batch + kv_head * v_head
    dk += batch * k_batch + kv_head * k_head
    dv += batch * v_batch + kv_head * v_head
    first_key = block * block_k
    some_k = loaded(k, k_row, first_key, keys, block_k, depth, width, False)
    some_v = loaded(v, v_row, first_key, keys, block_k, depth, width, False)
    dk_total = tl.full((block_k, width), 0.0, tl.float32)
    dv_total = tl.full((block_k, width), 0.0, tl.float32)
    first, full, ragged, stop = query_limits(first_key, queries, keys, lower, upper, block_q, block_k)
    for member in range(0, group):
        head = kv_head * group + member
        q_here, dout_here = q + batch * q_batch + head * q_head, dout + batch * out_batch + head * out_head
        row = (batch * heads + head) * queries
        power_here, delta_here = power + row, delta + row
        if upper is not None:
            dk_total, dv_total = key_gradient_blocks(
                dk_total, dv_total, some_k, some_v, q_here, dout_here, power_here, delta_here, first_key, first, full,
                q_row, out_row, queries, keys, depth, width, unit, slope, lower, upper, block_q, block_k, True,
            )  # fmt: skip
        dk_total, dv_total = key_gradient_blocks(
            dk_total, dv_total, some_k, some_v, q_here, dout_here, power_here, delta_here, first_key, full, ragged,
            q_row, out_row, queries, keys, depth, width, unit, slope, lower, upper, block_q, block_k, False,
        )  # fmt: skip
        if lower is not None or upper is not None or queries % block_q != 0:
            dk_total, dv_total = key_gradient_blocks(
                dk_total, dv_total, some_k, some_v, q_here, dout_here, power_here, delta_here, first_key, ragged, stop,
                q_row, out_row, queries, keys, depth, width, unit, slope, lower, upper, block_q, block_k, True,
            )  # fmt: skip
    saved(dk, dk_total * scale, k_row, first_key, keys, block_k, depth, width)
    saved(dv, dv_total, v_row, first_key, keys, block_k, depth, width)
