"""Norms, backward: dX (which is dR) and the gradients of scale and bias, from what the forward kept.

For each row, with ``N = (S - mean) rstd`` and ``g = dY scale``::

    dX = dR = rstd (g - E[g] - a N E[g N]) + dS      dscale = sum dY N      dbias = sum dY

where a is the derivative of the clamp, 1 without one, and E[g] is left out for a mean square. One kernel reads S and dY
once, writes dX once, and for each block the sums over its rows; a second one adds those up. Both in a fixed order: the
same bits on every run. Sums are in float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _compat, _mosaic
from pallas_kernels.norm._rows import Rows, added, each, launch, loop, present, wide, widened
from pallas_kernels.norm.config import LANES, NormConfig, default, padded


class Backward(NamedTuple):
    """dX as ``(count, length)``, dscale and dbias as ``(length,)``. None: not asked for."""

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
    dscale: Any = None,
    dbias: Any = None,
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
      dscale: type that the sum of dY N over rows is wanted in, None where it is not.
      dbias: likewise of the sum of dY.
      config: the launch.
      interpret: parameters of the simulator.

    Raises:
      ValueError: for rows that are too long, or a launch that does not fit.
    """
    count, length = x.shape
    config = config or default(count, length, x.dtype.itemsize, _mosaic.sm_count(), backward=True)
    config.check(count, length)
    # Sums over the rows of a group go through shared memory, four floats at a time.
    rows = Rows(config, length, min(16 // x.dtype.itemsize, 8 if config.rows == 1 else 4), bool(interpret))
    width = padded(length, config.threads)
    arrays = present(dy=dy, x=x, residual=residual, dsum=dsum if with_dx else None)
    inputs = {name: rows.grouped(a) for name, a in widened(arrays, length, width).items()}
    inputs |= {name: rows.grouped(s) for name, s in present(rstd=rstd, mean=mean, slope=slope).items()}
    inputs |= widened(present(scale=scale if with_dx else None), length, width)
    sums = present(dscale=dscale, dbias=dbias)
    partial = jax.ShapeDtypeStruct((_up(config.blocks, 4), _up(width, _COLUMNS)), jnp.float32)
    out = {"dx": rows.struct(count, width, x.dtype)} if with_dx else {}
    out |= dict.fromkeys(sums, partial)
    scratch = (
        {f"{k} sum": rows.gpu.SMEM(rows.struct(config.rows, width, jnp.float32).shape[1:], jnp.float32) for k in sums}
        if config.lean
        else {}
    )
    gradient = _Gradient(rows, count // config.rows, tuple(sums))
    found = launch(gradient.norm_backward, config.blocks, inputs, out, interpret, scratch)
    dx = found.pop("dx").reshape(count, width)[:, :length] if with_dx else None
    total = {name: t[:length] for name, t in _added_up(found, sums, interpret).items()} if sums else {}
    return Backward(dx, total.get("dscale"), total.get("dbias"))


@dataclasses.dataclass(frozen=True)
class _Gradient:
    """The first kernel: what it computes, of how many groups of rows."""

    rows: Rows
    groups: int
    sums: tuple[str, ...]

    def norm_backward(self, refs: dict[str, Any]) -> None:
        rows = self.rows
        read = {name: refs[name] for name in ("dy", "x", "residual", "dsum") if name in refs}
        kept = {name: refs[name] for name in ("rstd", "mean", "slope") if name in refs}

        def load(group: Any) -> Any:
            return {name: rows.load(ref, group) for name, ref in read.items()}

        def step(group: Any, here: Any, totals: Any) -> Any:
            row = {name: rows.load_statistic(ref, group) for name, ref in kept.items()}
            n, dy = self.normalized(here, row), wide(here["dy"])
            terms = {"dscale": lambda: each(lambda a, b: a * b, dy, n), "dbias": lambda: dy}
            totals = self.add(refs, totals, {name: terms[name]() for name in self.sums})
            if "dx" in refs:
                dx = self.dx(refs, here, row, n, dy)
                rows.store(refs["dx"], group, dx)
            return totals

        totals = {name: rows.zeros() for name in self.sums}
        if rows.config.lean:
            for name, zeros in totals.items():
                rows.store(refs[f"{name} sum"], None, zeros)
            totals = {}
        self.write(refs, loop(rows.config, self.groups, load, step, totals))

    def normalized(self, here: dict[str, Any], row: dict[str, Any]) -> Any:
        """N of some rows."""
        rows, s = self.rows, wide(added(here))
        if "mean" in row:
            s = each(lambda a, m: a - m, s, rows.beside(row["mean"]))
        return each(lambda a, r: a * r, s, rows.beside(row["rstd"]))

    def dx(self, refs: dict[str, Any], here: dict[str, Any], row: dict[str, Any], n: Any, dy: Any) -> Any:
        rows = self.rows
        g = self.scaled(refs, dy)
        along = rows.mean(each(lambda a, b: a * b, g, n))
        along = along * row["slope"] if "slope" in row else along
        across = rows.mean(g) if "mean" in row else None
        if rows.config.lean:  # what was read takes half the registers
            here = {name: rows.held(value) for name, value in here.items()}
            n, g = self.normalized(here, row), self.scaled(refs, wide(here["dy"]))
        dx = each(lambda a, b, c: a - b * c, g, n, rows.beside(along))
        if across is not None:
            dx = each(lambda a, m: a - m, dx, rows.beside(across))
        dx = each(lambda a, r: a * r, dx, rows.beside(row["rstd"]))
        return each(lambda a, b: a + b, dx, wide(here["dsum"])) if "dsum" in here else dx

    def scaled(self, refs: dict[str, Any], dy: Any) -> Any:
        """``dY scale``."""
        if "scale" not in refs:
            return dy
        return each(lambda a, b: a * b, dy, self.rows.load_parameter(refs["scale"]))

    def add(self, refs: dict[str, Any], totals: Any, terms: dict[str, Any]) -> Any:
        """What the rows of this block sum up to, in registers, or for long rows in shared memory."""
        rows = self.rows
        if not rows.config.lean:
            return {name: each(lambda a, b: a + b, totals[name], term) for name, term in terms.items()}
        for name, term in terms.items():
            ref = refs[f"{name} sum"]
            rows.store(ref, None, each(lambda a, b: a + b, rows.load(ref, None), term))
        return totals

    def write(self, refs: dict[str, Any], totals: Any) -> None:
        """A row of sums for each block; the first block also writes the zeros that make them a multiple of four."""
        rows, block, pl = self.rows, lax.axis_index("block"), _mosaic.mosaic().pl
        for name in self.sums:
            total = rows.load(refs[f"{name} sum"], None) if rows.config.lean else totals[name]
            rows.store_row(refs[name], block, rows.over_rows(total))
        beyond = [(ref, k) for n in self.sums for ref in [refs[n]] for k in range(rows.config.blocks, ref.shape[0])]

        @pl.when(block == 0)
        def _() -> None:
            for ref, index in beyond:
                rows.store_row(ref, index, rows.zero_row())


#: Columns that a block of the second kernel adds up: two neighbours a lane, a row of sums for each of its warps.
_COLUMNS = 2 * LANES
#: Rows of sums a warp reads before it adds.
_UNROLL = 8


def _added_up(partial: dict[str, Any], dtypes: dict[str, Any], interpret: Any) -> dict[str, Any]:
    """Arrays ``(4 n, width)`` added up over rows: every fourth row by one warp, in order, then the four."""
    gpu = _mosaic.mosaic().gpu
    count, width = next(iter(partial.values())).shape
    rounds, columns = count // 4, width // _COLUMNS
    layout = gpu.Layout.TILED(gpu.Tiling(((4, _COLUMNS), (2,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    simulated = bool(interpret)

    def norm_sums(refs: dict[str, Any]) -> None:
        block = lax.axis_index("block")
        for name in dtypes:

            def read(k: Any, ref: Any = refs[name]) -> Any:
                return _compat.load(ref.at[k, :, block], layout, simulated)

            def step(k: Any, total: Any, read: Any = read) -> Any:
                for value in [read(k * _UNROLL + j) for j in range(_UNROLL)]:
                    total = total + value
                return total

            total = jnp.zeros((4, _COLUMNS), jnp.float32)
            total = total if simulated else gpu.layout_cast(total, layout)
            total = lax.fori_loop(0, jnp.int32(rounds // _UNROLL), step, total)
            for k in range(rounds // _UNROLL * _UNROLL, rounds):
                total = total + read(k)
            out = refs[f"{name} total"]
            _compat.store(out.at[block], jnp.sum(total, axis=0).astype(out.dtype), simulated)

    inputs = {name: p.reshape(rounds, 4, columns, _COLUMNS) for name, p in partial.items()}
    out = {f"{name} total": jax.ShapeDtypeStruct((columns, _COLUMNS), dtype) for name, dtype in dtypes.items()}
    found = launch(norm_sums, columns, inputs, out, interpret, {})
    return {name: found[f"{name} total"].reshape(width) for name in dtypes}


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit
