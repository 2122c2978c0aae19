"""Tile sizes of the attention kernel, checked, with defaults by shape."""

from __future__ import annotations

import dataclasses

from pallas_kernels import _mosaic

#: Lengths of a head that the kernel is made for: rows of whole 128-byte atoms of shared memory.
HEAD_DIMS = (64, 128, 256)

#: Queries that a warpgroup handles: one wgmma is 64 rows high.
QUERY_ROWS = 64

#: Warpgroups that compute.
WARPGROUPS = 2

#: Queries that a CTA handles.
CTA_ROWS = QUERY_ROWS * WARPGROUPS


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """How `forward` cuts its work.

    Attributes:
      block_k: keys that are multiplied at a time.
      stages: blocks of keys and of values in flight.
      ping_pong: whether one warpgroup multiplies while the other one takes exponentials.

    Raises:
      ValueError: naming the attribute, what was expected, what was found.
    """

    block_k: int = 128
    stages: int = 2
    ping_pong: bool = True

    def __post_init__(self) -> None:
        # A float32 block of scores takes block_k / 2 registers of each thread, beside those of the result.
        self._check("block_k", self.block_k in (64, 128), "64 or 128")
        self._check("stages", self.stages >= 1, "at least 1")

    def _check(self, name: str, ok: bool, expected: str) -> None:
        if not ok:
            raise ValueError(f"ForwardConfig({name}=...): expected {expected}, found {getattr(self, name)!r}")

    def smem_bytes(self, head_dim: int) -> int:
        """Shared memory it takes for 16-bit operands, with barriers and what aligns blocks."""
        queries, statistics = CTA_ROWS * head_dim * 2, 2 * CTA_ROWS * 4
        return 4096 + queries + statistics + 2 * self.stages * self.block_k * head_dim * 2


def default_forward(head_dim: int) -> ForwardConfig:
    """A configuration for heads of this length: as many blocks in flight as there is shared memory for, at most 4."""
    block_k = 64 if head_dim > 128 else 128
    fitting = (s for s in (4, 3, 2) if ForwardConfig(block_k, s).smem_bytes(head_dim) <= _mosaic.HOPPER_SMEM_BYTES)
    return ForwardConfig(block_k, next(fitting, 1))
