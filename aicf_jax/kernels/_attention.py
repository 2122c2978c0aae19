"""What kernels of attention share that know its kind: arrays as a library wants them, its results as the operation's.

A library is a function that returns what has ``forward`` and ``backward``, as `pallas_kernels.attention.portable` does:
it is called, and so imported, when a kernel runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from aicf_jax.kernels._attention_layouts import chosen, given, laid_out, layouts, row_axes, rows_given
from aicf_jax.kernels._gemm_epilogue import NARROW
from aicf_jax.kernels._kernel import ANY, Where
from aicf_jax.ops import FusedOp, nbytes
from aicf_jax.ops._attention_variant import Array, Variant, variant
from aicf_jax.ops.attention_grad import MORE, QKV

#: All that a library is told of; what else a kind of attention says must be nothing, or be told by who says so.
_TOLD = (
    *("sizes", "roles", "q", "k", "v", "out", "rows", "dtypes"),
    *("scale", "softcap", "band", "base"),
)


def capabilities(text: str, fits: Callable[[Variant], bool], *told: str) -> dict[str, Any]:
    """What a forward can take: a kind of attention that `fits`, of which `text` tells, in one 16-bit type.

    `told`: fields of `Variant` that its library is told of besides.
    """
    return {
        "operand_dtypes": tuple((t, t) for t in NARROW),
        "output_dtype": NARROW,
        "steps": ANY,
        "variant": _variants(text, fits, told),
    }


def gradient_capabilities(text: str, fits: Callable[[Variant], bool], *told: str) -> dict[str, Any]:
    """What a gradient can take: that of an attention that `fits`, and of biases where its library is told of them."""
    dtypes = Where("16-bit types", lambda found: set(found) <= set(NARROW))
    gradients = (QKV, MORE) if "biases" in told else (QKV,)
    return {"dtypes": dtypes, "gradients": gradients, "variant": _variants(text, fits, told)}


def _variants(text: str, fits: Callable[[Variant], bool], told: Sequence[str] = ()) -> Where:
    def holds(item: Any) -> bool:
        if not isinstance(item, Variant):
            return False
        untold = [getattr(item, f.name) for f in dataclasses.fields(item) if f.name not in (*_TOLD, *told)]
        depths = {item.size(item.roles.depth), item.size(item.roles.value_depth)}
        plain = not any(untold) and len(depths) == 1 and len(set(item.dtypes)) == 1
        return plain and item.dtypes[0] in NARROW and fits(item)

    return Where(f"Q, K, V and a result of one 16-bit type, {text}", holds)


def _nothing(op: FusedOp, v: Variant, inputs: Any) -> dict[str, Any]:
    return {}


def _no_biases(op: FusedOp, v: Variant, inputs: Any, wanted: Any) -> tuple[tuple[str, ...], Callable[..., Any]]:
    return (), lambda: {}


def forward(library: Callable[[], Any], beside: Callable[..., dict[str, Any]] = _nothing) -> dict[str, Any]:
    """``run`` and ``save`` of a `Kernel`. ``beside(op, variant, inputs)``: what the library is told of besides."""

    def run(op: FusedOp, *inputs: Any) -> tuple[Any, ...]:
        return _forward(library(), beside, op, inputs, saving=False)

    def save(op: FusedOp, *inputs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        out, m, total = _forward(library(), beside, op, inputs, saving=True)
        return (out,), (m, total)

    return {"run": run, "save": save}


def _equation(v: Variant) -> dict[str, Any]:
    return {
        "scale": v.scale * v.base,
        "lower": v.band.lower,
        "upper": v.band.upper,
        "softcap": None if v.softcap is None else v.softcap * v.base,
        "layouts": tuple(chosen(v, a)[0] for a in (v.q, v.k, v.v, v.out)),
    }


def _forward(library: Any, beside: Callable[..., Any], op: FusedOp, inputs: Any, saving: bool) -> tuple[Any, ...]:
    v = known(op)
    arrays = (given(v, a, inputs[a.argument]) for a in (v.q, v.k, v.v))
    out, *statistics = library.forward(*arrays, **_equation(v), **beside(op, v, inputs), with_statistics=saving)
    out = _back(v, v.out, op.out_avals[0].shape, out)
    if not saving:
        return (out,)
    shape = tuple(v.size(*d) for d in v.rows.dims)
    m, total = (laid_out(v, row_axes(v), v.rows, shape, x) for x in statistics)
    return out, m / v.base if v.base != 1.0 else m, total


def _back(v: Variant, array: Array, shape: tuple[int, ...], x: Any) -> Any:
    return laid_out(v, layouts(v, array)[chosen(v, array)[0]], array, shape, x)


def known(op: FusedOp) -> Variant:
    """The kind of attention of an operation that a kernel takes, or that it is the gradient of."""
    found = variant(op if op.gradient_of is None else op.gradient_of[0])
    assert isinstance(found, Variant)
    return found


def gradient(
    library: Callable[[], Any],
    beside: Callable[..., dict[str, Any]] = _nothing,
    pulled: Callable[..., tuple[tuple[str, ...], Callable[..., Any]]] = _no_biases,
) -> Callable[..., tuple[Any, ...]]:
    """``run`` of a `Kernel` for the gradients of Q, K and V, from the result and the statistics of its rows.

    An array may be several of the three; its gradient is the sum of theirs. ``beside(op, variant, inputs)``: what the
    library is told of besides. ``pulled(op, variant, inputs, wanted)``: names of biases whose gradients are wanted, and
    a function of these that gives those of the arguments they are made of.
    """

    def run(op: FusedOp, *inputs: Any) -> tuple[Any, ...]:
        assert op.gradient_of is not None
        v, (origin, wanted) = known(op), op.gradient_of
        given_to_it, (out, m, total, dout) = inputs[: len(origin.in_avals)], inputs[len(origin.in_avals) :]
        arrays = (v.q, v.k, v.v)
        names, pull = pulled(origin, v, given_to_it, wanted)
        dq, dk, dv, *of_biases = library().backward(
            *(given(v, a, inputs[a.argument]) for a in arrays),
            given(v, v.out, out),
            rows_given(v, m * v.base if v.base != 1.0 else m),
            rows_given(v, total),
            given(v, v.out, dout),
            **_equation(v),
            **beside(origin, v, given_to_it),
            **({"wanted": names} if names else {}),
        )
        found: dict[int, Any] = {}
        pairs = [
            (a.argument, _back(v, a, origin.in_avals[a.argument].shape, x))
            for a, x in zip(arrays, (dq, dk, dv), strict=True)
        ]
        for argument, x in (*pairs, *pull(*of_biases).items()):
            found[argument] = found[argument] + x if argument in found else x
        # Arguments of masks alone.
        return tuple(found[i] if i in found else jnp.zeros_like(inputs[i]) for i in wanted)

    return run


def moved_bytes(op: FusedOp) -> int:
    """Inputs and results once, and twice more what is transposed for the kernel."""
    origin = op if op.gradient_of is None else op.gradient_of[0]
    v = variant(origin)
    if not isinstance(v, Variant):
        return op.outer_bytes()
    turned = sum(nbytes(origin.in_avals[a.argument]) for a in (v.q, v.k, v.v) if not chosen(v, a)[1])
    if op.gradient_of is not None:
        turned += 0 if chosen(v, v.out)[1] else 2 * nbytes(origin.out_avals[0])
    return op.outer_bytes() + 2 * turned
