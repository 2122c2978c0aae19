"""What the kernels of GEMM epilogues share: how an operation's arrays become matrices, and results its arrays again.

A library is a function that returns what has ``forward`` and ``backward``, as `pallas_kernels.gemm_epilogue` does: it
is called, and so imported, when a kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aicf_jax.kernels._kernel import ANY, Where
from aicf_jax.ops import FusedOp
from aicf_jax.ops._matrices import Matrices, Rows, bias_slot, matrices, rows
from aicf_jax.ops.epilogue import ACTIVATIONS

#: Types of operands and results.
NARROW = ("bfloat16", "float16")
STORED = ("bfloat16", "float16", "float32")

#: Steps that a kernel of the forward does: between product and result all is float32.
_STEPS = frozenset({"gemm", "bias_add", "convert_element_type", *ACTIVATIONS})


def capabilities(text: str, fits: Callable[[Matrices], bool]) -> dict[str, Any]:
    """What a forward can take: matrices that `fits`, of which `text` tells, and all else of the family."""

    def holds(item: Any) -> bool:
        known = isinstance(item, Matrices) and item.bias != "other" and item.bias_dtype in ("none", *STORED)
        return known and fits(item)

    return {
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
        "matrices": Where(text, holds),
    }


def gradient_capabilities(text: str, fits: Callable[[Rows], bool]) -> dict[str, Any]:
    """What a gradient can take: rows that `fits`, of which `text` tells, with dZ and its sum both wanted."""

    def holds(item: Any) -> bool:
        if not isinstance(item, Rows):
            return False
        first, *casts, last = item.steps
        plain = set(casts) <= {"convert_element_type"} and last == "reduce_sum" and item.results == (last, first)
        return plain and item.residual_dtype in STORED and item.sum_dtype in STORED and fits(item)

    return {
        "activation": ACTIVATIONS,
        "from_output": ANY,
        "summed_axes": ANY,
        "dtype": NARROW,
        "formula": ("guarded",),
        "rows": Where(f"dZ and its sum over rows, {text}", holds),
    }


def forward(library: Callable[[], Any]) -> tuple[Any, Any]:
    """``run`` and ``save`` of a `Kernel`."""

    def run(op: FusedOp, *inputs: Any) -> tuple[Any, ...]:
        return _call(library().forward, op, inputs, None)[:1]

    def save(op: FusedOp, *inputs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        slot = op.residual
        if slot is None or slot in op.results:
            results = run(op, *inputs)
            return results, () if slot is None else (results[op.results.index(slot)],)
        y, z = _call(library().forward, op, inputs, op.slot_avals[slot])
        return (y,), (z,)

    return run, save


def _call(f: Callable[..., Any], op: FusedOp, inputs: Any, residual: Any) -> tuple[Any, ...]:
    product, attrs = matrices(op), op.blob.unpack()
    assert product is not None
    a, b = (inputs[i] for i in op.steps[0].operands)
    batch = () if product.batch is None else (product.batch,)
    rows, columns = (product.m, product.k), (product.k, product.n)
    slot = bias_slot(op)
    found = f(
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


def gradient(library: Callable[[], Any]) -> Any:
    """``run`` of a `Kernel` for the activation's gradient with its sum."""

    def run(op: FusedOp, *inputs: Any) -> tuple[Any, ...]:
        shape, attrs = rows(op), op.blob.unpack()
        assert shape is not None
        residual, dy = (inputs[i].reshape(shape.m, shape.n) for i in op.steps[0].operands)
        sums, out = op.out_avals
        dz, db = library().backward(
            residual,
            dy,
            activation=str(attrs["activation"]),
            alpha=float(attrs["alpha"]),  # pyright: ignore[reportArgumentType]
            from_output=bool(attrs["from_output"]),
            dz_dtype=out.dtype,
            db_dtype=sums.dtype,
        )
        return db.reshape(sums.shape), dz.reshape(out.shape)

    return run
