"""Norms, forward: ``S = X + R``, ``Y = (S - mean) rstd scale + bias``, the statistics of each row kept.

Each array is read or written once. A block has the rows it works on in registers, and the next ones on the way. Sums
are in float32; a centered variance is computed from the deviations in a second pass over the registers.

Ba, Kiros and Hinton, "Layer normalization", 2016; Zhang and Sennrich, "Root mean square layer normalization", 2019.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mosaic
from pallas_kernels.norm._rows import Rows, added, each, launch, loop, present, wide, widened
from pallas_kernels.norm.config import NormConfig, default, padded

FORMULAS = ("centered", "moments", "mean_square")


class Forward(NamedTuple):
    """Y and S as ``(count, length)``; mean, rstd and slope of each row in float32. None: not asked for."""

    y: Any
    sum: Any
    mean: Any
    rstd: Any
    slope: Any


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
    config: NormConfig | None = None,
    interpret: Any = None,
) -> Forward:
    """Rows normalized.

    Args:
      x: ``(count, length)``, bfloat16, float16 or float32.
      scale: ``(length,)``, in any of these types.
      bias: like `scale`.
      residual: added to `x`, of its shape and type; the sum is rounded to that type as an addition would.
      eps: added to the variance.
      variance: ``"centered"`` (mean of squared deviations), ``"moments"`` (mean square less squared mean) or
        ``"mean_square"`` (no mean is subtracted).
      clamped: a variance below 0 counts as 0.
      dtype: of Y, else that of `x`.
      with_sum: return ``x + residual``.
      with_statistics: return mean (not of a mean square), ``rstd = 1 / sqrt(variance + eps)``, and for a clamped
        variance the derivative of ``max(0, v)``: 1, 1/2 at 0, 0 below.
      config: the launch.
      interpret: parameters of the simulator.

    Raises:
      ValueError: for an unknown formula, rows that are too long, or a launch that does not fit.
    """
    count, length = x.shape
    if variance not in FORMULAS:
        raise ValueError(f"forward(variance=...): expected one of {FORMULAS}, found {variance!r}")
    config = config or default(count, length, x.dtype.itemsize, _mosaic.sm_count())
    config.check(count, length)
    rows = Rows(config, length, 16 // x.dtype.itemsize, bool(interpret))
    width = padded(length, config.threads)
    inputs = {k: rows.grouped(a) for k, a in widened(present(x=x, residual=residual), length, width).items()}
    inputs |= widened(present(scale=scale, bias=bias), length, width)
    out = {"y": rows.struct(count, width, dtype or x.dtype)}
    if with_sum and residual is not None:
        out["sum"] = rows.struct(count, width, x.dtype)
    if with_statistics:
        kept = {"mean": variance != "mean_square", "rstd": True, "slope": clamped}
        out |= {name: rows.struct(count, 0, jnp.float32) for name, wanted in kept.items() if wanted}
    norm = _Norm(rows, count // config.rows, eps, variance, clamped)
    found = launch(norm.norm_forward, config.blocks, inputs, out, interpret, {})
    arrays = {k: found[k].reshape(count, width)[:, :length] for k in ("y", "sum") if k in found}
    return Forward(
        **(dict.fromkeys(Forward._fields) | {k: a.reshape(count) for k, a in found.items() if k not in arrays} | arrays)
    )


@dataclasses.dataclass(frozen=True)
class _Norm:
    """The kernel: what it computes, of how many groups of rows."""

    rows: Rows
    groups: int
    eps: float
    variance: str
    clamped: bool

    def norm_forward(self, refs: dict[str, Any]) -> None:
        rows = self.rows
        read = {name: refs[name] for name in ("x", "residual") if name in refs}

        def load(group: Any) -> Any:
            return {name: rows.load(ref, group) for name, ref in read.items()}

        def step(group: Any, here: Any, carry: Any) -> Any:
            s = added(here)
            if "sum" in refs:
                rows.store(refs["sum"], group, s)
            found, centered = self.statistics(wide(s))
            for name, value in found.items():
                if name in refs:
                    rows.store_statistic(refs[name], group, value)
            y = each(lambda c, r: c * r, centered, rows.beside(found["rstd"]))
            if "scale" in refs:
                y = each(lambda a, b: a * b, y, rows.load_parameter(refs["scale"]))
            if "bias" in refs:
                y = each(lambda a, b: a + b, y, rows.load_parameter(refs["bias"]))
            rows.store(refs["y"], group, y)
            return carry

        loop(rows.config, self.groups, load, step)

    def statistics(self, s: Any) -> tuple[dict[str, Any], Any]:
        """``(mean, rstd and slope of each row, what is multiplied by rstd)``."""
        found: dict[str, Any] = {}
        rows, centered = self.rows, s
        if self.variance != "mean_square":
            found["mean"] = rows.mean(s)
            centered = each(lambda a, m: a - m, s, rows.beside(found["mean"]))
        v = rows.mean(each(jnp.square, centered if self.variance == "centered" else s))
        if self.variance == "moments":
            v = v - found["mean"] * found["mean"]
        if self.clamped:
            one = jnp.float32(1)
            found["slope"] = jnp.where(v > 0.0, one, jnp.where(v == 0.0, one * 0.5, one * 0.0))
            v = jnp.maximum(v, 0.0)
        found["rstd"] = lax.rsqrt(v + self.eps)
        return found, centered
