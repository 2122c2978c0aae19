"""Few queries and many keys: heads that share keys as queries of one head, and states of parts of the keys merged.

The state of a part is ``(m, l, sum_j exp(X - m) v_j)``; two are combined by rescaling both to the larger m and adding
(`mcir.monoid.Rescaled`). Written element by element, it is one kernel of XLA's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from mcir.monoid import Rescaled
from pallas_kernels.attention.problem import Problem
from pallas_kernels.attention.sides import Arrays


def merged(p: Problem, sums: Any, m: Any, weights: Any) -> list[Any]:
    """``[O]`` or ``[O, m, l]`` of the states of the splits, which are ``[B * splits, H, S, ...]``."""
    states = [x.reshape(p.batch, p.config.splits, *x.shape[1:]) for x in (m, weights, sums)]
    parts = [tuple(x[:, i] for x in states) for i in range(p.config.splits)]
    largest, total, out = functools.reduce(Rescaled().combine, parts)
    out = out / total[..., None]
    out = out.astype(p.dtype)
    out = out if p.layouts[3] == "bhsd" else out.swapaxes(1, 2)
    return [out, largest, total] if p.with_statistics else [out]


def is_one_query(q: Any, k: Any, layouts: Sequence[str], lower: Any, upper: Any, arrays: Arrays) -> bool:
    """Whether there is one query, whose heads share keys and see the same of them."""
    if q.ndim != 4 or k.ndim != 4 or len(layouts) != 4 or arrays.has_tiles:
        return False
    (queries, heads), (keys, kv_heads) = (
        (x.shape[layout.index("s")], x.shape[layout.index("h")]) for x, layout in zip((q, k), layouts, strict=False)
    )
    is_limited = (lower or 0) > 0 or (upper is not None and upper < keys - 1)
    vectors = [x for pair in (*arrays.segments, (arrays.key_bias,)) for x in pair if x is not None]
    is_shared = all(x.ndim == 3 and x.shape[1] == 1 for x in vectors)
    return queries == 1 and kv_heads not in (0, heads) and heads % kv_heads == 0 and not is_limited and is_shared


def heads_as_queries(
    q: Any, k: Any, arrays: Arrays, layouts: Sequence[str]
) -> tuple[Any, Arrays, Callable[..., tuple[Any, ...]]]:
    """``(q, arrays, unpack)``: the heads that share one of k as so many queries; `unpack` takes results apart."""
    batch, heads, head_dim = q.shape[0], q.shape[layouts[0].index("h")], q.shape[3]
    kv_heads = k.shape[layouts[1].index("h")]
    rows = heads // kv_heads

    def ids(x: Any) -> Any:
        return None if x is None else jnp.broadcast_to(x, (*x.shape[:2], rows))

    def unpack(out: Any, *statistics: Any) -> tuple[Any, ...]:
        shape = (batch, 1, heads, head_dim) if layouts[3] == "bshd" else (batch, heads, 1, head_dim)
        return out.reshape(shape), *(x.reshape(batch, heads, 1) for x in statistics)

    arrays = dataclasses.replace(arrays, segments=tuple((ids(a), b) for a, b in arrays.segments))
    return q.reshape(batch, kv_heads, rows, head_dim), arrays, unpack
