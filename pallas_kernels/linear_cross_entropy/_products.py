"""Tiles of ``X W`` on the tensor cores: what the forward and the backward of the vocabulary loss share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat, _mosaic
from pallas_kernels.gemm_epilogue.config import ATOM_ROWS, swizzle_of
from pallas_kernels.linear_cross_entropy.config import (
    ATOM_COLUMNS,
    TILE_DEPTH,
    TILE_ROWS,
    WARPGROUP_ROWS,
    WARPGROUPS,
    cdiv,
    rounded_up,
)

#: Registers of a thread of the warpgroup that loads, and of the others.
_MEMORY_REGISTERS, _COMPUTE_REGISTERS = 40, 232


@dataclasses.dataclass(frozen=True)
class Logits:
    """``x = scale X W``, or ``softcap tanh(scale X W / softcap)``, of which tiles are made; nothing else is stored.

    Inside the kernels a logit is `unit` times smaller, where the exponential of ``base`` times it is a power of two.
    """

    rows: int
    classes: int
    depth: int
    trans_w: bool
    dtype: Any
    scale: float
    softcap: float | None
    base: float
    simulated: bool
    tile_v: int = 64
    stages: int = 2

    @property
    def steps(self) -> int:
        """Loads of a tile."""
        return cdiv(self.depth, TILE_DEPTH)

    @property
    def row_blocks(self) -> int:
        return cdiv(self.rows, TILE_ROWS)

    @property
    def tiles(self) -> int:
        """Of a row of tiles."""
        return cdiv(self.classes, self.tile_v)

    @property
    def factor(self) -> float:
        """A logit is this times what `capped` gives."""
        return self.scale if self.softcap is None else self.softcap

    @property
    def unit(self) -> float:
        """The exponential is 2 to this times what `capped` gives."""
        return self.factor * self.base * math.log2(math.e)

    def capped(self, product: Any) -> Any:
        if self.softcap is None:
            return product
        # tanh x = 1 - 2 / (1 + e^2x)
        return 1 - 2 / (1 + jnp.exp2(product * (2 * self.scale / self.softcap * math.log2(math.e))))

    def transforms(self, swizzle: int) -> tuple[Any, Any]:
        gpu = _mosaic.mosaic().gpu
        return gpu.TilingTransform((ATOM_ROWS, swizzle // 2)), gpu.SwizzleTransform(swizzle)

    def allocations(self) -> dict[str, Any]:
        """Shared memory for loads."""
        gpu = _mosaic.mosaic().gpu
        lengths = (rounded_up(n, ATOM_COLUMNS) for n in (self.depth, self.depth if self.trans_w else self.classes))
        swizzle = swizzle_of(2, *lengths)
        assert swizzle is not None
        w = (self.tile_v, TILE_DEPTH) if self.trans_w else (TILE_DEPTH, self.tile_v)
        return {
            "x_smem": gpu.SMEM((self.stages, TILE_ROWS, TILE_DEPTH), self.dtype, transforms=self.transforms(swizzle)),
            "w_smem": gpu.SMEM((self.stages, *w), self.dtype, transforms=self.transforms(swizzle)),
            "loaded": gpu.Barrier(num_arrivals=2, num_barriers=self.stages),
            "used": gpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=self.stages),
        }


def load(p: Logits, count: Any, place: Callable[[Any], tuple[Any, Any]], x: Any, w: Any, smem: dict[str, Any]) -> None:
    """The operands of `count` tiles, one after the other, into the slots that are free.

    `place`: the first row and the first class of a tile.
    """
    pl, gpu = _mosaic.mosaic().pl, _mosaic.mosaic().gpu
    gpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")

    @pl.loop(0, count)
    def _tiles(tile: Any) -> None:
        row, column = place(tile)
        rows, columns = pl.ds(row, TILE_ROWS), pl.ds(column, p.tile_v)

        @pl.loop(0, p.steps)
        def _steps(k: Any) -> None:
            step = tile * p.steps + k
            slot, depth = jax.lax.rem(step, jnp.int32(p.stages)), pl.ds(k * TILE_DEPTH, TILE_DEPTH)

            @pl.when(step >= p.stages)
            def _wait() -> None:
                gpu.barrier_wait(smem["used"].at[slot])

            loaded = smem["loaded"].at[slot]
            gpu.copy_gmem_to_smem(x.at[rows, depth], smem["x_smem"].at[slot], loaded)
            w_tile = w.at[columns, depth] if p.trans_w else w.at[depth, columns]
            gpu.copy_gmem_to_smem(w_tile, smem["w_smem"].at[slot], loaded)

    # What is released for good is waited for too, so that each phase of a barrier has been seen.
    total = count * p.steps

    @pl.loop(jnp.maximum(total - p.stages, 0), total)
    def _rest(step: Any) -> None:
        gpu.barrier_wait(smem["used"].at[jax.lax.rem(step, jnp.int32(p.stages))])


def start_computing() -> None:
    _mosaic.mosaic().gpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")


def product(p: Logits, tile: Any, smem: dict[str, Any]) -> Any:
    """``X W`` in float32, the rows of this warpgroup of the tile that is loaded next; `tile` counts them.

    A slot is released when the product after it has been issued: the tensor cores have always something to do.
    """
    pl, gpu = _mosaic.mosaic().pl, _mosaic.mosaic().gpu
    own = pl.ds(jax.lax.axis_index("wg") * WARPGROUP_ROWS, WARPGROUP_ROWS)
    first = tile * p.steps

    def slot_of(step: Any) -> Any:
        return jax.lax.rem(step, jnp.int32(p.stages))

    def multiply(acc: Any) -> Any:
        @pl.loop(0, p.steps)
        def _steps(k: Any) -> None:
            slot = slot_of(first + k)
            gpu.barrier_wait(smem["loaded"].at[slot])
            right = smem["w_smem"].at[slot]
            gpu.wgmma(acc, smem["x_smem"].at[slot, own], _compat.transposed(right) if p.trans_w else right)
            gpu.wgmma_wait(1)

            @pl.when(k > 0)
            def _release() -> None:
                gpu.barrier_arrive(smem["used"].at[slot_of(first + k - 1)])

        found = acc[...]
        gpu.barrier_arrive(smem["used"].at[slot_of(first + (p.steps - 1))])
        return found

    return pl.run_scoped(multiply, gpu.ACC((WARPGROUP_ROWS, p.tile_v), jnp.float32))


def beside(numbers: Any, shape: tuple[int, int]) -> Any:
    """One number a row, beside each element of it."""
    return jax.lax.broadcast_in_dim(numbers, shape, (0,))


def columns(shape: tuple[int, int], first: Any) -> Any:
    """Which class each element is of."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, 1) + first
