"""``dZ = dY * act'(.)`` and ``db = sum(dZ)`` over the rows, on Hopper, in one pass.

Each CTA owns a stripe of columns; its warpgroups walk the rows, each with loads and stores by TMA of its own, and add
up in float32 registers, in an order that depends on shapes alone: the same bits on every run. Read: dY and the residual
once; written: dZ once, db once. Where there are too few columns to occupy the device, groups of rows are summed
apart and a second, small reduction adds them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _mosaic
from pallas_kernels._arguments import expect
from pallas_kernels.gemm_epilogue.activations import ACTIVATIONS
from pallas_kernels.gemm_epilogue.arguments import checked
from pallas_kernels.gemm_epilogue.config import (
    ATOM_ROWS,
    BackwardConfig,
    default_backward,
    itemsize_of,
    swizzle_of,
)


@dataclasses.dataclass(frozen=True)
class _Problem:
    """Everything the kernel is specialized on."""

    m: int
    n: int
    residual: Any
    dy: Any
    dz: Any
    db: Any
    activation: str
    alpha: float
    from_output: bool
    config: BackwardConfig

    @property
    def stripes(self) -> int:
        return -(-self.n // self.config.block_n)

    @property
    def steps(self) -> int:
        """Blocks of rows of each warpgroup; those beyond the last row are zeros that are not stored."""
        blocks = -(-self.m // self.config.block_m)
        return -(-blocks // (self.config.groups * self.config.warpgroups))

    def buffer(self, slots: int | None, dtype: Any) -> Any:
        """Shared memory of all warpgroups for `slots` blocks each; None: one, without a dimension for it."""
        gpu, c = _mosaic.mosaic().gpu, self.config
        swizzle = swizzle_of(itemsize_of(dtype), self.n, c.block_n)
        assert swizzle is not None
        transforms = gpu.TilingTransform((ATOM_ROWS, swizzle // itemsize_of(dtype))), gpu.SwizzleTransform(swizzle)
        slots_of = () if slots is None else (slots,)
        return gpu.SMEM((c.warpgroups, *slots_of, c.block_m, c.block_n), dtype, transforms=transforms)


def backward(
    residual: jax.Array,
    dy: jax.Array,
    *,
    activation: str,
    alpha: float = 0.0,
    from_output: bool | None = None,
    dz_dtype: Any = None,
    db_dtype: Any = None,
    in_place: bool = False,
    config: BackwardConfig | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """``(dZ, db)``, computed and summed in float32.

    Args:
      residual: ``[M, N]``: Y or Z.
      dy: ``[M, N]``, the cotangent of Y.
      activation: a name in `ACTIVATIONS`.
      alpha: its parameter.
      from_output: whether the residual is Y; where the derivative is a function of it (`Activation.from_output`) unless
        told otherwise.
      dz_dtype: of dZ; dY's unless told otherwise.
      db_dtype: of db; dY's unless told otherwise.
      in_place: write dZ over the residual, where both have one type. Where the residual is read again, or is an
        argument of the compiled program, XLA copies it before: results are the same, the copy costs time.
      config: tiles; by shape unless told otherwise.
      interpret: parameters of the simulator (`pallas_kernels._mosaic.interpret`).

    Returns:
      dZ ``[M, N]`` and db ``[N]``.

    Raises:
      ValueError: naming the argument, what was expected, what was found. N must be a multiple of 16 and M of 8.
    """
    is_output = checked(residual, dy, activation, from_output)
    m, n = dy.shape
    expect("backward", "dy", m > 0 and m % ATOM_ROWS == 0, f"a multiple of {ATOM_ROWS} rows", dy.shape)
    expect("backward", "dy", n > 0 and n % 16 == 0, "a multiple of 16 columns", dy.shape)
    dz, db = (jnp.dtype(d or dy.dtype) for d in (dz_dtype, db_dtype))
    if config is None:
        config = default_backward(m, n, [itemsize_of(x.dtype) for x in (residual, dy)], itemsize_of(dz))
    summed = db if config.groups == 1 else jnp.dtype("float32")
    p = _Problem(
        m, n, jnp.dtype(residual.dtype), jnp.dtype(dy.dtype), dz, summed, activation, float(alpha), is_output, config
    )  # fmt: skip
    if in_place and residual.dtype == dz:
        overwritten = jax.new_ref(residual)
        (sums,) = _mosaic.on_refs(_call(p, interpret, in_place=True))(overwritten, dy)
        out = jax.freeze(overwritten)
    else:
        out, sums = _call(p, interpret)(residual, dy)
    return out, sums[0] if config.groups == 1 else jnp.sum(sums, 0).astype(db)


def _call(p: _Problem, interpret: Any, in_place: bool = False) -> Any:
    gpu, c = _mosaic.mosaic().gpu, p.config

    def over_residual(residual: Any, dy: Any, db: Any, **scratch: Any) -> None:
        _body(p, residual, dy, residual, db, **scratch)  # a tile is read, and waited for, before it is written

    dz, db = jax.ShapeDtypeStruct((p.m, p.n), p.dz), jax.ShapeDtypeStruct((c.groups, p.n), p.db)
    return gpu.kernel(
        over_residual if in_place else functools.partial(_body, p),
        out_type=[db] if in_place else [dz, db],
        grid=(p.stripes, c.groups),
        grid_names=("stripe", "group"),
        num_threads=c.warpgroups,
        thread_name="wg",
        compiler_params=gpu.CompilerParams(lowering_semantics=gpu.LoweringSemantics.Warpgroup),
        kernel_name=f"{p.activation}_grad_and_sum",
        interpret=interpret,
        scratch_types={
            "residual_smem": p.buffer(c.stages, p.residual),
            "dy_smem": p.buffer(c.stages, p.dy),
            "dz_smem": p.buffer(2, p.dz),
            "total_smem": p.buffer(None, jnp.float32),
            "db_smem": gpu.SMEM((c.block_n,), p.db),
            "loaded": gpu.Barrier(num_arrivals=2, num_barriers=c.warpgroups * c.stages),
            "summed": gpu.Barrier(num_arrivals=c.warpgroups),
        },
    )


def _body(
    p: _Problem,
    residual: Any,
    dy: Any,
    dz: Any,
    db: Any,
    *,
    residual_smem: Any,
    dy_smem: Any,
    dz_smem: Any,
    total_smem: Any,
    db_smem: Any,
    loaded: Any,
    summed: Any,
) -> None:
    pl, gpu, c = _mosaic.mosaic().pl, _mosaic.mosaic().gpu, p.config
    wg, group = jax.lax.axis_index("wg"), jax.lax.axis_index("group")
    columns = pl.ds(jax.lax.axis_index("stripe") * c.block_n, c.block_n)

    def rows(step: Any) -> Any:
        return pl.ds(((step * c.groups + group) * c.warpgroups + wg) * c.block_m, c.block_m)

    def load(step: Any) -> None:
        slot = jax.lax.rem(step, jnp.int32(c.stages))
        barrier = loaded.at[wg * c.stages + slot]
        gpu.copy_gmem_to_smem(residual.at[rows(step), columns], residual_smem.at[wg, slot], barrier)
        gpu.copy_gmem_to_smem(dy.at[rows(step), columns], dy_smem.at[wg, slot], barrier)

    for step in range(min(c.stages, p.steps)):
        load(jnp.int32(step))

    def handle(step: Any, total: Any) -> Any:
        slot = jax.lax.rem(step, jnp.int32(c.stages))
        gpu.barrier_wait(loaded.at[wg * c.stages + slot])
        r, t = residual_smem[wg, slot], dy_smem[wg, slot]
        out = _gradient(p, r.astype(jnp.float32), t.astype(jnp.float32))
        free = jax.lax.rem(step, jnp.int32(2))
        gpu.wait_smem_to_gmem(1, wait_read_only=True)
        dz_smem[wg, free] = out.astype(p.dz)
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(dz_smem.at[wg, free], dz.at[rows(step), columns])

        @pl.when(step + c.stages < p.steps)
        def _next() -> None:
            load(step + c.stages)

        return total + out

    zeros = jnp.zeros((c.block_m, c.block_n), jnp.float32)
    total = jax.lax.fori_loop(0, p.steps, handle, zeros)
    total_smem[wg] = total
    gpu.barrier_arrive(summed)

    @pl.when(wg == 0)
    def _finish() -> None:
        gpu.barrier_wait(summed)
        whole = functools.reduce(jnp.add, [total_smem[k] for k in range(c.warpgroups)])
        db_smem[...] = jnp.sum(whole, 0).astype(p.db)
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(db_smem, db.at[group, columns])

    gpu.wait_smem_to_gmem(0, wait_read_only=True)


def _gradient(p: _Problem, r: Any, t: Any) -> Any:
    found = ACTIVATIONS[p.activation]
    return found.grad(found.value(r, p.alpha) if found.from_output and not p.from_output else r, t, p.alpha)
