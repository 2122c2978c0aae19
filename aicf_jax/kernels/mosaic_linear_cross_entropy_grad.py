"""``mosaic_linear_cross_entropy_grad``: `pallas_kernels.linear_cross_entropy.backward`, for losses of rows, for Hopper.

Logits and their gradient are made again, a block of the vocabulary at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from aicf_jax.kernels._hopper import TARGETS, needs
from aicf_jax.kernels._kernel import ANY, Kernel
from aicf_jax.kernels._loss import VARIANT, bytes_of_product, gradient_launches, gradients
from aicf_jax.ops import FusedOp


def _run(op: FusedOp, *arguments: Any, on_parts: bool = False) -> tuple[Any, ...]:
    assert op.gradient_of is not None
    forward, wanted = op.gradient_of
    n = len(forward.in_avals)
    _, *saved, ct = arguments[n:]  # the result comes first
    return gradients(forward, arguments[:n], saved, ct, wanted, on_parts)


def _partition(op: FusedOp, saving: bool) -> Callable[..., Any]:
    return functools.partial(_run, op, on_parts=True)


def _bytes(op: FusedOp) -> int:
    return op.outer_bytes() + (0 if op.gradient_of is None else bytes_of_product(op.gradient_of[0]))


def _launches(op: FusedOp) -> int:
    return 1 if op.gradient_of is None else gradient_launches(*op.gradient_of)


KERNEL = Kernel(
    "mosaic_linear_cross_entropy_grad",
    "linear_cross_entropy_grad",
    ("cuda",),
    {"dtypes": ANY, "recomputes": {True}, "variant": VARIANT},
    _run,
    cost_bytes=_bytes,
    moved_bytes=FusedOp.outer_bytes,
    launches=_launches,
    partition=_partition,
    targets=TARGETS,
    needs=needs,
    opaque=True,
)
