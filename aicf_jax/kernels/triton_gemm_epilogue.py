"""``triton_gemm_epilogue``: `pallas_kernels.gemm_epilogue.portable.forward` for Ampere and Ada.

Memory moved: A, B and b read once, Y written once, and Z where the backward wants it; between them all is float32, as
in `mosaic_gemm_epilogue`. Any M, N and K.
"""

from __future__ import annotations

from typing import Any

from aicf_jax.kernels._ampere import TARGETS, available
from aicf_jax.kernels._gemm_epilogue import capabilities, forward
from aicf_jax.kernels._kernel import Kernel
from aicf_jax.ops._matrices import Matrices


def _library() -> Any:
    from pallas_kernels.gemm_epilogue import portable

    return portable


def _fits(item: Matrices) -> bool:
    """Offsets in a matrix are 32-bit numbers."""
    return max(item.m * item.k, item.k * item.n, item.m * item.n) < 2**31


KERNEL = Kernel(
    "triton_gemm_epilogue",
    "gemm_epilogue",
    ("cuda",),
    capabilities("matrices of less than 2^31 elements", _fits),
    **forward(_library, _fits),
    targets=TARGETS,
    opaque=True,
    available=available,
)
