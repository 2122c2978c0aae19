"""``streamed_attention_grad``: the derived backward of attention as lax loops, from the program that `mcir` derives.

Scores and weights are computed again, one block at a time; O(S) temporaries.
"""

from __future__ import annotations

from typing import Any

from aicf_jax.kernels._kernel import ANY, Kernel
from aicf_jax.ops import FusedOp, _programs


def _run(op: FusedOp, *inputs: Any) -> tuple[Any, ...]:
    return _programs.lowered(_programs.backward, op)(*inputs)


def _program(op: FusedOp) -> str:
    return _programs.text(_programs.backward, op)


KERNEL = Kernel(
    "streamed_attention_grad",
    "attention_grad",
    ("cpu",),
    {"dtypes": ANY, "gradients": ANY, "variant": ANY},
    _run,
    cost_bytes=_programs.moved_bytes,
    program=_program,
)
