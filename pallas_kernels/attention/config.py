"""Tile sizes of the attention kernel, checked, with defaults by shape."""

from __future__ import annotations

import dataclasses

from pallas_kernels import _compat, _mosaic
from pallas_kernels._arguments import expect_attribute

#: Queries that a warpgroup handles: one wgmma is 64 rows high.
QUERY_ROWS = 64

#: Warpgroups that compute, where there are enough registers for two.
WARPGROUPS = 2

#: Queries that a CTA handles then.
CTA_ROWS = QUERY_ROWS * WARPGROUPS

#: Lengths of a head are multiples of it: one wgmma sums as many products.
HEAD_ATOM = 16

#: The longest head.
MAX_HEAD_DIM = 256


def is_head_dim(length: int) -> bool:
    """Whether the kernel takes heads of this length."""
    return 0 < length <= MAX_HEAD_DIM and length % HEAD_ATOM == 0


#: Which they are.
HEADS = f"heads whose length is a multiple of {HEAD_ATOM} up to {MAX_HEAD_DIM}"


def head_swizzle(head_dim: int) -> int:
    """Bytes of a row of an atom of shared memory: the widest that 16-bit rows of this length are whole numbers of."""
    return next(b for b in (128, 64, 32) if head_dim * 2 % b == 0)


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """How `forward` cuts its work.

    Attributes:
      block_k: keys that are multiplied at a time.
      stages: blocks of keys and of values in flight.
      ping_pong: whether one warpgroup multiplies while the other one takes exponentials; of two.
      warpgroups: how many compute, 64 queries each.
      splits: parts of the keys that CTAs of their own take, merged afterwards; for few queries.

    Raises:
      ValueError: naming the attribute, what was expected, what was found.
    """

    block_k: int = 128
    stages: int = 2
    ping_pong: bool = True
    warpgroups: int = WARPGROUPS
    splits: int = 1

    def __post_init__(self) -> None:
        # A float32 block of scores takes block_k / 2 registers of each thread, beside those of the result.
        expect_attribute(self, "block_k", self.block_k in (64, 128), "64 or 128")
        expect_attribute(self, "stages", self.stages >= 1, "at least 1")
        expect_attribute(self, "warpgroups", self.warpgroups in (1, 2), "1 or 2")
        expect_attribute(self, "ping_pong", not self.ping_pong or self.warpgroups == 2, "False for one warpgroup")
        expect_attribute(self, "splits", self.splits >= 1, "at least 1")

    @property
    def rows(self) -> int:
        """Queries of a CTA."""
        return QUERY_ROWS * self.warpgroups

    def smem_bytes(self, head_dim: int, per_score: int = 0, per_key: int = 0) -> int:
        """Shared memory it takes for 16-bit operands, with barriers and what aligns blocks.

        `per_score`, `per_key`: bytes of the arrays beside the scores.
        """
        queries, statistics = self.rows * head_dim * (6 if self.splits > 1 else 2), 2 * self.rows * 4
        stage = self.block_k * (2 * head_dim * 2 + self.rows * per_score + per_key)
        return 4096 + queries + statistics + self.stages * stage


def default_forward(
    head_dim: int, per_score: int = 0, per_key: int = 0, ctas: int = 1 << 20, queries: int = 1 << 20, keys: int = 0,
    sm_count: int = 1, drops: bool = False,
) -> ForwardConfig:  # fmt: skip
    """A configuration for heads of this length: as many blocks in flight as there is shared memory for, at most 4.

    `per_score`, `per_key`: bytes of the arrays beside the scores. `ctas`: CTAs of `QUERY_ROWS` queries that there are
    without splits; where they leave most multiprocessors idle and queries are few, keys are split. `drops`: whether
    some weights are dropped, the choice of which takes registers.
    """
    splits = _splits(ctas, queries, keys, sm_count)
    few = not _compat.moves_registers()
    one = splits > 1 or (few and head_dim > 128)
    small = head_dim > 128 or per_score > 0 or drops or (few and head_dim > 64 and per_key > 0)
    found = [
        ForwardConfig(block_k, stages, not one, 1 if one else WARPGROUPS, splits)
        for block_k in ((64,) if small else (128, 64))
        for stages in (4, 3, 2, 1)
    ]
    fitting = (c for c in found if c.smem_bytes(head_dim, per_score, per_key) <= _mosaic.HOPPER_SMEM_BYTES)
    return next(fitting, found[-1])


def _splits(ctas: int, queries: int, keys: int, sm_count: int) -> int:
    """Parts of at least 256 keys, as many as it takes to give every multiprocessor one."""
    if queries > QUERY_ROWS or 2 * ctas > sm_count:
        return 1
    return max(1, min(sm_count // ctas, keys // 256))
