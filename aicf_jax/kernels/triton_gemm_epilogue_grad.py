"""``triton_gemm_epilogue_grad``: `pallas_kernels.gemm_epilogue.portable.backward` for Ampere and Ada.

Memory moved: dY and the residual read once, dZ written once, and sums of groups of rows, which are added up after it.
Sums in float32, the same bits on every run. Any number of rows and columns.
"""

from __future__ import annotations

from typing import Any

from aicf_jax.kernels._ampere import TARGETS, available
from aicf_jax.kernels._gemm_epilogue import gradient, gradient_capabilities
from aicf_jax.kernels._kernel import Kernel
from aicf_jax.ops._matrices import Rows


def _library() -> Any:
    from pallas_kernels.gemm_epilogue import portable

    return portable


def _fits(item: Rows) -> bool:
    """Offsets in a matrix are 32-bit numbers."""
    return item.m * item.n < 2**31


KERNEL = Kernel(
    "triton_gemm_epilogue_grad",
    "gemm_epilogue_grad",
    ("cuda",),
    gradient_capabilities("of less than 2^31 elements", _fits),
    **gradient(_library, _fits),
    targets=TARGETS,
    opaque=True,
    available=available,
)
