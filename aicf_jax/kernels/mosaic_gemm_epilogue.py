"""``mosaic_gemm_epilogue``: `pallas_kernels.gemm_epilogue.forward` for Hopper.

Memory moved: A, B and b read once, Y written once, and Z where the backward wants it. Between product and activation
all is float32: a product that the equations round to 16 bits before the bias is not rounded here.
"""

from __future__ import annotations

from typing import Any

from aicf_jax.kernels._gemm_epilogue import capabilities, forward
from aicf_jax.kernels._hopper import TARGETS, needs
from aicf_jax.kernels._kernel import Kernel
from aicf_jax.ops._matrices import Matrices


def _library() -> Any:
    from pallas_kernels import gemm_epilogue

    return gemm_epilogue


def _fits(item: Matrices) -> bool:
    """TMA moves rows of 16 bytes; its descriptor tiles an array by 8 rows of at least 16 elements."""
    return item.contiguous >= 16 and item.strided >= 8


KERNEL = Kernel(
    "mosaic_gemm_epilogue",
    "gemm_epilogue",
    ("cuda",),
    capabilities("matrices whose last dimensions are multiples of 16 and whose others are multiples of 8", _fits),
    **forward(_library, _fits),
    targets=TARGETS,
    needs=needs,
    opaque=True,
)
