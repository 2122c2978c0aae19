"""``triton_gemm_epilogue_grad``: `pallas_kernels.gemm_epilogue.portable.backward` for Ampere and Ada.

Memory moved: dY and the residual read once, dZ written once, and sums of groups of rows, which are added up after it.
Sums in float32, the same bits on every run. Any number of rows and columns.
"""

from __future__ import annotations

from typing import Any

from aicf_jax.kernels._ampere import TARGETS, available
from aicf_jax.kernels._gemm_epilogue import gradient, gradient_capabilities
from aicf_jax.kernels._kernel import Kernel


def _library() -> Any:
    from pallas_kernels.gemm_epilogue import portable

    return portable


KERNEL = Kernel(
    "triton_gemm_epilogue_grad",
    "gemm_epilogue_grad",
    ("cuda",),
    # Offsets in a matrix are 32-bit numbers.
    gradient_capabilities("of less than 2^31 elements", lambda item: item.m * item.n < 2**31),
    gradient(_library),
    targets=TARGETS,
    opaque=True,
    available=available,
)
