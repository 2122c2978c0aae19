"""``mosaic_gemm_epilogue_grad``: `pallas_kernels.gemm_epilogue.backward` for Hopper.

Memory moved: dY and the residual read once, dZ and db written once. Sums in float32, the same bits on every run.
"""

from __future__ import annotations

from typing import Any

from aicf_jax.kernels._gemm_epilogue import gradient
from aicf_jax.kernels._hopper import NARROW, STORED, TARGETS, Where
from aicf_jax.kernels._kernel import ANY, Kernel
from aicf_jax.ops._matrices import Rows, multiple
from aicf_jax.ops.epilogue import ACTIVATIONS


def _fits(item: Any) -> bool:
    """Whether dZ and its sum are both wanted, with whole atoms of shared memory (see `mosaic_gemm_epilogue`)."""
    if not isinstance(item, Rows) or multiple(item.n) < 16 or multiple(item.m) < 8:
        return False
    first, *casts, last = item.steps
    plain = set(casts) <= {"convert_element_type"} and last == "reduce_sum"
    wanted = item.results == (last, first)
    return plain and wanted and item.residual_dtype in STORED and item.sum_dtype in STORED


def _library() -> Any:
    from pallas_kernels import gemm_epilogue

    return gemm_epilogue


_CAPABILITIES: dict[str, Any] = {
    "activation": ACTIVATIONS,
    "from_output": ANY,
    "summed_axes": ANY,
    "dtype": NARROW,
    "formula": ("guarded",),
    "rows": Where("dZ and its sum over rows, their number a multiple of 8 and that of columns of 16", _fits),
}

KERNEL = Kernel(
    "mosaic_gemm_epilogue_grad",
    "gemm_epilogue_grad",
    ("cuda",),
    _CAPABILITIES,
    gradient(_library),
    targets=TARGETS,
    opaque=True,
)
