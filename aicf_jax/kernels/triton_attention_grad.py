"""``triton_attention_grad``: `pallas_kernels.attention.portable.backward` for Ampere and Ada.

Memory moved: Q, K, V, the result, its cotangent and two numbers a row once, the gradients once, and two more numbers a
row between its kernels. Weights are computed again, one block at a time. Sums in float32, the same bits on every run.
"""

from __future__ import annotations

from typing import Any

from aicf_jax.kernels._ampere import TARGETS, attention_fits, available
from aicf_jax.kernels._attention import gradient, gradient_capabilities, moved_bytes
from aicf_jax.kernels._kernel import Kernel


def _library() -> Any:
    from pallas_kernels.attention import portable

    return portable


KERNEL = Kernel(
    "triton_attention_grad",
    "attention_grad",
    ("cuda",),
    gradient_capabilities(*attention_fits()),
    **gradient(_library),
    cost_bytes=moved_bytes,
    launches=3,  # numbers of rows, dQ, dK and dV
    targets=TARGETS,
    opaque=True,
    available=available,
)
