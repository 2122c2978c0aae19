"""Gradients of attention on Hopper, from O and the maximum and the sum of each row: two kernels.

With ``X`` the scores (see `forward`), ``P = exp(X - m) / l`` and ``Z = Q K^T``::

    delta = sum_d dO O      dZ = P (dO V^T - delta) dX/dZ      dQ = dZ K      dK = dZ^T Q      dV = P^T dO

The first kernel owns 128 queries of a head, walks the keys they see and leaves dQ, delta and ``log2 sum exp(X)`` of
each row. The second owns 128 keys (64 of heads longer than 128: one warpgroup sums dK then, the other one dV) and walks
the queries that see them, of all heads that share the keys: sums stay in float32 registers in an order that depends on
shapes alone, without atomics, the same bits on every run. P and dZ are computed in both; tiles that nobody sees are
neither loaded nor multiplied.

Read: Q, K, V, dO twice (and blocks again for each CTA, mostly from L2), O once; written: dQ, dK, dV, and two float32
numbers a row. P and dZ are rounded to the type of the operands for the products.
Dao, "FlashAttention-2", 2023; Shah et al., "FlashAttention-3", 2024.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._padding import cut, padded
from pallas_kernels.attention import keys_gradient, queries_gradient
from pallas_kernels.attention.arguments import check_results, check_scores, sizes
from pallas_kernels.attention.config import HEADS, is_head_dim
from pallas_kernels.attention.gradient_problem import ATOM_ROWS, BackwardConfig, Problem, default_backward
from pallas_kernels.attention.scores import Band


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
    layouts: tuple[str, ...] = ("bshd",) * 4,
    config: BackwardConfig | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``(dQ, dK, dV)``, laid out and typed like q, k and v.

    Args:
      q: as given to `forward`.
      k: likewise.
      v: likewise.
      out: O.
      m: float32 ``[B, H, S]``, as `forward` returns it.
      l: likewise.
      dout: the cotangent of O, of its layout and type.
      scale: as given to `forward`, like `lower`, `upper`, `softcap` and `layouts`.
      lower: likewise.
      upper: likewise.
      softcap: likewise.
      layouts: of q, k, v and O.
      config: tiles; by shape unless told otherwise.
      interpret: parameters of the simulator (`pallas_kernels._mosaic.interpret`).

    Raises:
      ValueError: naming the argument, what was expected, what was found.
    """
    of = sizes("backward", q, k, v, layouts, is_head_dim, HEADS)
    check_scores("backward", of, scale=scale, lower=lower, upper=upper, softcap=softcap)
    check_results("backward", of, layouts[3], q, out, dout, m, l)
    config = config or default_backward(of.depth, softcap is None)
    p = Problem(
        *of, jnp.dtype(q.dtype), tuple(layouts), float(scale), Band(lower, upper), softcap, config, bool(interpret)
    )
    row = layouts[3].index("s"), p.queries
    rows, keys = (layouts[0].index("s"), p.queries), [(x.index("s"), p.keys) for x in layouts[1:3]]
    q, k, v, out, dout = (
        padded(x, dim, ATOM_ROWS) for x, (dim, _) in zip((q, k, v, out, dout), (rows, *keys, row, row), strict=True)
    )
    m, l = (padded(x, 2, ATOM_ROWS) for x in (m, l))
    dq, logs, delta = queries_gradient.call(p, interpret)(q, k, v, out, dout, m, l)
    dk, dv = keys_gradient.call(p, interpret)(q, k, v, dout, logs, delta)
    return cut(dq, *rows), cut(dk, *keys[0]), cut(dv, *keys[1])
