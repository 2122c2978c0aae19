"""What kernels of attention share that know its kind: arrays as a library wants them, its results as the operation's.

A library is a function that returns what has ``forward`` and ``backward``, as `pallas_kernels.attention.portable` does:
it is called, and so imported, when a kernel runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from aicf_jax.kernels import _attention_sides
from aicf_jax.kernels._attention_layouts import (
    along_axes,
    chosen,
    given,
    laid_out,
    layouts,
    row_axes,
    rows_given,
)
from aicf_jax.kernels._gemm_epilogue import NARROW
from aicf_jax.kernels._kernel import ANY, Where
from aicf_jax.ops import FusedOp, nbytes
from aicf_jax.ops._attention_variant import Array, Variant, variant
from aicf_jax.ops._position_band import Band
from aicf_jax.partition import Partition, split

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


def gradient_capabilities(text: str, fits: Callable[[Variant], bool]) -> dict[str, Any]:
    """What a gradient can take: that of an attention that `fits`."""
    dtypes = Where("16-bit types", lambda found: set(found) <= set(NARROW))
    return {"dtypes": dtypes, "variant": _variants(text, fits)}


def _variants(text: str, fits: Callable[[Variant], bool], told: Sequence[str] = ()) -> Where:
    def holds(item: Any) -> bool:
        if not isinstance(item, Variant):
            return False
        untold = [getattr(item, f.name) for f in dataclasses.fields(item) if f.name not in (*_TOLD, *told)]
        depths = {item.size(item.roles.depth), item.size(item.roles.value_depth)}
        plain = not any(untold) and len(depths) == 1 and len(set(item.dtypes)) == 1
        return plain and item.dtypes[0] in NARROW and fits(item)

    return Where(f"Q, K, V and a result of one 16-bit type, {text}", holds)


def forward(library: Callable[[], Any], with_sides: bool = False) -> dict[str, Any]:
    """``run``, ``save`` and ``partition`` of a `Kernel`. `with_sides`: its library takes masks and biases."""

    def called(how: Callable[..., Any], saving: bool, op: FusedOp, inputs: Any) -> tuple[Any, ...]:
        return _forward(library().forward, with_sides, how, op, inputs, saving)

    def run(op: FusedOp, *inputs: Any) -> tuple[Any, ...]:
        return called(whole, False, op, inputs)

    def save(op: FusedOp, *inputs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        out, *statistics = called(whole, True, op, inputs)
        return (out,), tuple(statistics)

    def partition(op: FusedOp, saving: bool) -> Callable[..., Any]:
        return lambda *inputs: called(on_parts, saving, op, inputs)

    return {"run": run, "save": save, "partition": partition}


def _equation(v: Variant) -> dict[str, Any]:
    return {
        "scale": v.scale * v.base,
        "lower": v.band.lower,
        "upper": v.band.upper,
        "softcap": None if v.softcap is None else v.softcap * v.base,
        "layouts": tuple(chosen(v, a)[0] for a in (v.q, v.k, v.v, v.out)),
    }


def _forward(
    library: Callable[..., Any], with_sides: bool, how: Callable[..., Any], op: FusedOp, inputs: Any, saving: bool
) -> tuple[Any, ...]:
    v = known(op)
    operands, sides = (v.q, v.k, v.v), _attention_sides.sides(v) if with_sides else ()
    beside = _attention_sides.values(op, v, sides, inputs)

    def found(v: Variant, *arrays: Any) -> list[Any]:
        given_sides = _attention_sides.arrays(v, dict(zip(sides, arrays[3:], strict=True))) if with_sides else {}
        out, *statistics = library(
            *(given(v, a, x) for a, x in zip(operands, arrays, strict=False)),
            **_equation(v),
            **given_sides,
            with_statistics=saving,
        )
        return [_back(v, v.out, out), *(laid_out(v, row_axes(v), v.rows, x) for x in statistics)]

    axes = [*(a.axes for a in operands), *(s.axes for s in sides)]
    arrays = [*(along_axes(v, a, inputs[a.argument]) for a in operands), *beside]
    out, *statistics = how(v, found, axes, arrays, [v.out.axes, *[v.rows.axes] * 2][: 3 if saving else 1])
    out = out.reshape(op.out_avals[0].shape)
    if not saving:
        return (out,)
    m, total = (x.reshape([v.size(*d) for d in v.rows.dims]) for x in statistics)
    return out, m / v.base if v.base != 1.0 else m, total


def _back(v: Variant, array: Array, x: Any) -> Any:
    return laid_out(v, layouts(v, array)[chosen(v, array)[0]], array, x)


def known(op: FusedOp) -> Variant:
    """The kind of attention of an operation that a kernel takes, or that it is the gradient of."""
    found = variant(op if op.gradient_of is None else op.gradient_of[0])
    assert isinstance(found, Variant)
    return found


def gradient(library: Callable[[], Any]) -> dict[str, Any]:
    """``run`` and ``partition`` of a `Kernel` for the gradients of Q, K and V.

    From the result and the statistics of its rows. An array may be several of the three; its gradient is the sum of
    theirs.
    """

    def run(op: FusedOp, *inputs: Any) -> tuple[Any, ...]:
        return _gradient(library().backward, whole, op, inputs)

    def partition(op: FusedOp, saving: bool) -> Callable[..., Any]:
        return lambda *inputs: _gradient(library().backward, on_parts, op, inputs)

    return {"run": run, "partition": partition}


def _gradient(library: Callable[..., Any], how: Callable[..., Any], op: FusedOp, inputs: Any) -> tuple[Any, ...]:
    assert op.gradient_of is not None
    v, (origin, wanted) = known(op), op.gradient_of
    out, m, total, dout = inputs[len(origin.in_avals) :]
    operands = (v.q, v.k, v.v)
    asked = [k for k, a in enumerate(operands) if a.argument in wanted]

    def found(v: Variant, *arrays: Any) -> list[Any]:
        *qkv, out, m, total, dout = arrays
        gradients = library(
            *(given(v, a, x) for a, x in zip(operands, qkv, strict=True)),
            given(v, v.out, out),
            rows_given(v, m * v.base if v.base != 1.0 else m),
            rows_given(v, total),
            given(v, v.out, dout),
            **_equation(v),
        )
        return [_back(v, operands[k], gradients[k]) for k in asked]

    arrays = (*operands, v.out, v.rows, v.rows, v.out)
    values = [*(inputs[a.argument] for a in operands), out, m, total, dout]
    values = [along_axes(v, a, x) for a, x in zip(arrays, values, strict=True)]
    results = [operands[k].axes for k in asked]
    sums: dict[int, Any] = {}
    for k, x in zip(asked, how(v, found, [a.axes for a in arrays], values, results, summed=True), strict=True):
        i = operands[k].argument
        sums[i] = sums[i] + x.reshape(origin.in_avals[i].shape) if i in sums else x.reshape(origin.in_avals[i].shape)
    return tuple(sums[i] for i in wanted)


# -- several devices -------------------------------------------------------------------------------------

_Axes = Sequence[Sequence[str]]


def whole(
    v: Variant, f: Callable[..., Any], axes: _Axes, arrays: Sequence[Any], results: _Axes, summed: bool = False
) -> Sequence[Any]:
    """``f(variant, *arrays)`` on one device. Arguments as those of `on_parts`."""
    return f(v, *arrays)


def on_parts(
    v: Variant, f: Callable[..., Any], axes: _Axes, arrays: Sequence[Any], results: _Axes, summed: bool = False
) -> Sequence[Any]:
    """``f(variant, *arrays)``, each device on its part of the arrays and with a variant of their sizes.

    Split may be batches, heads of K with the whole groups of heads of Q that share each, heads of one group, and
    queries where no limit on the distance to a key says that a query is more than a row. Keys and depths are summed
    over by the kernel, and whole.

    `axes`: of the dimensions of each array; `results`: of each result. `summed`: results are sums over the axes that
    they do not have.
    """
    r = v.roles
    free = [*r.batch, *r.group, *([r.query] if v.band == Band() else [])]
    names = {a: f"x{k}" for k, a in enumerate(free)}

    def part(*parts: Any) -> Sequence[Any]:
        sizes = dict(v.sizes)
        for of, x in zip(axes, parts, strict=True):
            sizes.update(zip(of, x.shape, strict=True))
        return f(dataclasses.replace(v, sizes=tuple(sizes.items())), *parts)

    inputs, outputs = (tuple(tuple(names.get(a) for a in of) for of in all_of) for all_of in (axes, results))
    rule = Partition(inputs, outputs, tuple(range(len(results))) if summed else ())
    return split(part, rule)(*arrays)


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
