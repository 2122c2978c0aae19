"""Gradients of a loss of rows of ``x = X W`` on Hopper: neither logits nor their gradient exist whole.

The vocabulary is taken in blocks of some thousand classes. Of each, one persistent kernel makes the logits again and,
while they are in registers, their gradient; it is stored in 16 bits, as small as stays in the cache, and multiplied by
W and by X. A block costs the three products that it takes at least, and no product is made twice::

    dx = e g + [j = label] dtaken + dsum,  e = exp(base (x - m)),  g = base dl
    dX = sum_blocks dx W^T,  dW = X^T dx

The two products are `dot_general`s, for cuBLAS or XLA's own kernels; dX is added up in float32 over the blocks, dW is
written block by block. There are no atomics: sums are in one order on every run. Memory beside the results: a block of
the gradient and of W, and dX in float32.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _mosaic
from pallas_kernels._arguments import expect
from pallas_kernels.gemm_epilogue.config import swizzle_of
from pallas_kernels.linear_cross_entropy._products import Logits, beside, columns, load, product, start_computing
from pallas_kernels.linear_cross_entropy.arguments import aligned, labels_of, logits, rows_of
from pallas_kernels.linear_cross_entropy.config import (
    ATOM_COLUMNS,
    TILE_ROWS,
    WARPGROUP_ROWS,
    WARPGROUPS,
    BackwardConfig,
    default_backward,
    rounded_up,
)


def backward(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    m: jax.Array,
    dl: jax.Array,
    dtaken: jax.Array,
    dsum: jax.Array | None = None,
    *,
    trans_w: bool = False,
    scale: float = 1.0,
    softcap: float | None = None,
    base: float = 1.0,
    wanted: tuple[bool, bool] = (True, True),
    config: BackwardConfig | None = None,
    interpret: Any = None,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Gradients of what numbers of rows (`forward.Numbers`) were used for.

    Args:
      x: as for `forward`.
      w: as for `forward`.
      labels: as for `forward`.
      m: float32 ``[R]``, as `forward` found it.
      dl: float32 ``[R]``, the cotangent of l.
      dtaken: float32 ``[R]``, the cotangent of the logit at the label.
      dsum: float32 ``[R]``, the cotangent of the sum of logits; None: it was not used.
      trans_w: as for `forward`.
      scale: as for `forward`.
      softcap: as for `forward`.
      base: as for `forward`.
      wanted: which of dX and dW.
      config: tiles and blocks; by shape unless told otherwise.
      interpret: parameters of the simulator (`pallas_kernels._mosaic.interpret`).

    Returns:
      dX like x and dW like w; None for what is not wanted. The gradient of the logits is rounded to x's dtype.

    Raises:
      ValueError: naming the argument, what was expected, what was found.
    """
    problem = logits("backward", x, w, labels, trans_w, scale, softcap, base, interpret is not None)
    config = config or default_backward(problem.rows, problem.classes)
    problem = dataclasses.replace(problem, tile_v=config.tile_v, stages=config.stages)
    numbers = {"m": m, "dl": dl, "dtaken": dtaken, **({} if dsum is None else {"dsum": dsum})}
    for name, value in numbers.items():
        expect("backward", name, value.shape == labels.shape, f"shape {labels.shape}", value.shape)
    expect("backward", "wanted", any(wanted), "dX, dW or both", wanted)
    rows = _rows(problem, m, dl, dtaken, dsum)
    return _Blocks(problem, config, interpret, x, w, labels, rows, wanted).gradients()


def _rows(p: Logits, m: Any, dl: Any, dtaken: Any, dsum: Any) -> Any:
    """``(power, g, dtaken, dsum)`` of each row, in the units that the kernel has. Its e is relative to 2^power."""
    shift = jnp.where(jnp.isinf(m), 0.0, m) * (p.base * math.log2(math.e))
    found = [shift, dl * (p.base * p.scale), dtaken * p.scale, *([] if dsum is None else [dsum * p.scale])]
    return rows_of(jnp.stack([v.astype(jnp.float32) for v in found]))


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """One block of the vocabulary after the other."""

    problem: Logits
    config: BackwardConfig
    interpret: Any
    x: Any
    w: Any
    labels: Any
    rows: Any
    wanted: tuple[bool, bool]

    def gradients(self) -> tuple[Any, Any]:
        wide, dim, classes = self.config.block, self._dim, self.problem.classes
        whole, rest = divmod(classes, wide)
        dx = jnp.zeros(self.x.shape, jnp.float32) if self.wanted[0] else None
        dw = jnp.zeros(self.w.shape, self.w.dtype) if self.wanted[1] else None

        def block(first: Any, width: int, carry: Any) -> Any:
            dx, dw = carry
            w = jax.lax.dynamic_slice_in_dim(self.w, first, width, dim)
            dx_more, dw_part = self._block(w, first)
            if dw is not None:
                dw = jax.lax.dynamic_update_slice_in_dim(dw, dw_part, first, dim)
            return None if dx is None else dx + dx_more, dw

        carry = dx, dw
        if self.problem.simulated:  # the simulator cannot run inside of a loop
            for k in range(whole):
                carry = block(k * wide, wide, carry)
        elif whole:
            carry = jax.lax.fori_loop(0, whole, lambda k, carry: block(k * wide, wide, carry), carry)
        dx, dw = block(classes - rest, rest, carry) if rest else carry
        return None if dx is None else dx.astype(self.x.dtype), dw

    @property
    def _dim(self) -> int:
        return 0 if self.problem.trans_w else 1

    def _block(self, w: Any, first: Any) -> tuple[Any, Any]:
        """What a block adds to dX, and its part of dW."""
        width = w.shape[self._dim]
        p = dataclasses.replace(self.problem, classes=width)
        here = labels_of(self.labels.astype(jnp.int32) - first, width)
        x, part = aligned(self.x, w)
        dz = _logits_grad(p, self.config, x, part, here, self.rows, self.interpret)
        dz = dz[: p.rows, :width]
        dx = dw = None
        if self.wanted[0]:
            dx = _contract(dz, 1, w, self._dim, jnp.float32)
        if self.wanted[1]:
            pair = (dz, 0, self.x, 0) if p.trans_w else (self.x, 0, dz, 0)
            dw = _contract(*pair, w.dtype)
        return dx, dw


def _contract(a: Any, i: int, b: Any, j: int, dtype: Any) -> Any:
    return jax.lax.dot_general(a, b, (((i,), (j,)), ((), ())), preferred_element_type=dtype)


def _logits_grad(p: Logits, c: BackwardConfig, x: Any, w: Any, labels: Any, rows: Any, interpret: Any) -> Any:
    """The gradient of what the softcap is applied to, for the classes of one block, which are those of W."""
    gpu = _mosaic.mosaic().gpu
    return gpu.kernel(
        functools.partial(_body, p, c),
        out_type=jax.ShapeDtypeStruct((x.shape[0], rounded_up(p.classes, ATOM_COLUMNS)), p.dtype),
        grid=(min(_mosaic.sm_count(c.sm_count), p.row_blocks * p.tiles),),
        grid_names=("cta",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=gpu.CompilerParams(approx_math=True, lowering_semantics=gpu.LoweringSemantics.Warpgroup),
        kernel_name="gradient_of_logits",
        interpret=interpret,
    )(x, w, labels, rows)


def _body(p: Logits, c: BackwardConfig, x: Any, w: Any, labels: Any, rows: Any, out: Any) -> None:
    """The kernel: allocate for all tiles, then make this CTA's tiles one by one."""
    pl, gpu = _mosaic.mosaic().pl, _mosaic.mosaic().gpu
    numbers = rows.shape[0]
    swizzle = swizzle_of(2, out.shape[1], c.store_v)
    assert swizzle is not None
    stored = gpu.SMEM((WARPGROUPS, 2, WARPGROUP_ROWS, c.store_v), p.dtype, transforms=p.transforms(swizzle))

    @functools.partial(
        pl.run_scoped,
        collective_axes="wg",
        stored=stored,
        rows_smem=gpu.SMEM((WARPGROUPS, numbers, WARPGROUP_ROWS), jnp.float32),
        labels_smem=gpu.SMEM((WARPGROUPS, WARPGROUP_ROWS), jnp.int32),
        rows_loaded=gpu.Barrier(num_arrivals=numbers + 1, num_barriers=WARPGROUPS),
        **p.allocations(),
    )
    def _scope(**smem: Any) -> None:
        cta, ctas = jax.lax.axis_index("cta"), jax.lax.axis_size("cta")
        count = jax.lax.div(jnp.int32(p.row_blocks * p.tiles - 1) - cta, jnp.int32(ctas)) + 1
        wg = jax.lax.axis_index("wg")

        def place(tile: Any) -> tuple[Any, Any]:
            shape = p.row_blocks, p.tiles
            mi, ni = gpu.planar_snake(cta + tile * ctas, shape, 0, min(c.group, p.row_blocks))
            return mi * TILE_ROWS, ni * p.tile_v

        @pl.when(wg == WARPGROUPS)
        def _load() -> None:
            load(p, count, place, x, w, smem)

        @pl.when(wg < WARPGROUPS)
        def _compute() -> None:
            start_computing()

            @pl.loop(0, count)
            def _tiles(tile: Any) -> None:
                row, column = place(tile)
                here = pl.ds(row + wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
                loaded = smem["rows_loaded"].at[wg]
                gpu.copy_gmem_to_smem(labels.at[here], smem["labels_smem"].at[wg], loaded)
                for i in range(numbers):
                    gpu.copy_gmem_to_smem(rows.at[i, here], smem["rows_smem"].at[wg, i], loaded)
                total = product(p, tile, smem)
                gpu.barrier_wait(loaded)
                _store(p, c, total, numbers, here, column, out, smem)

            gpu.wait_smem_to_gmem(0, wait_read_only=True)


def _store(
    p: Logits, c: BackwardConfig, total: Any, numbers: int, here: Any, column: Any, out: Any, smem: dict[str, Any]
) -> None:
    """The gradient of a tile, some classes at a time, through shared memory to the result."""
    pl, gpu = _mosaic.mosaic().pl, _mosaic.mosaic().gpu
    wg, shape = jax.lax.axis_index("wg"), (WARPGROUP_ROWS, c.store_v)
    # An even number of parts: slots alternate from tile to tile too.
    for turn, j in enumerate(range(0, p.tile_v, c.store_v)):
        z = p.capped(total[:, j : j + c.store_v])
        power, g, taken, *more = (beside(smem["rows_smem"][wg, i], shape) for i in range(numbers))
        label = beside(smem["labels_smem"][wg], shape)
        dz = jnp.exp2(z * p.unit - power) * g
        dz = dz + jnp.where(columns(shape, column + j) == label, taken, 0.0)
        if more:
            dz = dz + more[0]
        if p.softcap is not None:
            dz = dz * (1 - z * z)
        slot = turn % 2
        # The store before the last one has been read from its slot.
        gpu.wait_smem_to_gmem(1, wait_read_only=True)
        smem["stored"][wg, slot] = dz.astype(p.dtype)
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(smem["stored"].at[wg, slot], out.at[here, pl.ds(column + j, c.store_v)])
