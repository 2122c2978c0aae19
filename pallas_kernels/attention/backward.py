"""Gradients of attention on Hopper, from O and the maximum and the sum of each row: two kernels, or three.

With ``X`` the scores (see `forward`), ``P = exp(X - m) / l`` and ``Z = Q K^T``::

    delta = sum_d dO O      dX = P (dO V^T - delta)      dZ = dX dX/dZ      dQ = dZ K      dK = dZ^T Q      dV = P^T dO

Dropout multiplies P in dV and ``dO V^T`` in dZ, and leaves delta as it is.

The first kernel owns 128 queries of a head, walks the keys they see and leaves dQ, delta and ``log2 sum exp(X)`` of
each row. The second owns 128 keys (64 of heads longer than 128: one warpgroup sums dK then, the other one dV) and walks
the queries that see them, of all heads that share the keys: sums stay in float32 registers in an order that depends on
shapes alone, without atomics, the same bits on every run. P and dZ are computed in both; tiles that nobody sees are
neither loaded nor multiplied. Masks and biases of queries x keys are transposed for the second. The gradient of such a
bias is the sum of dX over the batches and heads that share it: a third kernel, `bias_gradient`; that of a bias of keys,
the sum over the queries, comes from the second.

Hidden scores have no gradient. A row that has seen nothing but a finite fill gives weights, and so dV, to all keys
that are filled: the second kernel leaves no tile out for a batch and head that has one.

Read: Q, K, V, dO twice (and blocks again for each CTA, mostly from L2), O once; written: dQ, dK, dV, and two or three
float32 numbers a row. P and dZ are rounded to the type of the operands for the products.
Dao, "FlashAttention-2", 2023; Shah et al., "FlashAttention-3", 2024.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _mosaic
from pallas_kernels._arguments import expect
from pallas_kernels._padding import cut, padded
from pallas_kernels.attention import bias_gradient, keys_gradient, queries_gradient
from pallas_kernels.attention.arguments import check_results, check_scores, check_sides, sizes
from pallas_kernels.attention.config import HEADS, is_head_dim
from pallas_kernels.attention.dropout import Bernoulli
from pallas_kernels.attention.gradient_problem import (
    ATOM_ROWS,
    CTA_ROWS,
    BackwardConfig,
    Problem,
    default_backward,
)
from pallas_kernels.attention.scores import Band
from pallas_kernels.attention.sides import Arrays, Sides, named


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    m: jax.Array,
    l: jax.Array,
    dout: jax.Array,
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
    wanted: Sequence[str] = (),
    layouts: tuple[str, ...] = ("bshd",) * 4,
    config: BackwardConfig | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """``(dQ, dK, dV)``, laid out and typed like q, k and v, and the gradients of biases that are wanted.

    Args:
      q: as given to `forward`.
      k: likewise.
      v: likewise.
      out: O.
      m: float32 ``[B, H, S]``, as `forward` returns it.
      l: likewise.
      dout: the cotangent of O, of its layout and type.
      scale: as given to `forward`, like all until `layouts`.
      lower: likewise.
      upper: likewise.
      softcap: likewise.
      segments: likewise.
      mask: likewise.
      bias: likewise; 16 bits where heads are longer than 224.
      bias_factor: likewise.
      key_bias: likewise.
      fill: likewise.
      keep: likewise.
      keep_factor: likewise.
      wanted: some of ``"bias"`` and ``"key_bias"``: those whose gradients are wanted, in this order, typed like them.
      layouts: of q, k, v and O.
      config: tiles; by shape unless told otherwise.
      interpret: parameters of the simulator (`pallas_kernels._mosaic.interpret`).

    Raises:
      ValueError: naming the argument, what was expected, what was found.
    """
    arrays = Arrays(tuple(segments), mask, bias, key_bias, keep)
    of = sizes("backward", q, k, v, layouts, is_head_dim, HEADS)
    check_scores("backward", of, scale=scale, lower=lower, upper=upper, softcap=softcap)
    check_results("backward", of, layouts[3], q, out, dout, m, l)
    check_sides("backward", of, arrays, bias_factor, fill, keep_factor)
    for name in wanted:
        there = {"bias": bias, "key_bias": key_bias}.get(name)
        expect("backward", "wanted", there is not None, "names of biases that are given", wanted)
    by_queries, by_keys = (arrays.described(bias_factor, fill, keep_factor, turned) for turned in (False, True))
    if not by_queries.has_arrays:
        # Limits leave each query a key, and beside one the fill is nothing.
        by_queries = by_keys = Sides(keep=by_queries.keep)
    per_column = max(by_queries.per_column, by_keys.per_column)
    is_drawn = isinstance(keep, Bernoulli)
    config = config or default_backward(of.head_dim, softcap is None, by_queries.per_score, per_column, is_drawn)
    taken = config.smem_bytes(of.head_dim, by_queries.per_score, per_column)
    fits = interpret is not None or taken <= _mosaic.HOPPER_SMEM_BYTES
    expect("backward", "config", fits, f"at most {_mosaic.HOPPER_SMEM_BYTES} bytes of shared memory", taken)
    p = Problem(
        **dataclasses.asdict(of), dtype=jnp.dtype(q.dtype), layouts=tuple(layouts), scale=float(scale),
        band=Band(lower, upper), softcap=softcap, config=config, simulated=bool(interpret), sides=by_queries,
        turned=by_keys, of_keys="key_bias" in wanted,
    )  # fmt: skip
    return _gradients(p, interpret, arrays, wanted, q, k, v, out, dout, m, l)


def _gradients(
    p: Problem, interpret: Any, arrays: Arrays, wanted: Sequence[str], q: Any, k: Any, v: Any, out: Any, dout: Any,
    m: Any, l: Any,
) -> tuple[Any, ...]:  # fmt: skip
    row, rows = (p.layouts[3].index("s"), p.queries), (p.layouts[0].index("s"), p.queries)
    keys = [(x.index("s"), p.keys) for x in p.layouts[1:3]]
    q, k, v, out, dout = (
        padded(x, dim, ATOM_ROWS) for x, (dim, _) in zip((q, k, v, out, dout), (rows, *keys, row, row), strict=True)
    )
    flags = [_sees_fill(p, m)] if p.may_see_all else []
    m, l = (padded(x, 2, ATOM_ROWS) for x in (m, l))
    ctas = [n + -n % CTA_ROWS for n in (p.queries, p.keys)]
    of_queries = arrays.prepared(ctas[0], p.keys + -p.keys % max(64, p.config.block_k))
    dq, *numbers = queries_gradient.call(p, interpret)(q, k, v, out, dout, m, l, *of_queries)
    of_keys = arrays.prepared(ctas[1], p.queries + -p.queries % p.config.block_q, turned=True)
    dk, dv, *row_sums = keys_gradient.call(p, interpret)(q, k, v, dout, *numbers, *flags, *of_keys)
    found = [cut(dq, *rows), cut(dk, *keys[0]), cut(dv, *keys[1])]
    for name in wanted:
        if name == "bias":
            tiled = named(p.sides, of_queries)["bias"]
            (x,) = bias_gradient.call(p, interpret, tiled)(q, k, v, dout, *numbers, *of_queries)
            found.append(cut(cut(x, 2, p.queries), 3, p.keys))
        else:
            shared = [i for i in (0, 1) if arrays.key_bias.shape[i] == 1]
            x = jnp.sum(cut(row_sums[0], 2, p.keys), axis=shared, keepdims=True)
            found.append(x.astype(arrays.key_bias.dtype))
    return tuple(found)


def _sees_fill(p: Problem, m: jax.Array) -> jax.Array:
    """For each batch and head of K: whether a row has seen nothing but the fill."""
    rows = m.reshape(p.batch, p.kv_heads, p.group * p.queries)
    return jnp.any(rows <= p.sides.fill, axis=2).astype(jnp.int32)
