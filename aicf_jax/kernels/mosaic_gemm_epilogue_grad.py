"""``mosaic_gemm_epilogue_grad``: `pallas_kernels.gemm_epilogue.backward` for Hopper.

Memory moved: dY and the residual read once, dZ and db written once. Sums in float32, the same bits on every run.
"""

from __future__ import annotations

from typing import Any

from aicf_jax.kernels._gemm_epilogue import gradient, gradient_capabilities
from aicf_jax.kernels._hopper import TARGETS, needs
from aicf_jax.kernels._kernel import Kernel
from aicf_jax.ops._matrices import Rows, multiple


def _library() -> Any:
    from pallas_kernels import gemm_epilogue

    return gemm_epilogue


def _fits(item: Rows) -> bool:
    """Whole atoms of shared memory (see `mosaic_gemm_epilogue`)."""
    return multiple(item.n) >= 16 and multiple(item.m) >= 8


KERNEL = Kernel(
    "mosaic_gemm_epilogue_grad",
    "gemm_epilogue_grad",
    ("cuda",),
    gradient_capabilities("their number a multiple of 8 and that of columns of 16", _fits),
    **gradient(_library, _fits, in_place=True),
    targets=TARGETS,
    needs=needs,
    opaque=True,
)
