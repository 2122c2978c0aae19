"""Norms, forward: ``S = X + R``, ``Y = (S - mean) rstd scale + bias``, the statistics of each row kept.

Each array is read or written once. A block has the rows it works on in registers, and the next ones on the way. Sums
are in float32; a centered variance is computed from the deviations in a second pass over the registers.

Ba, Kiros and Hinton, "Layer normalization", 2016; Zhang and Sennrich, "Root mean square layer normalization", 2019.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mosaic
from pallas_kernels.norm._rows import Rows, each, launch, loop, wide
from pallas_kernels.norm.config import MAX_LENGTH, NormConfig, default, padded

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
      ValueError: for rows longer than `MAX_LENGTH`, an unknown formula, or a launch that does not fit.
    """
    count, length = x.shape
    if variance not in FORMULAS:
        raise ValueError(f"forward(variance=...): expected one of {FORMULAS}, found {variance!r}")
    if length > MAX_LENGTH:
        raise ValueError(f"forward: expected rows of at most {MAX_LENGTH} elements, found {length}")
    config = config or default(count, length, x.dtype.itemsize, _mosaic.sm_count())
    config.check(count, length)
    width, centered = padded(length, config.threads), variance != "mean_square"
    arrays = [x] + ([residual] if residual is not None else [])
    parameters = [p for p in (scale, bias) if p is not None]
    dtype = jnp.dtype(dtype or x.dtype)
    rows = Rows(config, length, 16 // x.dtype.itemsize, bool(interpret))
    if width > length:
        arrays = [jnp.pad(a, ((0, 0), (0, width - length))) for a in arrays]
        parameters = [jnp.pad(p, (0, width - length)) for p in parameters]
    groups = count // config.rows
    keep = with_sum and residual is not None
    kept = {"mean": centered, "rstd": True, "slope": clamped} if with_statistics else {}
    kept = [name for name, wanted in kept.items() if wanted]

    def norm_forward(*refs: Any) -> None:
        read, rest = refs[: len(arrays)], list(refs[len(arrays) :])
        scale_ref = rest.pop(0) if scale is not None else None
        bias_ref = rest.pop(0) if bias is not None else None
        y_ref = rest.pop(0)
        sum_ref = rest.pop(0) if keep else None
        out = dict(zip(kept, rest, strict=True))

        def load(group: Any) -> Any:
            return tuple(rows.load(ref, group) for ref in read)

        def step(group: Any, here: Any, carry: Any) -> Any:
            s = here[0]
            if residual is not None:
                s = each(lambda a, b: (a.astype(jnp.float32) + b.astype(jnp.float32)).astype(x.dtype), *here)
            if sum_ref is not None:
                rows.store(sum_ref, group, s)
            s = wide(s)
            found, centered_s, root = _statistics(rows, s, eps, variance, clamped)
            for name, ref in out.items():
                rows.store_statistic(ref, group, found[name])
            y = each(lambda c, r: c * r, centered_s, rows.beside(root))
            if scale_ref is not None:
                y = each(lambda a, b: a * b, y, rows.load_parameter(scale_ref))
            if bias_ref is not None:
                y = each(lambda a, b: a + b, y, rows.load_parameter(bias_ref))
            rows.store(y_ref, group, y)
            return carry

        loop(config, groups, load, step)

    struct = jax.ShapeDtypeStruct
    shape = jax.eval_shape(rows.grouped, struct((count, width), dtype)).shape
    results = [struct(shape, dtype), *([struct(shape, x.dtype)] if keep else [])]
    results += [struct(shape[:-1], jnp.float32) for _ in kept]
    out = list(launch(norm_forward, config.blocks, results, interpret)(*map(rows.grouped, arrays), *parameters))
    y = out.pop(0).reshape(count, width)[:, :length]
    total = out.pop(0).reshape(count, width)[:, :length] if keep else None
    stats = dict(zip(kept, (s.reshape(count) for s in out), strict=True))
    return Forward(y, total, stats.get("mean"), stats.get("rstd"), stats.get("slope"))


def _statistics(rows: Rows, s: Any, eps: float, variance: str, clamped: bool) -> tuple[dict[str, Any], Any, Any]:
    """``(mean, rstd and slope of each row, what is multiplied by rstd, rstd)``."""
    found: dict[str, Any] = {}
    centered = s
    if variance != "mean_square":
        found["mean"] = rows.mean(s)
        centered = each(lambda a, m: a - m, s, rows.beside(found["mean"]))
    v = rows.mean(each(jnp.square, centered if variance == "centered" else s))
    if variance == "moments":
        v = v - found["mean"] * found["mean"]
    if clamped:
        found["slope"] = jnp.where(v > 0.0, 1.0, jnp.where(v == 0.0, 0.5, 0.0))
        v = jnp.maximum(v, 0.0)
    found["rstd"] = lax.rsqrt(v + eps)
    return found, centered, found["rstd"]
