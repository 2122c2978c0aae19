"""``triton_gemm_epilogue``: `pallas_kernels.gemm_epilogue.portable.forward` for Ampere and Ada.

Memory moved: A, B and b read once, Y written once, and Z where the backward wants it; between them all is float32, as
in `mosaic_gemm_epilogue`. Any M, N and K.
"""

from __future__ import annotations

from typing import Any

from aicf_jax.kernels._ampere import TARGETS, available
from aicf_jax.kernels._gemm_epilogue import STEPS, forward
from aicf_jax.kernels._hopper import NARROW, STORED, Where
from aicf_jax.kernels._kernel import ANY, Kernel
from aicf_jax.ops._matrices import Matrices
from aicf_jax.ops.epilogue import ACTIVATIONS


def _fits(item: Any) -> bool:
    """Offsets in a matrix are 32-bit numbers."""
    if not isinstance(item, Matrices) or item.bias == "other":
        return False
    most = max(item.m * item.k, item.k * item.n, item.m * item.n)
    return most < 2**31 and item.bias_dtype in ("none", *STORED)


def _library() -> Any:
    from pallas_kernels.gemm_epilogue import portable

    return portable


_RUN, _SAVE = forward(_library)

_CAPABILITIES: dict[str, Any] = {
    "activation": ACTIVATIONS,
    "has_bias": ANY,
    "bias_along": ANY,
    "batched": ANY,
    "trans_a": ANY,
    "trans_b": ANY,
    "operand_dtypes": tuple((t, t) for t in NARROW),
    "output_dtype": STORED,
    "product_dtype": STORED,
    # Products of 16-bit numbers are exact in float32, which is what any precision asks for.
    "precision": ANY,
    "steps": Where("a product, casts, bias and activation", lambda names: STEPS.issuperset(names)),
    "formula": ("guarded",),  # as for Hopper
    "matrices": Where("matrices of less than 2^31 elements", _fits),
}

KERNEL = Kernel(
    "triton_gemm_epilogue",
    "gemm_epilogue",
    ("cuda",),
    _CAPABILITIES,
    _RUN,
    save=_SAVE,
    targets=TARGETS,
    opaque=True,
    available=available,
)
