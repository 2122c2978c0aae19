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
from jax import lax

from pallas_kernels import _compat, _mosaic
from pallas_kernels.norm._rows import Rows, each, launch, loop, wide
from pallas_kernels.norm.config import LANES, MAX_LENGTH, NormConfig, default, padded


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
      ValueError: for rows longer than `MAX_LENGTH`, or a launch that does not fit.
    """
    count, length = x.shape
    if length > MAX_LENGTH:
        raise ValueError(f"backward: expected rows of at most {MAX_LENGTH} elements, found {length}")
    config = config or default(count, length, x.dtype.itemsize, _mosaic.sm_count(), backward=True)
    config.check(count, length)
    arrays = {"dy": dy, "x": x, "residual": residual, "dsum": dsum if with_dx else None}
    arrays = {name: a for name, a in arrays.items() if a is not None}
    statistics = {name: s for name, s in (("rstd", rstd), ("mean", mean), ("slope", slope)) if s is not None}
    factor = {"scale": scale} if scale is not None and with_dx else {}
    width = padded(length, config.threads)
    # Sums over the rows of a group go through shared memory, four floats at a time.
    rows = Rows(config, length, min(16 // x.dtype.itemsize, 8 if config.rows == 1 else 4), bool(interpret))
    groups = count // config.rows
    sums = {name: dtype for name, dtype in (("dscale", dscale), ("dbias", dbias)) if dtype is not None}

    def norm_backward(*refs: Any) -> None:
        given = iter(refs)
        read = {name: next(given) for name in arrays}
        kept = {name: next(given) for name in statistics}
        scale_ref = next(given) if factor else None
        dx_ref = next(given) if with_dx else None
        partial = {name: next(given) for name in sums}
        totals = _Totals(rows, config, list(sums), list(given))

        def load(group: Any) -> Any:
            return {name: rows.load(ref, group) for name, ref in read.items()}

        def step(group: Any, here: Any, carry: Any) -> Any:
            row = {name: rows.load_statistic(ref, group) for name, ref in kept.items()}
            n, dy = _normalized(rows, here, row), wide(here["dy"])
            terms = {"dscale": lambda: each(lambda a, b: a * b, dy, n), "dbias": lambda: dy}
            carry = totals.add(carry, {name: terms[name]() for name in sums})
            if dx_ref is None:
                return carry
            g = _scaled(rows, dy, scale_ref)
            along = rows.mean(each(lambda a, b: a * b, g, n))
            along = along * row["slope"] if "slope" in row else along
            across = rows.mean(g) if "mean" in row else None
            if config.lean:  # what was read takes half the registers
                here = {name: rows.held(value) for name, value in here.items()}
                n, g = _normalized(rows, here, row), _scaled(rows, wide(here["dy"]), scale_ref)
            dx = each(lambda a, b, c: a - b * c, g, n, rows.beside(along))
            if across is not None:
                dx = each(lambda a, m: a - m, dx, rows.beside(across))
            dx = each(lambda a, r: a * r, dx, rows.beside(row["rstd"]))
            if "dsum" in here:
                dx = each(lambda a, b: a + b, dx, wide(here["dsum"]))
            rows.store(dx_ref, group, dx)
            return carry

        totals.write(partial, loop(config, groups, load, step, totals.start()))

    struct = jax.ShapeDtypeStruct
    shape = jax.eval_shape(rows.grouped, struct((count, width), dy.dtype)).shape
    out = [struct(shape, x.dtype)] if with_dx else []
    out += [struct((_up(config.blocks, 4), _up(width, _COLUMNS)), jnp.float32) for _ in sums]
    scratch = [rows.gpu.SMEM(shape[1:], jnp.float32) for _ in sums] if config.lean else []
    beyond = width - length
    inputs = [rows.grouped(jnp.pad(a, ((0, 0), (0, beyond))) if beyond else a) for a in arrays.values()]
    inputs += [rows.grouped(s) for s in statistics.values()]
    inputs += [jnp.pad(s, (0, beyond)) if beyond else s for s in factor.values()]
    found = list(launch(norm_backward, config.blocks, out, interpret, scratch)(*inputs))
    dx = found.pop(0).reshape(count, width)[:, :length] if with_dx else None
    added = dict(zip(sums, _added(found, list(sums.values()), interpret), strict=True)) if sums else {}
    added = {name: total[:length] for name, total in added.items()}
    return Backward(dx, added.get("dscale"), added.get("dbias"))


def _normalized(rows: Rows, here: dict[str, Any], row: dict[str, Any]) -> Any:
    """N of some rows."""
    s = wide(here["x"])
    if "residual" in here:
        dtype = here["x"][0].dtype
        s = each(lambda a, b: (a + b).astype(dtype).astype(jnp.float32), s, wide(here["residual"]))
    if "mean" in row:
        s = each(lambda a, m: a - m, s, rows.beside(row["mean"]))
    return each(lambda a, r: a * r, s, rows.beside(row["rstd"]))


def _scaled(rows: Rows, dy: Any, scale_ref: Any) -> Any:
    return dy if scale_ref is None else each(lambda a, b: a * b, dy, rows.load_parameter(scale_ref))


class _Totals:
    """Sums over the rows of a block, in registers or in shared memory."""

    def __init__(self, rows: Rows, config: NormConfig, names: list[str], scratch: list[Any]) -> None:
        self.rows, self.config, self.names = rows, config, names
        self.scratch = dict(zip(names, scratch, strict=True)) if config.lean else None

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
        """A row for each block; the first block also writes the zeros that make them a multiple of four."""
        block, pl = lax.axis_index("block"), _mosaic.mosaic().pl
        for name, ref in partial.items():
            total = carry[name] if self.scratch is None else self.rows.load(self.scratch[name], None)
            total = self.rows.over_rows(total)
            self.rows.store_row(ref, block, total)
            beyond = range(self.config.blocks, ref.shape[0])

            @pl.when(block == 0)
            def _(ref: Any = ref, beyond: range = beyond) -> None:
                for index in beyond:
                    self.rows.store_row(ref, index, self.rows.zero_row())


#: Columns that a block of the second kernel adds up: two neighbours a lane, a row of sums for each of its warps.
_COLUMNS = 2 * LANES
#: Rows of sums a warp reads before it adds.
_UNROLL = 8


def _added(partial: list[Any], dtypes: list[Any], interpret: Any) -> list[Any]:
    """Arrays ``(4 n, width)`` added up over rows: every fourth row by one warp, in order, then the four."""
    gpu = _mosaic.mosaic().gpu
    rounds, width = partial[0].shape[0] // 4, partial[0].shape[1]
    layout = gpu.Layout.TILED(gpu.Tiling(((4, _COLUMNS), (2,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    simulated = bool(interpret)

    def norm_sums(*refs: Any) -> None:
        block = lax.axis_index("block")
        for ref, out in zip(refs[: len(partial)], refs[len(partial) :], strict=True):

            def read(k: Any, ref: Any = ref) -> Any:
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
            _compat.store(out.at[block], jnp.sum(total, axis=0).astype(out.dtype), simulated)

    columns = width // _COLUMNS
    out = [jax.ShapeDtypeStruct((columns, _COLUMNS), dtype) for dtype in dtypes]
    found = launch(norm_sums, columns, out, interpret)(*(p.reshape(rounds, 4, columns, _COLUMNS) for p in partial))
    return [total.reshape(width) for total in found]


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit
