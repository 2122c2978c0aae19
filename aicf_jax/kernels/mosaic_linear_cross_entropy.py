"""``mosaic_linear_cross_entropy``: `pallas_kernels.linear_cross_entropy` for Hopper.

Memory moved: h and W once, and a few numbers a row. A loss that is one number also has its gradients computed here when
it is differentiated: then the logits are made a second time, block by block, and dh and dW written. All is float32 but
for the gradient of the logits, which is rounded to the type of h and W before it is multiplied by them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from aicf_jax.kernels._gemm_epilogue import NARROW
from aicf_jax.kernels._hopper import TARGETS, needs
from aicf_jax.kernels._kernel import ANY, Kernel
from aicf_jax.kernels._loss import VARIANT, bytes_of_product, gradients, numbers
from aicf_jax.ops import FusedOp, nbytes
from aicf_jax.ops._loss_composition import kept_gradients, rows_of


def _run(op: FusedOp, *inputs: Any) -> tuple[Any, ...]:
    return _save_rows(op, inputs)[0]


def _save_rows(op: FusedOp, inputs: Any, on_parts: bool = False) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    m, l, *taken = numbers(op, inputs, on_parts)
    return (rows_of(op, inputs).loss(m, l, taken),), (m, l, *taken)


def _save(op: FusedOp, *inputs: Any, on_parts: bool = False) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    (loss,), saved = _save_rows(op, inputs, on_parts)
    kept = kept_gradients(op)
    unit = gradients(op, inputs, saved, jnp.ones_like(loss), kept, on_parts) if kept else ()
    return (loss,), (*saved, *unit)


def _partition(op: FusedOp, saving: bool) -> Callable[..., list[Any]]:
    """What a loss makes of the numbers of rows is for XLA to split."""

    def on_parts(*inputs: Any) -> list[Any]:
        results, saved = _save(op, *inputs, on_parts=True) if saving else _save_rows(op, inputs, on_parts=True)
        return [*results, *saved] if saving else list(results)

    return on_parts


def _bytes(op: FusedOp) -> int:
    """Inputs and results once, gradients that are kept, and what making the logits twice costs."""
    return op.outer_bytes() + sum(nbytes(op.in_avals[i]) for i in kept_gradients(op)) + bytes_of_product(op)


KERNEL = Kernel(
    "mosaic_linear_cross_entropy",
    "linear_cross_entropy",
    ("cuda",),
    {"operand_dtypes": tuple((t, t) for t in NARROW), "output_dtype": ANY, "steps": ANY, "variant": VARIANT},
    _run,
    cost_bytes=_bytes,
    moved_bytes=FusedOp.outer_bytes,
    launches=2,  # parts of the vocabulary, and to merge them
    save=_save,
    partition=_partition,
    targets=TARGETS,
    needs=needs,
    opaque=True,
)
