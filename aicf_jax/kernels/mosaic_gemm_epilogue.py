"""``mosaic_gemm_epilogue``: `pallas_kernels.gemm_epilogue.forward` for Hopper.

Memory moved: A, B and b read once, Y written once, and Z where the backward wants it. Between product and activation
all is float32: a product that the equations round to 16 bits before the bias is not rounded here.
"""

from __future__ import annotations

from typing import Any

from aicf_jax.kernels._gemm_epilogue import STEPS, forward
from aicf_jax.kernels._hopper import NARROW, STORED, TARGETS, Where
from aicf_jax.kernels._kernel import ANY, Kernel
from aicf_jax.ops._matrices import Matrices
from aicf_jax.ops.epilogue import ACTIVATIONS


def _fits(item: Any) -> bool:
    """TMA moves rows of 16 bytes; its descriptor tiles an array by 8 rows of at least 16 elements."""
    if not isinstance(item, Matrices) or item.bias == "other":
        return False
    return item.contiguous >= 16 and item.strided >= 8 and item.bias_dtype in ("none", *STORED)


def _library() -> Any:
    from pallas_kernels import gemm_epilogue

    return gemm_epilogue


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
    "formula": ("guarded",),  # NaN and infinity are where the equations have them
    "matrices": Where("matrices whose last dimensions are multiples of 16 and whose others are multiples of 8", _fits),
}

KERNEL = Kernel(
    "mosaic_gemm_epilogue",
    "gemm_epilogue",
    ("cuda",),
    _CAPABILITIES,
    _RUN,
    save=_SAVE,
    targets=TARGETS,
    opaque=True,
)
