"""Gradients of attention on Hopper, from O and the maximum and the sum of each row: two kernels.

With ``X`` the scores (see `forward`), ``P = exp(X - m) / l`` and ``Z = Q K^T``::

    delta = sum_d dO O      dZ = P (dO V^T - delta) dX/dZ      dQ = dZ K      dK = dZ^T Q      dV = P^T dO

Dropout multiplies P in dV and ``dO V^T`` in dZ, and leaves delta as it is.

The first kernel owns 128 queries of a head, walks the keys they see and leaves dQ, delta and ``log2 sum exp(X)`` of
each row. The second owns 128 keys and walks the queries that see them, of all heads that share the keys: sums stay in
float32 registers in an order that depends on shapes alone, without atomics, the same bits on every run. P and dZ are
computed in both; tiles that nobody sees are neither loaded nor multiplied.

Read: Q, K, V, dO twice (and blocks again for each CTA, mostly from L2), O once; written: dQ, dK, dV, and two float32
numbers a row. P and dZ are rounded to the type of the operands for the products.
Dao, "FlashAttention-2", 2023; Shah et al., "FlashAttention-3", 2024.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._padding import cut, padded
from pallas_kernels.attention import keys_gradient, queries_gradient
from pallas_kernels.attention.arguments import check_results, check_scores, check_sides, sizes
from pallas_kernels.attention.dropout import Bernoulli
from pallas_kernels.attention.gradient_problem import ATOM_ROWS, CTA_ROWS, BackwardConfig, Problem, default_backward
from pallas_kernels.attention.scores import Band
from pallas_kernels.attention.sides import Arrays, Sides


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
    layouts: tuple[str, ...] = ("bshd",) * 4,
    config: BackwardConfig | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``(dQ, dK, dV)``, laid out and typed like q, k and v.

    Args:
      q: as given to `forward`; heads of 64 or 128.
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
      bias: likewise.
      bias_factor: likewise.
      key_bias: likewise.
      fill: likewise.
      keep: likewise.
      keep_factor: likewise.
      layouts: of q, k, v and O.
      config: tiles; by shape unless told otherwise.
      interpret: parameters of the simulator (`pallas_kernels._mosaic.interpret`).

    Raises:
      ValueError: naming the argument, what was expected, what was found.
    """
    of = sizes("backward", q, k, v, layouts, lambda d: d in (64, 128), "heads of length 64 or 128")
    check_scores("backward", of, scale=scale, lower=lower, upper=upper, softcap=softcap)
    check_results("backward", of, layouts[3], q, out, dout, m, l)
    arrays = Arrays(tuple(segments), mask, bias, key_bias, keep)
    check_sides("backward", of, arrays, bias_factor, fill, keep_factor)
    by_queries, by_keys = (arrays.described(bias_factor, fill, keep_factor, turned) for turned in (False, True))
    if not by_queries.has_arrays:
        # Limits leave each query a key, and beside one the fill is nothing.
        by_queries = by_keys = Sides(keep=by_queries.keep)
    per_column = max(by_queries.per_column, by_keys.per_column)
    is_plain = softcap is None and lower is None
    config = config or default_backward(of.depth, is_plain, by_queries.per_score, per_column)
    p = Problem(
        *of, jnp.dtype(q.dtype), tuple(layouts), float(scale), Band(lower, upper), softcap, config, bool(interpret),
        by_queries, by_keys,
    )  # fmt: skip
    row = layouts[3].index("s"), p.queries
    rows, keys = (layouts[0].index("s"), p.queries), [(x.index("s"), p.keys) for x in layouts[1:3]]
    q, k, v, out, dout = (
        padded(x, dim, ATOM_ROWS) for x, (dim, _) in zip((q, k, v, out, dout), (rows, *keys, row, row), strict=True)
    )
    flags = [_sees_fill(p, m)] if p.may_see_all else []
    m, l = (padded(x, 2, ATOM_ROWS) for x in (m, l))
    ctas = [n + -n % CTA_ROWS for n in (p.queries, p.keys)]
    beside = arrays.prepared(ctas[0], p.keys + -p.keys % config.block_k)
    dq, *numbers = queries_gradient.call(p, interpret)(q, k, v, out, dout, m, l, *beside)
    beside = arrays.prepared(ctas[1], p.queries + -p.queries % config.block_q, turned=True)
    dk, dv = keys_gradient.call(p, interpret)(q, k, v, dout, *numbers, *flags, *beside)
    return cut(dq, *rows), cut(dk, *keys[0]), cut(dv, *keys[1])


def _sees_fill(p: Problem, m: jax.Array) -> jax.Array:
    """For each batch and head of K: whether a row has seen nothing but the fill."""
    rows = m.reshape(p.batch, p.kv_heads, p.group * p.queries)
    return jnp.any(rows <= p.sides.fill, axis=2).astype(jnp.int32)
