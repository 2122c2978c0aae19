"""Norms through Triton, for GPUs of Ampere and Ada: the equations of `forward` and `backward`.

Forward: each array is read or written once; a CTA has whole rows in registers. Backward: S and dY are read once, dX is
written once, and each CTA writes the sums over its rows, which are then added up in their order: the same bits on every
run. Statistics and sums are in float32.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _mosaic, _triton
from pallas_kernels.norm.backward import Backward
from pallas_kernels.norm.forward import FORMULAS, Forward

_MODULE = "pallas_kernels.norm.triton_kernels"

#: The longest row.
MAX_LENGTH = 8192


@dataclasses.dataclass(frozen=True)
class RowConfig:
    """One launch.

    Attributes:
      rows: that a CTA has in registers at once.
      warps: of a CTA.
      steps: groups of rows that a CTA works on one after another; 1 in the forward.

    Raises:
      ValueError: naming the attribute, what was expected, what was found.
    """

    rows: int
    warps: int
    steps: int = 1

    def __post_init__(self) -> None:
        for name, most in (("rows", 128), ("warps", 16)):
            found = getattr(self, name)
            if not 1 <= found <= most or found & (found - 1):
                raise ValueError(f"RowConfig({name}=...): expected a power of two up to {most}, found {found!r}")
        if self.steps < 1:
            raise ValueError(f"RowConfig(steps=...): expected at least 1, found {self.steps!r}")


def default(count: int, length: int, backward: bool = False, sm_count: int | None = None) -> RowConfig:
    """16 elements a thread, 2048 a CTA for short rows; in the backward as many CTAs as reside on the device at once."""
    width = _width(length)
    rows = max(1, min(2048 // width, 16))
    warps = max(1, min(16, rows * width // 512))
    if not backward:
        return RowConfig(rows, warps)
    blocks = _mosaic.sm_count(sm_count) * max(1, min(8, 16 // warps))
    return RowConfig(rows, warps, max(1, math.ceil(count / (rows * blocks))))


def partial_bytes(count: int, length: int) -> int:
    """Bytes written and read for one sum over rows, by default."""
    c = default(count, length, backward=True)
    return 8 * length * math.ceil(count / (c.rows * c.steps))


def _width(length: int) -> int:
    """A block's columns, a power of two."""
    return 1 << (length - 1).bit_length()


def _check(name: str, count: int, length: int) -> None:
    if not 0 < length <= MAX_LENGTH or count < 1:
        raise ValueError(f"{name}(x=...): expected rows of 1 to {MAX_LENGTH} elements, found {(count, length)}")


def forward(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    residual: Any = None,
    *,
    eps: float,
    variance: str = "centered",
    clamped: bool = False,
    dtype: Any = None,
    with_sum: bool = False,
    with_statistics: bool = False,
    config: RowConfig | None = None,
    interpret: bool = False,
) -> Forward:
    """Rows normalized. Arguments and results as those of `pallas_kernels.norm.forward`.

    Raises:
      ValueError: for an unknown formula, or rows that are empty or longer than `MAX_LENGTH`.
    """
    count, length = x.shape
    if variance not in FORMULAS:
        raise ValueError(f"forward(variance=...): expected one of {FORMULAS}, found {variance!r}")
    _check("forward", count, length)
    c = config or default(count, length)
    row = jax.ShapeDtypeStruct((count,), jnp.float32)
    found = _triton.call(
        _MODULE,
        "norm_forward",
        {"x": x, "residual": residual, "scale": scale, "bias": bias},
        {
            "y": jax.ShapeDtypeStruct(x.shape, dtype or x.dtype),
            "sum": x if with_sum and residual is not None else None,
            "mean": row if with_statistics and variance != "mean_square" else None,
            "rstd": row if with_statistics else None,
            "slope": row if with_statistics and clamped else None,
        },
        (math.ceil(count / c.rows),),
        constants={
            **{"count": count, "length": length, "eps": float(eps), "variance": variance, "clamped": clamped},
            **{"rows": c.rows, "width": _width(length)},
        },
        num_warps=c.warps,
        interpret=interpret,
    )
    return Forward(**{name: found.get(name) for name in Forward._fields})


def backward(
    dy: Any,
    x: Any,
    rstd: Any,
    mean: Any = None,
    slope: Any = None,
    scale: Any = None,
    residual: Any = None,
    dsum: Any = None,
    *,
    with_dx: bool = True,
    dscale: Any = None,
    dbias: Any = None,
    config: RowConfig | None = None,
    interpret: bool = False,
) -> Backward:
    """Cotangents of a norm's inputs. Arguments and results as those of `pallas_kernels.norm.backward`.

    Raises:
      ValueError: for rows that are empty or longer than `MAX_LENGTH`.
    """
    count, length = x.shape
    _check("backward", count, length)
    c = config or default(count, length, backward=True)
    blocks = math.ceil(count / (c.rows * c.steps))
    partial = jax.ShapeDtypeStruct((blocks, length), jnp.float32)
    found = _triton.call(
        _MODULE,
        "norm_backward",
        {
            **{"dy": dy, "x": x, "residual": residual, "dsum": dsum if with_dx else None},
            **{"rstd": rstd, "mean": mean, "slope": slope, "scale": scale if with_dx else None},
        },
        {
            "dx": x if with_dx else None,
            "dscale": None if dscale is None else partial,
            "dbias": None if dbias is None else partial,
        },
        (blocks,),
        constants={"count": count, "length": length, "rows": c.rows, "width": _width(length), "steps": c.steps},
        num_warps=c.warps,
        interpret=interpret,
    )
    totals = {
        name: jnp.sum(found[name], axis=0).astype(dtype)
        for name, dtype in (("dscale", dscale), ("dbias", dbias))
        if dtype is not None
    }
    return Backward(found.get("dx"), totals.get("dscale"), totals.get("dbias"))
