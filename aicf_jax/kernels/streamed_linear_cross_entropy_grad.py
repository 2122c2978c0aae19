"""``streamed_linear_cross_entropy_grad``: the backward of losses of rows, from the program that `mcir` derives.

Logits and their gradient are computed again, a block of the vocabulary at a time.
"""

from __future__ import annotations

from typing import Any

from aicf_jax.kernels._kernel import ANY, Kernel
from aicf_jax.ops import FusedOp, _loss_programs, _programs


def _run(op: FusedOp, *inputs: Any) -> tuple[Any, ...]:
    return _loss_programs.lowered(_loss_programs.backward, op)(*inputs)


def _program(op: FusedOp) -> str:
    return str(_loss_programs.scheduled(_loss_programs.backward, op))


KERNEL = Kernel(
    "streamed_linear_cross_entropy_grad",
    "linear_cross_entropy_grad",
    ("cpu",),
    {"dtypes": ANY, "recomputes": {True}, "variant": ANY},
    _run,
    cost_bytes=_programs.moved_bytes,
    program=_program,
)
