"""Tile sizes of the vocabulary loss kernels, checked, with defaults by shape."""

from __future__ import annotations

import dataclasses

from pallas_kernels import _mosaic
from pallas_kernels._arguments import expect_attribute

#: Warpgroups that multiply, and rows that each one handles: one wgmma is 64 rows high.
WARPGROUPS, WARPGROUP_ROWS = 2, 64

#: Rows that a CTA handles at a time, and the depth of one load.
TILE_ROWS, TILE_DEPTH = WARPGROUPS * WARPGROUP_ROWS, 64

#: Contiguous dimensions of what TMA moves are multiples of it.
ATOM_COLUMNS = 16

#: What rows that are worked on at the same time may take of the second-level cache, of some 50 MB.
_CACHED_BYTES = 32 * 2**20

#: A block of the logits' gradient stays in that cache until it is multiplied.
BLOCK_BYTES = 40 * 2**20


def cdiv(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)


def _check_tile(owner: ForwardConfig | BackwardConfig) -> None:
    # A float32 accumulator of 64 rows takes tile_v / 2 registers of each thread.
    expect_attribute(
        owner, "tile_v", 0 < owner.tile_v <= 256 and owner.tile_v % 64 == 0, "a multiple of 64, at most 256"
    )
    expect_attribute(owner, "stages", owner.stages >= 2, "at least 2")


def _loads_bytes(tile_v: int, stages: int) -> int:
    return stages * (TILE_ROWS + tile_v) * TILE_DEPTH * 2


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """How `forward` cuts its work: a CTA takes 128 rows and one of `splits` parts of the vocabulary.

    Attributes:
      tile_v: classes whose logits are made at a time.
      stages: loads in flight.
      splits: parts of the vocabulary; the statistics of several are merged by a second kernel.

    Raises:
      ValueError: naming the attribute, what was expected, what was found.
    """

    tile_v: int = 256
    stages: int = 4
    splits: int = 1

    def __post_init__(self) -> None:
        _check_tile(self)
        expect_attribute(self, "splits", self.splits >= 1, "at least 1")

    def smem_bytes(self) -> int:
        """Shared memory it takes for 16-bit operands, with barriers and what aligns blocks."""
        return _loads_bytes(self.tile_v, self.stages) + TILE_ROWS * 4 * 8 + 4096


def default_forward(
    rows: int, classes: int, depth: int, plain: bool = True, sm_count: int | None = None
) -> ForwardConfig:
    """A configuration for ``X [rows, depth]`` and ``W [depth, classes]``; `plain`: neither softcap nor sum of logits.

    The widest tiles leave few registers: they are for plain logits of whole tiles. There are so many parts of the
    vocabulary that the rows of CTAs that run at the same time stay in the cache; from there on as many as fill the
    device evenly, where a part costs half a tile for its start.
    """
    tile_v = 256 if plain and classes % 256 == 0 else 192
    sms, blocks, tiles = _mosaic.sm_count(sm_count), cdiv(rows, TILE_ROWS), cdiv(classes, tile_v)
    least = min(tiles, cdiv(sms * TILE_ROWS * depth * 2, _CACHED_BYTES))
    # Parts of as many tiles as there can be: none may be left without.
    possible = sorted({cdiv(tiles, each) for each in range(1, cdiv(tiles, least) + 1)})
    splits = min(
        (s for s in possible if s <= sms), key=lambda s: cdiv(blocks * s, sms) * (cdiv(tiles, s) + 0.5), default=1
    )
    return ForwardConfig(tile_v, 4 if tile_v == 256 else 5, splits)


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """How `backward` cuts its work: blocks of the vocabulary, whose logits' gradients exist at the same time.

    Attributes:
      tile_v: classes of a tile, which one CTA makes of 128 rows.
      stages: loads in flight.
      block: classes of a block.
      group: tiles of a column that are made before the next ones, for reuse in the cache.
      store_v: classes that go through the epilogue at a time.
      sm_count: CTAs of the persistent grid; None: one for each multiprocessor of the device.

    Raises:
      ValueError: naming the attribute, what was expected, what was found.
    """

    tile_v: int = 256
    stages: int = 4
    block: int = 2048
    group: int = 8
    store_v: int = 32
    sm_count: int | None = None

    def __post_init__(self) -> None:
        _check_tile(self)
        expect_attribute(
            self, "block", self.block > 0 and self.block % self.tile_v == 0, f"a multiple of {self.tile_v}"
        )
        expect_attribute(self, "group", self.group >= 1, "at least 1")
        expect_attribute(self, "store_v", self.store_v in (32, 64), "32 or 64")
        expect_attribute(self, "sm_count", self.sm_count is None or self.sm_count >= 1, "None or at least 1")

    def smem_bytes(self) -> int:
        """Shared memory it takes for 16-bit operands, with barriers and what aligns blocks."""
        stored = 2 * TILE_ROWS * self.store_v * 2
        return _loads_bytes(self.tile_v, self.stages) + stored + TILE_ROWS * 4 * 8 + 4096


def default_backward(rows: int, classes: int, sm_count: int | None = None) -> BackwardConfig:
    """A configuration for so many rows and classes: of blocks that fit in the cache the one that fills the device best.

    A block costs as much as some 64 classes more, for three launches and ends at which multiprocessors wait.
    """
    sms, height = _mosaic.sm_count(sm_count), cdiv(rows, TILE_ROWS)

    def cost(block: int) -> float:
        blocks = cdiv(classes, block)
        return blocks * (cdiv(height * block // 256, sms) * sms / height * 256 + 64)

    whole = cdiv(classes, 256) * 256
    largest = max(1024, BLOCK_BYTES // (2 * rows) // 256 * 256)
    possible = range(256, min(whole, largest, 8192) + 1, 256)
    return BackwardConfig(block=min(possible, key=cost), sm_count=sm_count)


def rounded_up(length: int, to: int) -> int:
    """The next multiple."""
    return cdiv(length, to) * to
