"""``triton_gemm_epilogue_grad``: `pallas_kernels.gemm_epilogue.portable.backward` for Ampere and Ada.

Memory moved: dY and the residual read once, dZ written once, and sums of groups of rows, which are added up after it.
Sums in float32, the same bits on every run. Any number of rows and columns.
"""

from __future__ import annotations

from typing import Any

from aicf_jax.kernels._ampere import TARGETS, available
from aicf_jax.kernels._gemm_epilogue import gradient
from aicf_jax.kernels._hopper import NARROW, STORED, Where
from aicf_jax.kernels._kernel import ANY, Kernel
from aicf_jax.ops._matrices import Rows
from aicf_jax.ops.epilogue import ACTIVATIONS


def _fits(item: Any) -> bool:
    """Whether dZ and its sum are both wanted, of a matrix whose offsets are 32-bit numbers."""
    if not isinstance(item, Rows) or item.m * item.n >= 2**31:
        return False
    first, *casts, last = item.steps
    plain = set(casts) <= {"convert_element_type"} and last == "reduce_sum"
    return plain and item.results == (last, first) and item.residual_dtype in STORED and item.sum_dtype in STORED


def _library() -> Any:
    from pallas_kernels.gemm_epilogue import portable

    return portable


_CAPABILITIES: dict[str, Any] = {
    "activation": ACTIVATIONS,
    "from_output": ANY,
    "summed_axes": ANY,
    "dtype": NARROW,
    "formula": ("guarded",),
    "rows": Where("dZ and its sum over rows, of less than 2^31 elements", _fits),
}

KERNEL = Kernel(
    "triton_gemm_epilogue_grad",
    "gemm_epilogue_grad",
    ("cuda",),
    _CAPABILITIES,
    gradient(_library),
    targets=TARGETS,
    opaque=True,
    available=available,
)
