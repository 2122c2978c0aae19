"""Gradients of attention on Hopper, from O and the maximum and the sum of each row: two kernels.

With ``X`` the scores (see `forward`), ``P = exp(X - m) / l`` and ``Z = Q K^T``::

    delta = sum_d dO O      dZ = P (dO V^T - delta) dX/dZ      dQ = dZ K      dK = dZ^T Q      dV = P^T dO

The first kernel owns 128 queries of a head, walks the keys they see and leaves dQ, delta and ``log2 sum exp(X)`` of
each row. The second owns 128 keys and walks the queries that see them, of all heads that share the keys: sums stay in
float32 registers in an order that depends on shapes alone, without atomics, the same bits on every run. P and dZ are
computed in both; tiles that nobody sees are neither loaded nor multiplied.

Read: Q, K, V, dO twice (and blocks again for each CTA, mostly from L2), O once; written: dQ, dK, dV, and two float32
numbers a row. P and dZ are rounded to the type of the operands for the products.
Dao, "FlashAttention-2", 2023; Shah et al., "FlashAttention-3", 2024.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import keys_gradient, queries_gradient
from pallas_kernels.attention.gradient_problem import BackwardConfig, Problem, default_backward, padded_rows
from pallas_kernels.attention.scores import Band

_LAYOUTS = ("bshd", "bhsd")


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
      q: as given to `forward`; heads of 64 or 128.
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
    p = _problem((q, k, v, out, dout), (m, l), scale, Band(lower, upper), softcap, layouts, config, bool(interpret))
    row = layouts[3].index("s"), p.queries
    rows, keys = (layouts[0].index("s"), p.queries), [(x.index("s"), p.keys) for x in layouts[1:3]]
    q, k, v, out, dout = (
        _padded(x, *dim) for x, dim in zip((q, k, v, out, dout), (rows, *keys, row, row), strict=True)
    )
    m, l = (_padded(x, 2, p.queries) for x in (m, l))
    dq, logs, delta = queries_gradient.call(p, interpret)(q, k, v, out, dout, m, l)
    dk, dv = keys_gradient.call(p, interpret)(q, k, v, dout, logs, delta)
    return _cut(dq, *rows), _cut(dk, *keys[0]), _cut(dv, *keys[1])


def _padded(x: Any, dim: int, length: int) -> Any:
    more = padded_rows(length) - length
    return jnp.pad(x, [(0, more if d == dim else 0) for d in range(x.ndim)]) if more else x


def _cut(x: Any, dim: int, length: int) -> Any:
    return x if x.shape[dim] == length else jax.lax.slice_in_dim(x, 0, length, axis=dim)


def _expect(name: str, ok: bool, expected: str, found: object) -> None:
    if not ok:
        raise ValueError(f"backward({name}=...): expected {expected}, found {found!r}")


def _problem(
    arrays: tuple[Any, ...], statistics: tuple[Any, ...], scale: float, band: Band, softcap: float | None,
    layouts: Any, config: BackwardConfig | None, simulated: bool,
) -> Problem:  # fmt: skip
    _expect("layouts", len(layouts) == 4 and set(layouts) <= set(_LAYOUTS), f"four of {', '.join(_LAYOUTS)}", layouts)
    dtype, sizes = arrays[0].dtype, {}
    _expect("q", str(dtype) in ("bfloat16", "float16"), "bfloat16 or float16", str(dtype))
    for name, x, layout in zip(("q", "k", "v", "out", "dout"), arrays, (*layouts, layouts[3]), strict=True):
        _expect(name, x.dtype == dtype, f"q's dtype {dtype}", str(x.dtype))
        _expect(name, x.ndim == 4 and 0 not in x.shape, "four dimensions, none of them empty", x.shape)
        sizes[name] = dict(zip(layout, x.shape, strict=True))
    of_q, of_k = sizes["q"], sizes["k"]
    _expect("q", of_q["d"] in (64, 128), "heads of length 64 or 128", arrays[0].shape)
    _expect("k", all(of_k[d] == of_q[d] for d in "bd"), "the batch and the head length of q", arrays[1].shape)
    _expect("k", of_q["h"] % of_k["h"] == 0, f"a number of heads that divides {of_q['h']}", arrays[1].shape)
    _expect("v", sizes["v"] == of_k, f"the sizes of k, {of_k}", arrays[2].shape)
    for name, x in (("out", arrays[3]), ("dout", arrays[4])):
        _expect(name, sizes[name] == of_q, f"the sizes of q, {of_q}", x.shape)
    rows = of_q["b"], of_q["h"], of_q["s"]
    for name, x in zip("ml", statistics, strict=True):
        _expect(name, x.shape == rows and x.dtype == jnp.float32, f"float32 {rows}", (x.shape, str(x.dtype)))
    _expect("scale", 0 < scale < 1e6, "a positive number", scale)
    _expect("softcap", softcap is None or 0 < softcap < 1e6, "None or a positive number", softcap)
    return Problem(
        rows[0], rows[1], of_k["h"], rows[2], of_k["s"], of_q["d"], jnp.dtype(dtype), tuple(layouts), float(scale),
        band, softcap, config or default_backward(of_q["d"], softcap is None and band.lower is None), simulated,
    )  # fmt: skip
