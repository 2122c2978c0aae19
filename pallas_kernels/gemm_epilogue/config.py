"""Tile sizes of the GEMM epilogue kernels, checked, with defaults by shape."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels import _mosaic
from pallas_kernels._arguments import expect_attribute
from pallas_kernels.gemm_epilogue.arguments import cheapest

#: Widths of a row of shared memory that TMA and wgmma agree on, in bytes (swizzle modes).
SWIZZLES = (128, 64, 32)

#: Rows of one swizzle atom: what a dimension that is not contiguous in memory must be a multiple of.
ATOM_ROWS = 8


def swizzle_of(itemsize: int, *contiguous: int) -> int | None:
    """The widest swizzle that divides rows of these lengths, None where not even the narrowest does."""
    return next((s for s in SWIZZLES if all(n * itemsize % s == 0 for n in contiguous)), None)


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """How `forward` cuts its work.

    Attributes:
      tile_m, tile_n: the block of the result that one CTA makes at a time, by two warpgroups.
      tile_k: depth of one load.
      stages: loads in flight.
      split: the dimension of the block that the two warpgroups share out, ``"m"`` or ``"n"``.
      group: tiles of a row (or column) of the grid that are made before the next ones, for reuse in L2.
      store_n: columns that go through the epilogue at a time.
      sm_count: CTAs of the persistent grid; None: one for each multiprocessor of the device.

    Raises:
      ValueError: naming the attribute, what was expected, what was found.
    """

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    stages: int = 4
    split: str = "m"
    group: int = 8
    store_n: int = 32
    sm_count: int | None = None

    def __post_init__(self) -> None:
        expect_attribute(self, "split", self.split in ("m", "n"), "'m' or 'n'")
        m, n = self.warpgroup_tile
        # wgmma multiplies 64 rows by up to 256 columns; what is stored goes out 64 rows at a time.
        expect_attribute(self, "tile_m", m > 0 and m % 64 == 0, "a multiple of 64 for each warpgroup")
        expect_attribute(
            self, "tile_n", n > 0 and n % 64 == 0 and n <= 256, "a multiple of 64, at most 256, for each warpgroup"
        )
        expect_attribute(self, "tile_k", self.tile_k > 0 and self.tile_k % 64 == 0, "a multiple of 64")
        # A float32 accumulator takes m * n / 128 registers of each thread, which has 232.
        expect_attribute(
            self, "tile_m", m * n <= 64 * 256, "an accumulator of at most 64 * 256 elements for each warpgroup"
        )
        expect_attribute(self, "stages", self.stages >= 2, "at least 2")
        expect_attribute(self, "store_n", self.store_n in (32, 64), "32 or 64")
        expect_attribute(self, "group", self.group >= 1, "at least 1")
        expect_attribute(self, "sm_count", self.sm_count is None or self.sm_count >= 1, "None or at least 1")

    @property
    def warpgroup_tile(self) -> tuple[int, int]:
        """Rows and columns that one warpgroup makes."""
        return (self.tile_m // 2, self.tile_n) if self.split == "m" else (self.tile_m, self.tile_n // 2)

    def smem_bytes(self, itemsize: int, stored: Sequence[int]) -> int:
        """Shared memory it takes, for results of these item sizes."""
        loads = self.stages * (self.tile_m + self.tile_n) * self.tile_k * itemsize
        return loads + sum(2 * 2 * 64 * self.store_n * size for size in stored) + 4096 + 2048


#: Candidates from the largest tile on: fewer bytes are loaded for each product with larger ones.
_TILES = ((128, 256, "m"), (128, 128, "m"), (128, 64, "m"), (64, 256, "n"), (64, 128, "n"))


def default_forward(
    shapes: tuple[int, int, int], itemsize: int, stored: Sequence[int], sm_count: int | None = None
) -> ForwardConfig:
    """A configuration for ``(batch, m, n)`` and results of these item sizes."""
    tile_m, tile_n, split = cheapest(_TILES, *shapes, sm_count)
    stages = 8
    while stages > 2:
        config = ForwardConfig(tile_m, tile_n, 64, stages, split, sm_count=sm_count)
        if config.smem_bytes(itemsize, stored) <= _mosaic.HOPPER_SMEM_BYTES:
            return config
        stages -= 1
    return ForwardConfig(tile_m, tile_n, 64, 2, split, sm_count=sm_count)


def itemsize_of(dtype: Any) -> int:
    """Bytes of one element."""
    return jnp.dtype(dtype).itemsize


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """How `backward` cuts its work: each CTA owns a stripe of columns, of all rows or of one group of them.

    Attributes:
      block_m, block_n: rows and columns that a warpgroup handles at a time; `block_n` is the width of a stripe.
      warpgroups: of a CTA; they share out the rows.
      stages: loads in flight of each warpgroup.
      groups: of rows. The sums of more than one group are added up by a second kernel.

    Raises:
      ValueError: naming the attribute, what was expected, what was found.
    """

    block_m: int = 64
    block_n: int = 32
    warpgroups: int = 4
    stages: int = 4
    groups: int = 1

    def __post_init__(self) -> None:
        expect_attribute(self, "block_m", self.block_m > 0 and self.block_m % 64 == 0, "a multiple of 64")
        expect_attribute(
            self, "block_n", 0 < self.block_n <= 128 and self.block_n % 32 == 0, "a multiple of 32, at most 128"
        )
        expect_attribute(self, "warpgroups", 1 <= self.warpgroups <= 4, "1 to 4")
        expect_attribute(self, "stages", self.stages >= 1, "at least 1")
        expect_attribute(self, "groups", self.groups >= 1, "at least 1")

    def smem_bytes(self, loaded: Sequence[int], stored: int) -> int:
        """Shared memory it takes, for operands and a result of these item sizes."""
        block = self.block_m * self.block_n
        return self.warpgroups * block * (self.stages * sum(loaded) + 2 * stored + 4) + 4096


def default_backward(m: int, n: int, loaded: Sequence[int], stored: int, sm_count: int | None = None) -> BackwardConfig:
    """A configuration for ``[M, N]`` and these item sizes: stripes that fill the device evenly.

    Rows are grouped only where N has too few stripes of 32 columns (64 bytes, what DRAM moves at a time) to fill it.
    """
    sms = _mosaic.sm_count(sm_count)
    if 2 * math.ceil(n / 32) >= sms:
        block_n = min((128, 96, 64, 32), key=lambda width: math.ceil(math.ceil(n / width) / sms) * width)
        groups = 1
    else:
        block_n = 64 if n % 64 == 0 else 32
        groups = max(1, min(sms // math.ceil(n / block_n), math.ceil(m / 256)))
    for stages in (4, 3, 2, 1):
        config = BackwardConfig(64, block_n, 4, stages, groups)
        if config.smem_bytes(loaded, stored) <= _mosaic.HOPPER_SMEM_BYTES:
            return config
    return BackwardConfig(64, 32, 4, 1, groups)
