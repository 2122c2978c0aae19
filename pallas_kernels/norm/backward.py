"""Norms, backward: dX (which is dR) and the gradients of scale and bias, from what the forward kept.

For each row, with ``N = (S - mean) rstd`` and ``g = dY scale``::

    dX = dR = rstd (g - E[g] - a N E[g N]) + dS      dscale = sum dY N      dbias = sum dY

where a is the derivative of the clamp, 1 without one, and E[g] is left out for a mean square. One kernel reads S and dY
once, writes dX once, and for each block the sums over its rows; a second one adds those up. Both in a fixed order: the
same bits on every run. Sums are in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _mosaic
from pallas_kernels.norm._rows import Rows, each, launch, loop, wide
from pallas_kernels.norm.config import MAX_LENGTH, NormConfig, default, padded


class Backward(NamedTuple):
    """dX as ``(count, length)``, dscale and dbias as ``(length,)`` in float32. None: not asked for."""

    dx: Any
    dscale: Any
    dbias: Any


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
    with_dscale: bool = False,
    with_dbias: bool = False,
    config: NormConfig | None = None,
    interpret: Any = None,
) -> Backward:
    """Cotangents of a norm's inputs.

    Args:
      dy: ``(count, length)``, of Y.
      x: what was normalized, or with `residual` the other addend of it.
      rstd: of each row, float32, as `forward` returns it.
      mean: likewise; None for a mean square.
      slope: likewise; None where the variance is not clamped.
      scale: ``(length,)``.
      residual: added to `x` again.
      dsum: cotangent of S from elsewhere, added to dX.
      with_dx: dX is wanted.
      with_dscale: the sum of dY N over rows is wanted.
      with_dbias: the sum of dY over rows is wanted.
      config: the launch.
      interpret: parameters of the simulator.

    Raises:
      ValueError: for rows longer than `MAX_LENGTH`, or a launch that does not fit.
    """
    count, length = x.shape
    if length > MAX_LENGTH:
        raise ValueError(f"backward: expected rows of at most {MAX_LENGTH} elements, found {length}")
    config = config or default(count, length, _mosaic.sm_count(), backward=True)
    config.check(count, length)
    arrays = {"dy": dy, "x": x, "residual": residual, "dsum": dsum if with_dx else None}
    arrays = {name: a for name, a in arrays.items() if a is not None}
    statistics = {name: s for name, s in (("rstd", rstd), ("mean", mean), ("slope", slope)) if s is not None}
    factor = {"scale": scale} if scale is not None and with_dx else {}
    width = padded(length, config.threads)
    rows = Rows(config, length, width, min(a.dtype.itemsize for a in arrays.values()), bool(interpret))
    groups = count // config.rows
    sums = [name for name, wanted in (("dscale", with_dscale), ("dbias", with_dbias)) if wanted]

    def norm_backward(*refs: Any) -> None:
        given = iter(refs)
        read = {name: next(given) for name in arrays}
        kept = {name: next(given) for name in statistics}
        scale_ref = next(given) if factor else None
        dx_ref = next(given) if with_dx else None
        partial = {name: next(given) for name in sums}
        totals = _Totals(rows, config, sums, list(given))

        def load(group: Any) -> Any:
            return {name: rows.load(ref, group) for name, ref in read.items()}

        def step(group: Any, here: Any, carry: Any) -> Any:
            row = {name: rows.load_statistic(ref, group) for name, ref in kept.items()}
            dy, s = wide(here["dy"]), wide(here["x"])
            if residual is not None:
                s = each(lambda a, b: (a + b).astype(x.dtype).astype(jnp.float32), s, wide(here["residual"]))
            root = rows.beside(row["rstd"])
            if mean is not None:
                s = each(lambda a, m: a - m, s, rows.beside(row["mean"]))
            n = each(lambda a, r: a * r, s, root)
            terms = {"dscale": lambda: each(lambda a, b: a * b, dy, n), "dbias": lambda: dy}
            carry = totals.add(carry, {name: terms[name]() for name in sums})
            if dx_ref is not None:
                g = dy if scale_ref is None else each(lambda a, b: a * b, dy, rows.load_parameter(scale_ref))
                dx = _dx(rows, g, n, root, row, centered=mean is not None)
                if "dsum" in here:
                    dx = each(lambda a, b: a + b, dx, wide(here["dsum"]))
                rows.store(dx_ref, group, dx)
            return carry

        totals.write(partial, loop(config, groups, load, step, totals.start()))

    struct = jax.ShapeDtypeStruct
    shape = jax.eval_shape(rows.grouped, struct((count, width), dy.dtype)).shape
    out = [struct(shape, x.dtype)] if with_dx else []
    blocks = (config.blocks, *shape[1:])
    out += [struct(blocks, jnp.float32) for _ in sums]
    scratch = [rows.gpu.SMEM(shape[1:], jnp.float32) for _ in sums] if config.shared_sums else []
    beyond = width - length
    inputs = [rows.grouped(jnp.pad(a, ((0, 0), (0, beyond))) if beyond else a) for a in arrays.values()]
    inputs += [rows.grouped(s) for s in statistics.values()]
    inputs += [jnp.pad(s, (0, beyond)) if beyond else s for s in factor.values()]
    found = list(launch(norm_backward, config, out, interpret, scratch)(*inputs))
    dx = found.pop(0).reshape(count, width)[:, :length] if with_dx else None
    added = dict(zip(sums, (jnp.sum(p.reshape(-1, width), axis=0)[:length] for p in found), strict=True))
    return Backward(dx, added.get("dscale"), added.get("dbias"))


def _dx(rows: Rows, g: Any, n: Any, root: Any, row: dict[str, Any], centered: bool) -> Any:
    along = rows.mean(each(lambda a, b: a * b, g, n))
    if "slope" in row:
        along = along * row["slope"]
    inner = each(lambda a, b, c: a - b * c, g, n, rows.beside(along))
    if centered:
        inner = each(lambda a, m: a - m, inner, rows.beside(rows.mean(g)))
    return each(lambda a, r: a * r, inner, root)


class _Totals:
    """Sums over the rows of a block, in registers or in shared memory."""

    def __init__(self, rows: Rows, config: NormConfig, names: list[str], scratch: list[Any]) -> None:
        self.rows, self.names = rows, names
        self.scratch = dict(zip(names, scratch, strict=True)) if config.shared_sums else None

    def start(self) -> Any:
        zeros = {name: self.rows.zeros() for name in self.names}
        if self.scratch is None:
            return zeros
        for name, ref in self.scratch.items():
            self.rows.store(ref, None, zeros[name])
        return ()

    def add(self, carry: Any, terms: dict[str, Any]) -> Any:
        if self.scratch is None:
            return {name: each(lambda a, b: a + b, carry[name], term) for name, term in terms.items()}
        for name, term in terms.items():
            before = self.rows.load(self.scratch[name], None)
            self.rows.store(self.scratch[name], None, each(lambda a, b: a + b, before, term))
        return carry

    def write(self, partial: dict[str, Any], carry: Any) -> None:
        block = jax.lax.axis_index("block")
        for name, ref in partial.items():
            total = carry[name] if self.scratch is None else self.rows.load(self.scratch[name], None)
            self.rows.store(ref, block, total)
