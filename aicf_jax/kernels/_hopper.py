"""What the kernels in Mosaic GPU share."""

from __future__ import annotations

from aicf_jax.hardware import Need
from aicf_jax.ops import FusedOp
from aicf_jax.ops._attention_variant import Variant

#: The machines they are made for.
TARGETS = ("h100", "h200")

#: Lengths of a head that attention takes are multiples of the first number up to the second.
_HEAD_ATOM, _LONGEST_HEAD = 16, 256

#: Which they are.
HEADS = f"heads of a multiple of {_HEAD_ATOM} up to {_LONGEST_HEAD}"


def takes_heads(v: Variant) -> bool:
    """Whether attention takes heads of this length, forward and backward."""
    depth = v.size(v.roles.depth)
    return depth % _HEAD_ATOM == 0 and depth <= _LONGEST_HEAD


def needs(op: FusedOp) -> tuple[Need, ...]:
    """The shared memory that their configurations may take, and tensor cores for the type of the first operand."""
    from pallas_kernels._mosaic import HOPPER_SMEM_BYTES

    dtype = str(op.in_avals[0].dtype)
    return Need("smem.max_per_block", HOPPER_SMEM_BYTES, "B"), Need(f"tensor.{dtype}", 0, "FLOP/s")
