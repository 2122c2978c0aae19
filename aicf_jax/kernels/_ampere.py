"""What the portable kernels of `pallas_kernels` share, in terms of what operations require."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from aicf_jax.kernels._norm import Library, parameter_sums
from aicf_jax.ops import FusedOp, _norm
from aicf_jax.ops._attention_variant import Variant

#: The machines they are made for.
TARGETS = ("a100", "l4")


def available() -> tuple[str, str] | None:
    """What they need and what there is instead; None where jax-triton works with the installed jax."""
    from pallas_kernels import _triton

    return _triton.unavailable()


def _norms() -> Any:
    from pallas_kernels.norm import portable

    return portable


def _moved(op: FusedOp) -> int:
    """The sums of each block."""
    length = _norm.row_length(op)
    count = math.prod(op.in_avals[0].shape) // length
    return parameter_sums(op) * _norms().partial_bytes(count, length) if parameter_sums(op) else 0


#: Rows of at most 8192 elements (`pallas_kernels.norm.portable.MAX_LENGTH`), of whatever type.
NORMS = Library("triton", TARGETS, _norms, (32768, 32768), _moved, available)


def attention_fits() -> tuple[str, Callable[[Variant], bool]]:
    """The kinds of attention they take, in words and as a test. Rows of 16 bytes can be loaded ahead."""

    def fits(v: Variant) -> bool:
        depth = v.size(v.roles.depth)
        return depth % 8 == 0 and 16 <= depth <= 256

    return (
        "heads of a multiple of 8 from 16 to 256, with no more than scale, softcap and limits on the distance of query "
        "and key",
        fits,
    )
