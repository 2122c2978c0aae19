"""The kernels of `portable` in Triton's language. Importing this module imports Triton."""

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
def row_mean(values, length: tl.constexpr):
    """Of rows whose elements beyond `length` are 0."""
    return tl.reduce(values, 1, add) * (1.0 / length)


@triton.jit
def summed(x, residual, at, inside):
    """``x + residual``, rounded to their type as an addition would."""
    s = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        s += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        s = s.to(x.dtype.element_ty).to(tl.float32)
    return s


@triton.jit
def norm_forward(
    x,
    residual,
    scale,
    bias,
    y,
    sum,
    mean,
    rstd,
    slope,
    count: tl.constexpr,
    length: tl.constexpr,
    eps: tl.constexpr,
    variance: tl.constexpr,
    clamped: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
):
    """Some rows, whole, in registers."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.arange(0, width)
    known = row < count
    inside = known[:, None] & (column < length)[None, :]
    at = row.to(tl.int64)[:, None] * length + column[None, :]
    s = summed(x, residual, at, inside)
    if sum is not None:
        tl.store(sum + at, s.to(sum.dtype.element_ty), mask=inside)
    centered = s
    if variance != "mean_square":
        m = row_mean(s, length)
        centered = tl.where(inside, s - m[:, None], 0.0)
        if mean is not None:
            tl.store(mean + row, m, mask=known)
    if variance == "centered":
        v = row_mean(centered * centered, length)
    else:
        v = row_mean(s * s, length)
    if variance == "moments":
        v -= m * m
    if clamped:
        if slope is not None:
            tl.store(slope + row, tl.where(v > 0.0, 1.0, tl.where(v == 0.0, 0.5, 0.0)), mask=known)
        v = tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL)
    r = 1.0 / tl.sqrt(v + eps)
    if rstd is not None:
        tl.store(rstd + row, r, mask=known)
    out = centered * r[:, None]
    if scale is not None:
        out *= tl.load(scale + column, mask=column < length, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        out += tl.load(bias + column, mask=column < length, other=0.0).to(tl.float32)[None, :]
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward(
    dy,
    x,
    residual,
    dsum,
    rstd,
    mean,
    slope,
    scale,
    dx,
    dscale,
    dbias,
    count: tl.constexpr,
    length: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
    steps: tl.constexpr,
):
    """Some rows at a time: dX, and what they add to the gradients of scale and bias, in float32."""
    block = tl.program_id(0)
    column = tl.arange(0, width)
    if scale is not None:
        factor = tl.load(scale + column, mask=column < length, other=0.0).to(tl.float32)[None, :]
    if dscale is not None:
        scale_total = tl.full((rows, width), 0.0, tl.float32)
    if dbias is not None:
        bias_total = tl.full((rows, width), 0.0, tl.float32)
    for step in range(0, steps):
        row = (block * steps + step) * rows + tl.arange(0, rows)
        known = row < count
        inside = known[:, None] & (column < length)[None, :]
        at = row.to(tl.int64)[:, None] * length + column[None, :]
        r = tl.load(rstd + row, mask=known, other=0.0)
        n = summed(x, residual, at, inside)
        if mean is not None:
            n = n - tl.load(mean + row, mask=known, other=0.0)[:, None]
        n = tl.where(inside, n * r[:, None], 0.0)
        g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        if dscale is not None:
            scale_total += g * n
        if dbias is not None:
            bias_total += g
        if dx is not None:
            if scale is not None:
                g *= factor
            along = row_mean(g * n, length)
            if slope is not None:
                along *= tl.load(slope + row, mask=known, other=0.0)
            out = g - n * along[:, None]
            if mean is not None:
                out -= row_mean(g, length)[:, None]
            out *= r[:, None]
            if dsum is not None:
                out += tl.load(dsum + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(dx + at, out.to(dx.dtype.element_ty), mask=inside)
    if dscale is not None:
        tl.store(dscale + block * length + column, tl.reduce(scale_total, 0, add), mask=column < length)
    if dbias is not None:
        tl.store(dbias + block * length + column, tl.reduce(bias_total, 0, add), mask=column < length)
