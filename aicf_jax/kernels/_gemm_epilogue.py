"""What the kernels of GEMM epilogues share: how an operation's arrays become matrices, and results its arrays again.

A library is a function that returns what has ``forward`` and ``backward``, as `pallas_kernels.gemm_epilogue` does: it
is called, and so imported, when a kernel runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from aicf_jax.kernels._kernel import ANY, Where
from aicf_jax.ops import FusedOp
from aicf_jax.ops._matrices import Matrices, Rows, bias_slot, named, part_of, result_shape, rows, summed_axes
from aicf_jax.ops.epilogue import ACTIVATIONS
from aicf_jax.partition import Partition

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


def forward(library: Callable[[], Any], fits: Callable[[Matrices], bool]) -> dict[str, Any]:
    """``run``, ``save`` and ``partition`` of a `Kernel` that takes matrices that `fits`."""

    def product(op: FusedOp, inputs: Any) -> Callable[..., Any]:
        """The kernel, or for a part of the arrays that it does not take, XLA's."""
        part = part_of(op, *(inputs[i] for i in op.steps[0].operands))
        return library().forward if part is not None and fits(part) else functools.partial(_by_xla, ())

    def run(op: FusedOp, *inputs: Any) -> tuple[Any, ...]:
        return _run(product(op, inputs), op, inputs)

    def save(op: FusedOp, *inputs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return _save(product(op, inputs), op, inputs)

    return {"run": run, "save": save, "partition": _partition}


def _run(f: Callable[..., Any], op: FusedOp, inputs: Any) -> tuple[Any, ...]:
    return _call(f, op, inputs, None)[:1]


def _save(f: Callable[..., Any], op: FusedOp, inputs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    slot = op.residual
    if slot is None or slot in op.results:
        results = _run(f, op, inputs)
        return results, () if slot is None else (results[op.results.index(slot)],)
    y, z = _call(f, op, inputs, op.slot_avals[slot])
    return (y,), (z,)


def _call(f: Callable[..., Any], op: FusedOp, inputs: Any, residual: Any) -> tuple[Any, ...]:
    a, b = (inputs[i] for i in op.steps[0].operands)
    product, attrs = part_of(op, a, b), op.blob.unpack()
    assert product is not None
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
    whole = (a.shape, b.shape) == tuple(op.in_avals[i].shape for i in op.steps[0].operands)
    shape = op.out_avals[0].shape if whole else result_shape(op, a, b)
    return tuple(x.reshape(shape) for x in found)


def _by_xla(
    over: tuple[Any, ...],
    a: Any,
    b: Any,
    bias: Any,
    *,
    activation: str,
    alpha: float,
    trans_a: bool,
    trans_b: bool,
    bias_along: str,
    out_dtype: Any,
    z_dtype: Any,
) -> tuple[Any, ...]:
    """What a library's ``forward`` finds, with the product summed over these axes of a mesh."""
    from pallas_kernels.gemm_epilogue.activations import ACTIVATIONS as FORMULAS

    batch = tuple(range(a.ndim - 2))
    contracted = ((a.ndim - 2 if trans_a else a.ndim - 1,), (b.ndim - 1 if trans_b else b.ndim - 2,))
    z = jax.lax.dot_general(a, b, (contracted, (batch, batch)), preferred_element_type=jnp.float32)
    z = jax.lax.psum(z, over) if over else z
    if bias is not None:
        z = z + (bias if bias_along == "n" else bias[:, None]).astype(jnp.float32)
    y = FORMULAS[activation].value(z, alpha).astype(out_dtype)
    return (y,) if z_dtype is None else (y, z.astype(z_dtype))


def gradient(library: Callable[[], Any], fits: Callable[[Rows], bool], in_place: bool = False) -> dict[str, Any]:
    """``run`` and ``partition`` of a `Kernel` for the activation's gradient with its sum, of rows that `fits`.

    `in_place`: the library can write dZ over Z.
    """

    def run(op: FusedOp, *inputs: Any) -> tuple[Any, ...]:
        whole, attrs = rows(op), op.blob.unpack()
        assert whole is not None
        shape = inputs[op.steps[0].operands[1]].shape
        count = len(summed_axes(op))
        part = dataclasses.replace(whole, m=math.prod(shape[:count]), n=math.prod(shape[count:]))
        residual, dy = (inputs[i].reshape(part.m, part.n) for i in op.steps[0].operands)
        sums, out = op.out_avals
        options: dict[str, Any] = {k: attrs[k] for k in ("activation", "alpha", "from_output")}
        if fits(part):
            if in_place:
                # Z, unlike Y, is kept for this gradient only: dZ takes its place.
                options["in_place"] = not attrs["from_output"]
            dz, db = library().backward(residual, dy, **options, dz_dtype=out.dtype, db_dtype=sums.dtype)
        else:
            from pallas_kernels.gemm_epilogue import reference

            dz, db = reference.backward(residual, dy, **options)
        # Of whole arrays the sum has the shape it is asked for, of a part that of the dimensions that are left.
        trailing = sums.shape if (part.m, part.n) == (whole.m, whole.n) else shape[count:]
        return db.astype(sums.dtype).reshape(trailing), dz.astype(out.dtype).reshape(shape)

    return {"run": run, "partition": _partition_gradient}


# -- several devices -------------------------------------------------------------------------------------


def _partition(op: FusedOp, saving: bool) -> Partition | None:
    """Batch, rows and columns may be split, and the depth: then products are summed before the epilogue."""
    left, right = op.steps[0].operands
    a, b = named(op)
    batch, m, n = ([d for d in x if d[0] == kind] for x, kind in ((a, "b"), (a, "m"), (b, "n")))
    inputs: dict[int, Any] = {left: a, right: b}
    slot = bias_slot(op)
    if left == right or slot in (left, right):
        return None  # one array in two roles: no split is right for both
    if slot is not None:
        along = n if op.blob.unpack()["bias_along"] == "n" else m
        wide = iter(along)
        length = dict(zip((*a, *b), (*op.in_avals[left].shape, *op.in_avals[right].shape), strict=True))
        sizes = [length[d] for d in along]
        shape = op.in_avals[slot].shape
        if [k for k in shape if k != 1] != [k for k in sizes if k != 1] or 1 in sizes:
            return None
        inputs[slot] = tuple(None if k == 1 else next(wide) for k in shape)
    result = (*batch, *m, *n)
    if len(result) != len(op.out_avals[0].shape) or len(inputs) != len(op.in_avals):
        return None
    count = len(op.results) + (saving and op.residual is not None)

    def contracted(over: tuple[Any, ...], *parts: Any) -> tuple[Any, ...]:
        f = functools.partial(_by_xla, over)
        if not saving:
            return _run(f, op, parts)
        out, saved = _save(f, op, parts)
        return (*out, *saved)

    return Partition(tuple(inputs[i] for i in range(len(inputs))), (result,) * count, contracted=contracted)


def _partition_gradient(op: FusedOp, saving: bool) -> Partition | None:
    """Rows and columns may be split; the sum is that of the parts' sums."""
    count, (sums, out) = len(summed_axes(op)), op.out_avals
    names = tuple(f"{'r' if d < count else 'n'}{d}" for d in range(len(out.shape)))
    if sums.shape != out.shape[count:] or any(a.shape != out.shape for a in op.in_avals):
        return None
    return Partition((names,) * len(op.in_avals), (names[count:], names), sums=(0,))
