"""``streamed_attention``: online-softmax attention as lax loops, from the program that `mcir` derives.

Memory moved: Q, K, V and the result once when K and V fit in the cache, K and V once per block of queries otherwise;
O(S) temporaries. Scores exist one block at a time, accumulated in float32 (float64 for float64).

Without gradients, equations of which XLA's own compiler makes such a kernel run as they are (`_attention_whole`).
"""

from __future__ import annotations

from typing import Any

from aicf_jax.kernels._kernel import ANY, Kernel
from aicf_jax.ops import FusedOp, _programs
from aicf_jax.ops._attention_whole import is_one_kernel_of_xla


def _run(op: FusedOp, *inputs: Any) -> tuple[Any, ...]:
    if is_one_kernel_of_xla(op):
        return tuple(op.reference(*inputs))
    return _programs.lowered(_programs.forward, op)(*inputs)


def _save(op: FusedOp, *inputs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    found = _programs.lowered(_programs.forward_saving, op)(*inputs)
    n = len(op.results)
    return found[:n], found[n:]


def _program(op: FusedOp) -> str:
    return _programs.text(_programs.forward, op)


KERNEL = Kernel(
    "streamed_attention",
    "attention",
    ("cpu",),
    {"operand_dtypes": ANY, "output_dtype": ANY, "steps": ANY, "variant": ANY},
    _run,
    cost_bytes=_programs.moved_bytes,
    save=_save,
    program=_program,
)
