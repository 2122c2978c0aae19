"""What the kernels in Mosaic GPU share."""

from __future__ import annotations

from aicf_jax.hardware import Need
from aicf_jax.ops import FusedOp
from aicf_jax.ops._attention_variant import Variant

#: The machines they are made for.
TARGETS = ("h100", "h200")

#: Of its heads.
HEADS = "heads of a multiple of 16 up to 256"


def takes_heads(v: Variant) -> bool:
    """Whether attention takes heads of this length, forward and backward."""
    from pallas_kernels.attention.config import is_head_dim

    return is_head_dim(v.size(v.roles.depth))


def needs(op: FusedOp) -> tuple[Need, ...]:
    """The shared memory that their configurations may take, and tensor cores for the type of the first operand."""
    from pallas_kernels._mosaic import HOPPER_SMEM_BYTES

    dtype = str(op.in_avals[0].dtype)
    return Need("smem.max_per_block", HOPPER_SMEM_BYTES, "B"), Need(f"tensor.{dtype}", 0, "FLOP/s")
