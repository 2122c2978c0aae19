"""``mosaic_gemm_epilogue``: `pallas_kernels.gemm_epilogue.forward` for Hopper.

Memory moved: A, B and b read once, Y written once, and Z where the backward wants it. Between product and activation
all is float32: a product that the equations round to 16 bits before the bias is not rounded here.
"""

from __future__ import annotations

from typing import Any

from aicf_jax.kernels._hopper import NARROW, STORED, TARGETS, Where
from aicf_jax.kernels._kernel import ANY, Kernel
from aicf_jax.ops import FusedOp
from aicf_jax.ops._matrices import Matrices, bias_slot, matrices
from aicf_jax.ops.epilogue import ACTIVATIONS


def _fits(item: Any) -> bool:
    """TMA moves rows of 16 bytes; its descriptor tiles an array by 8 rows of at least 16 elements."""
    if not isinstance(item, Matrices) or item.bias == "other":
        return False
    return item.contiguous >= 16 and item.strided >= 8 and item.bias_dtype in ("none", *STORED)


def _run(op: FusedOp, *inputs: Any) -> tuple[Any, ...]:
    return _call(op, inputs, None)[:1]


def _save(op: FusedOp, *inputs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    slot = op.residual
    if slot is None or slot in op.results:
        results = _run(op, *inputs)
        return results, () if slot is None else (results[op.results.index(slot)],)
    y, z = _call(op, inputs, op.slot_avals[slot])
    return (y,), (z,)


def _call(op: FusedOp, inputs: Any, residual: Any) -> tuple[Any, ...]:
    from pallas_kernels.gemm_epilogue import forward

    product, attrs = matrices(op), op.blob.unpack()
    assert product is not None
    a, b = (inputs[i] for i in op.steps[0].operands)
    batch = () if product.batch is None else (product.batch,)
    rows, columns = (product.m, product.k), (product.k, product.n)
    slot = bias_slot(op)
    found = forward(
        a.reshape(*batch, *(rows[::-1] if product.trans_a else rows)),
        b.reshape(*batch, *(columns[::-1] if product.trans_b else columns)),
        None if slot is None else inputs[slot].reshape(-1),
        activation=str(attrs["activation"]),
        alpha=float(attrs["alpha"]),  # pyright: ignore[reportArgumentType]
        trans_a=product.trans_a,
        trans_b=product.trans_b,
        bias_along=str(attrs["bias_along"]),
        out_dtype=op.out_avals[0].dtype,
        z_dtype=None if residual is None else residual.dtype,
    )
    shapes = (op.out_avals[0].shape, *(() if residual is None else (residual.shape,)))
    return tuple(x.reshape(shape) for x, shape in zip(found, shapes, strict=True))


_STEPS = frozenset({"gemm", "bias_add", "convert_element_type", *ACTIVATIONS})

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
    "steps": Where("a product, casts, bias and activation", lambda names: _STEPS.issuperset(names)),
    "formula": ("guarded",),  # NaN and infinity are where the equations have them
    "matrices": Where("matrices whose last dimensions are multiples of 16 and whose others are multiples of 8", _fits),
}

KERNEL = Kernel(
    "mosaic_gemm_epilogue",
    "gemm_epilogue",
    ("cuda",),
    _CAPABILITIES,
    _run,
    save=_save,
    targets=TARGETS,
    opaque=True,
)
