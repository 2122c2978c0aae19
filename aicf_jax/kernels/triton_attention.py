"""``triton_attention``: `pallas_kernels.attention.portable.forward` for Ampere and Ada.

Memory moved: Q, K, V and the result once, and two numbers a row where the backward wants them; arrays whose dimensions
lie in another order than the kernel's are transposed first. Between the products all is float32 but for the weights,
which are rounded to the type of V. Any number of queries and keys.
"""

from __future__ import annotations

from typing import Any

from aicf_jax.kernels._ampere import TARGETS, attention_fits, available
from aicf_jax.kernels._attention import capabilities, forward, moved_bytes
from aicf_jax.kernels._kernel import Kernel


def _library() -> Any:
    from pallas_kernels.attention import portable

    return portable


KERNEL = Kernel(
    "triton_attention",
    "attention",
    ("cuda",),
    capabilities(*attention_fits()),
    **forward(_library),
    cost_bytes=moved_bytes,
    targets=TARGETS,
    opaque=True,
    available=available,
)
