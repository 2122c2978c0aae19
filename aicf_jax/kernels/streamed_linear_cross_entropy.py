"""``streamed_linear_cross_entropy``: logits, their log-sum-exp and the loss block by block, from a program of `mcir`.

Memory moved: h, W and the losses once; a block of logits stays in the cache. A loss that is one number also has its
gradients computed here when it is differentiated: then dh is written once and dW once for each block of rows.
"""

from __future__ import annotations

from typing import Any

from aicf_jax.kernels._kernel import ANY, Kernel
from aicf_jax.ops import FusedOp, _loss_programs


def _run(op: FusedOp, *inputs: Any) -> tuple[Any, ...]:
    return _loss_programs.lowered(_loss_programs.forward, op)(*inputs)


def _save(op: FusedOp, *inputs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    found = _loss_programs.lowered(_loss_programs.forward_saving, op)(*inputs)
    n = len(op.results)
    return found[:n], found[n:]


def _program(op: FusedOp) -> str:
    return _loss_programs.text(op)


KERNEL = Kernel(
    "streamed_linear_cross_entropy",
    "linear_cross_entropy",
    ("cpu",),
    {"operand_dtypes": ANY, "output_dtype": ANY, "steps": ANY, "variant": ANY},
    _run,
    cost_bytes=_loss_programs.moved_bytes,
    moved_bytes=FusedOp.outer_bytes,
    save=_save,
    program=_program,
)
