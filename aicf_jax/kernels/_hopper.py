"""What the kernels in Mosaic GPU share."""

from __future__ import annotations

from aicf_jax.hardware import Need
from aicf_jax.ops import FusedOp

#: The machines they are made for.
TARGETS = ("h100", "h200")


def needs(op: FusedOp) -> tuple[Need, ...]:
    """The shared memory that their configurations may take, and tensor cores for the type of the first operand."""
    from pallas_kernels._mosaic import HOPPER_SMEM_BYTES

    dtype = str(op.in_avals[0].dtype)
    return Need("smem.max_per_block", HOPPER_SMEM_BYTES, "B"), Need(f"tensor.{dtype}", 0, "FLOP/s")
