"""What kernels of attention share that know its kind: arrays as a library wants them, its results as the operation's.

A library is a function that returns what has ``forward`` and ``backward``, as `pallas_kernels.attention.portable` does:
it is called, and so imported, when a kernel runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from aicf_jax.kernels._gemm_epilogue import NARROW
from aicf_jax.kernels._kernel import ANY, Where
from aicf_jax.kernels.mosaic_attention import _chosen, _given, _laid_out, _layouts, _order
from aicf_jax.ops import FusedOp, nbytes
from aicf_jax.ops._attention_variant import Array, Variant, variant

#: All that a library is told of: what else a kind of attention says must be nothing.
_TOLD = (
    *("sizes", "roles", "q", "k", "v", "out", "rows", "dtypes"),
    *("scale", "softcap", "band", "base"),
)


def capabilities(text: str, fits: Callable[[Variant], bool]) -> dict[str, Any]:
    """What a forward can take: a kind of attention that `fits`, of which `text` tells, in one 16-bit type."""
    return {
        "operand_dtypes": tuple((t, t) for t in NARROW),
        "output_dtype": NARROW,
        "steps": ANY,
        "variant": _variants(text, fits),
    }


def gradient_capabilities(text: str, fits: Callable[[Variant], bool]) -> dict[str, Any]:
    """What a gradient can take: that of an attention that `fits`."""
    dtypes = Where("16-bit types", lambda found: set(found) <= set(NARROW))
    return {"dtypes": dtypes, "variant": _variants(text, fits)}


def _variants(text: str, fits: Callable[[Variant], bool]) -> Where:
    def holds(item: Any) -> bool:
        if not isinstance(item, Variant):
            return False
        untold = [getattr(item, f.name) for f in dataclasses.fields(item) if f.name not in _TOLD]
        depths = {item.size(item.roles.depth), item.size(item.roles.value_depth)}
        plain = not any(untold) and len(depths) == 1 and len(set(item.dtypes)) == 1
        return plain and item.dtypes[0] in NARROW and fits(item)

    return Where(f"Q, K, V and a result of one 16-bit type, {text}", holds)


def forward(library: Callable[[], Any]) -> tuple[Any, Any]:
    """``run`` and ``save`` of a `Kernel`."""

    def run(op: FusedOp, *inputs: Any) -> tuple[Any, ...]:
        return _forward(library(), op, inputs, saving=False)

    def save(op: FusedOp, *inputs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        out, m, total = _forward(library(), op, inputs, saving=True)
        return (out,), (m, total)

    return run, save


def _equation(v: Variant) -> dict[str, Any]:
    return {
        "scale": v.scale * v.base,
        "lower": v.band.lower,
        "upper": v.band.upper,
        "softcap": None if v.softcap is None else v.softcap * v.base,
        "layouts": tuple(_chosen(v, a)[0] for a in (v.q, v.k, v.v, v.out)),
    }


def _forward(library: Any, op: FusedOp, inputs: Any, saving: bool) -> tuple[Any, ...]:
    v = variant(op)
    assert isinstance(v, Variant)
    given = (_given(v, a, inputs[a.argument]) for a in (v.q, v.k, v.v))
    out, *statistics = library.forward(*given, **_equation(v), with_statistics=saving)
    out = _back(v, v.out, op.out_avals[0].shape, out)
    if not saving:
        return (out,)
    shape = tuple(v.size(*d) for d in v.rows.dims)
    m, total = (_laid_out(v, _row_axes(v), v.rows, shape, x) for x in statistics)
    return out, m / v.base if v.base != 1.0 else m, total


def _back(v: Variant, array: Array, shape: tuple[int, ...], x: Any) -> Any:
    return _laid_out(v, _layouts(v, array)[_chosen(v, array)[0]], array, shape, x)


def _row_axes(v: Variant) -> tuple[str, ...]:
    batch, heads = _order(v)
    return (*batch, *heads, *v.roles.group, v.roles.query)


def gradient(library: Callable[[], Any]) -> Any:
    """``run`` of a `Kernel` for the gradients of Q, K and V, from the result and the statistics of its rows."""

    def run(op: FusedOp, *inputs: Any) -> tuple[Any, ...]:
        assert op.origin is not None
        origin, wanted = op.origin
        v = variant(origin)
        assert isinstance(v, Variant)
        out, m, total, dout = inputs[len(origin.in_avals) :]
        arrays = {array.argument: (name, array) for name, array in (("q", v.q), ("k", v.k), ("v", v.v))}
        found = library().backward(
            *(_given(v, array, inputs[array.argument]) for array in (v.q, v.k, v.v)),
            _given(v, v.out, out),
            _rows(v, m * v.base if v.base != 1.0 else m),
            _rows(v, total),
            _given(v, v.out, dout),
            **_equation(v),
            wanted=tuple(arrays[i][0] for i in wanted),
        )
        gradients = dict(zip("qkv", found, strict=True))
        return tuple(_back(v, arrays[i][1], origin.in_avals[i].shape, gradients[arrays[i][0]]) for i in wanted)

    return run


def _rows(v: Variant, x: Any) -> Any:
    """What there is one of for each row, as the library has it: by batch, heads and queries."""
    (batch, heads), axes = _order(v), _row_axes(v)
    x = x.reshape([v.size(a) for a in v.rows.axes]).transpose([v.rows.axes.index(a) for a in axes])
    return x.reshape(v.size(*batch), v.size(*heads, *v.roles.group), v.size(v.roles.query))


def moved_bytes(op: FusedOp) -> int:
    """Inputs and results once, and twice more what is transposed for the kernel."""
    origin = op if op.origin is None else op.origin[0]
    v = variant(origin)
    if not isinstance(v, Variant):
        return op.outer_bytes()
    turned = sum(nbytes(origin.in_avals[a.argument]) for a in (v.q, v.k, v.v) if not _chosen(v, a)[1])
    if op.origin is not None:
        turned += 0 if _chosen(v, v.out)[1] else 2 * nbytes(origin.out_avals[0])
    return op.outer_bytes() + 2 * turned
