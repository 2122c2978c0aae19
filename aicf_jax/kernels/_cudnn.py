"""What cuDNN's attention, forward and backward, is as a candidate."""

from __future__ import annotations

from typing import Any

from aicf_jax.kernels import _attention
from aicf_jax.ops import FusedOp
from aicf_jax.ops._attention_variant import Variant

#: Machines of compute capability 8.0 and later.
TARGETS = ("a100", "l4", "h100", "h200", "b200")

TEXT = (
    "heads of a multiple of 8 up to 128, with no more than scale and, of as many keys as queries, a causal mask or a "
    "window that ends at the query itself"
)


def library() -> Any:
    from pallas_kernels.attention import cudnn

    return cudnn


def available() -> tuple[str, str] | None:
    """What it needs and what there is instead; None where jax finds cuDNN."""
    return library().unavailable()


def fits(v: Variant) -> bool:
    r, b = v.roles, v.band
    return library().takes(v.size(r.query), v.size(r.key), v.size(r.depth), b.lower, b.upper, v.softcap)


def ranked_bytes(op: FusedOp) -> int:
    """Twice what it must move: a kernel whose traffic is known goes first until somebody measures (`aicf_jax.tune`)."""
    return 2 * _attention.moved_bytes(op)
