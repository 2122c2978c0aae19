"""The kernels of `portable` in Triton's language. Importing this module imports Triton.

Formulas of activations are those of `activations`, where it says why; in Triton there is no tanh either.
"""

# Triton's language: `tl` is no module to pyright where it is not installed, and branches on constants are not run.
# pyright: reportInvalidTypeForm=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false

from __future__ import annotations

import importlib
from typing import Any

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")


@triton.jit
def sigmoid(z):
    """``1 / (1 + exp(-z))``."""
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def tanh(z):
    """Near 0 its series, whose first term left out is below 1e-7 of the sum; else nothing cancels."""
    size = tl.abs(z)
    e = tl.exp(-2.0 * size)
    far = (1.0 - e) / (1.0 + e)
    s = z * z
    near = z + z * s * (-0.33333333 + s * (0.13333333 + s * (-0.053968254 + s * 0.021869488)))
    return tl.where(size < 0.3, near, tl.where(z < 0, -far, far))


@triton.jit
def expm1(z):
    """``exp(z) - 1`` for ``z <= 0``."""
    return tanh(0.5 * z) * (tl.exp(z) + 1.0)


@triton.jit
def log1p(u):
    """``log(1 + u)`` for ``0 <= u <= 1``."""
    w = 1.0 + u
    return tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))


@triton.jit
def erfc(x):
    """The complementary error function."""
    size = tl.abs(x)
    t = 1.0 / (1.0 + 0.5 * size)
    p = 0.22097287 + t * -0.04386112
    p = 0.1763247 + t * (-0.37720734 + t * p)
    p = 0.1857361 + t * (0.02776711 + t * p)
    p = 0.28211913 + t * (0.24605434 + t * p)
    tail = t * (0.28209466 + t * p) * tl.exp(-(x * x))
    return tl.where(x < 0, 2.0 - tail, tail)


@triton.jit
def gelu_cubic(z):
    """The argument of tanh in GELU's approximation."""
    return 0.7978845608028654 * (z + 0.044715 * (z * z * z))


@triton.jit
def value(z, name: tl.constexpr, alpha: tl.constexpr):
    """The activation."""
    if name == "relu":
        y = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif name == "gelu_exact":
        y = (0.5 * z) * erfc(-z * 0.7071067811865476)
    elif name == "gelu_tanh":
        y = z * sigmoid(2.0 * gelu_cubic(z))
    elif name == "silu":
        y = z * sigmoid(z)
    elif name == "tanh":
        y = tanh(z)
    elif name == "sigmoid":
        y = sigmoid(z)
    elif name == "elu":
        y = tl.where(z > 0, z, alpha * expm1(tl.minimum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)))
    elif name == "leaky_relu":
        y = tl.where(z >= 0, z, alpha * z)
    elif name == "softplus":
        y = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL) + log1p(tl.exp(-tl.abs(z)))
    else:
        tl.static_assert(name == "none")
        y = z
    return y


@triton.jit
def gradient(r, t, name: tl.constexpr, alpha: tl.constexpr):
    """``t * act'``, of the result of relu, tanh and sigmoid and of the input of the others."""
    if name == "relu":
        d = tl.where(r > 0, t, 0.0)
    elif name == "gelu_exact":
        d = t * (0.5 * erfc(-r * 0.7071067811865476) + r * (0.3989422804014327 * tl.exp(-0.5 * (r * r))))
    elif name == "gelu_tanh":
        s = sigmoid(2.0 * gelu_cubic(r))
        d = t * (s + r * (s * (1.0 - s)) * (1.5957691216057308 * (1.0 + 0.134145 * (r * r))))
    elif name == "silu":
        s = sigmoid(r)
        d = t * (s + r * (s * (1.0 - s)))
    elif name == "tanh":
        d = (t + t * r) * (1.0 - r)
    elif name == "sigmoid":
        d = t * r * (1.0 - r)
    elif name == "elu":
        d = tl.where(r > 0, t, t * (alpha * tl.exp(tl.minimum(r, 0.0, propagate_nan=tl.PropagateNan.ALL))))
    elif name == "leaky_relu":
        d = tl.where(r >= 0, t, alpha * t)
    elif name == "softplus":
        d = t * sigmoid(r)
    else:
        tl.static_assert(name == "none")
        d = t
    return d


@triton.jit
def gemm_epilogue(
    a,
    b,
    bias,
    y,
    z,
    m: tl.constexpr,
    n: tl.constexpr,
    k: tl.constexpr,
    trans_a: tl.constexpr,
    trans_b: tl.constexpr,
    bias_along: tl.constexpr,
    activation: tl.constexpr,
    alpha: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    group: tl.constexpr,
):
    """One tile of the result. Tiles are made in groups of rows, whose operands L2 then holds."""
    m_tiles: tl.constexpr = (m + block_m - 1) // block_m
    n_tiles: tl.constexpr = (n + block_n - 1) // block_n
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = tile // (group * n_tiles) * group
    high = tl.minimum(m_tiles - first, group)
    within = tile % (group * n_tiles)
    rows = (first + within % high) * block_m + tl.arange(0, block_m)
    columns = within // high * block_n + tl.arange(0, block_n)
    a += batch * (m * k)
    b += batch * (k * n)
    total = tl.full((block_m, block_n), 0.0, tl.float32)
    for step in range(0, (k + block_k - 1) // block_k):
        depth = step * block_k + tl.arange(0, block_k)
        inside_a = (rows < m)[:, None] & (depth < k)[None, :]
        inside_b = (depth < k)[:, None] & (columns < n)[None, :]
        if trans_a:
            at_a = depth[None, :] * m + rows[:, None]
        else:
            at_a = rows[:, None] * k + depth[None, :]
        if trans_b:
            at_b = columns[None, :] * k + depth[:, None]
        else:
            at_b = depth[:, None] * n + columns[None, :]
        total = tl.dot(tl.load(a + at_a, mask=inside_a, other=0.0), tl.load(b + at_b, mask=inside_b, other=0.0), total)
    if bias is not None:
        if bias_along == "n":
            total += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
        else:
            total += tl.load(bias + rows, mask=rows < m, other=0.0).to(tl.float32)[:, None]
    at = rows[:, None] * n + columns[None, :]
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    if z is not None:
        tl.store(z + batch * (m * n) + at, total.to(z.dtype.element_ty), mask=inside)
    out = value(total, activation, alpha)
    tl.store(y + batch * (m * n) + at, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def add(a, b):
    """How sums are reduced."""
    return a + b


@triton.jit
def gemm_epilogue_grad(
    residual,
    dy,
    dz,
    sums,
    m: tl.constexpr,
    n: tl.constexpr,
    activation: tl.constexpr,
    alpha: tl.constexpr,
    activate: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    steps: tl.constexpr,
):
    """A stripe of columns, of one group of rows: dZ, and its sum over them in float32."""
    group = tl.program_id(1)
    columns = tl.program_id(0) * block_n + tl.arange(0, block_n)
    total = tl.full((block_m, block_n), 0.0, tl.float32)
    for step in range(0, steps):
        rows = (group * steps + step) * block_m + tl.arange(0, block_m)
        at = rows[:, None] * n + columns[None, :]
        inside = (rows < m)[:, None] & (columns < n)[None, :]
        r = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        t = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        if activate:
            r = value(r, activation, alpha)
        out = gradient(r, t, activation, alpha)
        tl.store(dz + at, out.to(dz.dtype.element_ty), mask=inside)
        # What lies beyond the last row was read as zeros, which are no rows of dZ.
        total += tl.where(inside, out, 0.0)
    tl.store(sums + group * n + columns, tl.reduce(total, 0, add).to(sums.dtype.element_ty), mask=columns < n)
