"""What kernels of attention share that know its kind: arrays as a library wants them, its results as the operation's.

A library is a function that returns what has ``forward`` and ``backward``, as `pallas_kernels.attention.portable` does:
it is called, and so imported, when a kernel runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

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
from aicf_jax.ops.attention_grad import MORE, QKV
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
        return plain and item.dtypes[0] in NARROW and _in_range(item) and fits(item)

    return Where(f"Q, K, V and a result of one 16-bit type, {text}; numbers below 1e6", holds)


def _in_range(v: Variant) -> bool:
    """Whether its numbers are such as `pallas_kernels.attention` takes."""
    from pallas_kernels.attention.arguments import HIGHEST_NUMBER

    factors = [b.factor * v.base for b in v.biases]
    limited = [v.scale * v.base, *([] if v.softcap is None else [v.softcap * v.base])]
    return all(x != 0 and math.isfinite(x) for x in factors) and all(0 < x < HIGHEST_NUMBER for x in limited)


def forward(library: Callable[[], Any], with_sides: bool = False, any_band: bool = True) -> dict[str, Any]:
    """``run``, ``save`` and ``partition`` of a `Kernel`.

    `with_sides`: its library takes masks and biases. `any_band`: it takes a band wherever that lies.
    """
    apart = functools.partial(on_parts, any_band=any_band)

    def called(how: Callable[..., Any], saving: bool, op: FusedOp, inputs: Any) -> tuple[Any, ...]:
        return _forward(library().forward, with_sides, how, op, inputs, saving)

    def run(op: FusedOp, *inputs: Any) -> tuple[Any, ...]:
        return called(whole, False, op, inputs)

    def save(op: FusedOp, *inputs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        out, *statistics = called(whole, True, op, inputs)
        return (out,), tuple(statistics)

    def partition(op: FusedOp, saving: bool) -> Callable[..., Any]:
        return lambda *inputs: called(apart, saving, op, inputs)

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
    operands, keep = (v.q, v.k, v.v), _keep(how, with_sides, op, v, inputs)
    sides = _attention_sides.sides(v, keep) if with_sides else ()
    beside = _attention_sides.values(op, v, sides, inputs)

    def found(v: Variant, *arrays: Any) -> list[Any]:
        given_sides = _attention_sides.arrays(v, dict(zip(sides, arrays[3:], strict=True)), keep) if with_sides else {}
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


def _keep(how: Callable[..., Any], with_sides: bool, op: FusedOp, v: Variant, inputs: Any) -> Any:
    return _attention_sides.drawn_keep(op, v, inputs) if with_sides and how is whole else None


def _back(v: Variant, array: Array, x: Any) -> Any:
    return laid_out(v, layouts(v, array)[chosen(v, array)[0]], array, x)


def known(op: FusedOp) -> Variant:
    """The kind of attention of an operation that a kernel takes, or that it is the gradient of."""
    found = variant(op if op.gradient_of is None else op.gradient_of[0])
    assert isinstance(found, Variant)
    return found


def gradient(library: Callable[[], Any], with_sides: bool = False, any_band: bool = True) -> dict[str, Any]:
    """``run`` and ``partition`` of a `Kernel` for the gradients of Q, K and V, and of arrays beside the scores.

    From the result and the statistics of its rows. An array may be several of these; its gradient is the sum of theirs.
    Arguments as those of `forward`.
    """
    apart = functools.partial(on_parts, any_band=any_band)

    def run(op: FusedOp, *inputs: Any) -> tuple[Any, ...]:
        return _gradient(library().backward, with_sides, whole, op, inputs)

    def partition(op: FusedOp, saving: bool) -> Callable[..., Any]:
        return lambda *inputs: _gradient(library().backward, with_sides, apart, op, inputs)

    return {"run": run, "partition": partition}


def _gradient(
    library: Callable[..., Any], with_sides: bool, how: Callable[..., Any], op: FusedOp, inputs: Any
) -> tuple[Any, ...]:
    assert op.gradient_of is not None
    v, (origin, wanted) = known(op), op.gradient_of
    given_to_it, (out, m, total, dout) = inputs[: len(origin.in_avals)], inputs[len(origin.in_avals) :]
    operands, keep = (v.q, v.k, v.v), _keep(how, with_sides, origin, v, given_to_it)
    sides = _attention_sides.sides(v, keep) if with_sides else ()
    asked = [k for k, a in enumerate(operands) if a.argument in wanted]
    names, moving = _attention_sides.wanted_biases(origin, v, wanted) if with_sides else ((), ())

    def found(v: Variant, *arrays: Any) -> list[Any]:
        (q, k, value, out, m, total, dout), rest = arrays[:7], arrays[7:]
        beside = dict(zip(sides, rest, strict=True))
        dq, dk, dv, *of_biases = library(
            *(given(v, a, x) for a, x in zip(operands, (q, k, value), strict=True)),
            given(v, v.out, out),
            rows_given(v, m * v.base if v.base != 1.0 else m),
            rows_given(v, total),
            given(v, v.out, dout),
            **_equation(v),
            **(_attention_sides.arrays(v, beside, keep) if with_sides else {}),
            **({"wanted": names} if names else {}),
        )
        qkv = [_back(v, operands[k], (dq, dk, dv)[k]) for k in asked]
        return [*qkv, *(_attention_sides.pulled(v, beside, names, moving, of_biases) if names else ())]

    arrays = (*operands, v.out, v.rows, v.rows, v.out)
    values = [*(inputs[a.argument] for a in operands), out, m, total, dout]
    values = [along_axes(v, a, x) for a, x in zip(arrays, values, strict=True)]
    values += _attention_sides.values(origin, v, sides, given_to_it)
    axes = [x.axes for x in (*arrays, *sides)]
    results = how(v, found, axes, values, [x.axes for x in (*(operands[k] for k in asked), *moving)], summed=True)
    arguments = [operands[k].argument for k in asked]
    pairs = [(i, x.reshape(origin.in_avals[i].shape)) for i, x in zip(arguments, results, strict=False)]
    if names:
        of_sides = results[len(asked) :]
        pairs += _attention_sides.pulled_arguments(origin, v, given_to_it, wanted, moving, of_sides).items()
    sums: dict[int, Any] = {}
    for argument, x in pairs:
        sums[argument] = sums[argument] + x if argument in sums else x
    # Arguments of masks alone.
    return tuple(sums[i] if i in sums else jnp.zeros_like(inputs[i]) for i in wanted)


# -- several devices -------------------------------------------------------------------------------------

_Axes = Sequence[Sequence[str]]

#: Each is a kernel of its own in the program of every device.
_MOST_BANDS = 8


def whole(
    v: Variant, f: Callable[..., Any], axes: _Axes, arrays: Sequence[Any], results: _Axes, summed: bool = False
) -> Sequence[Any]:
    """``f(variant, *arrays)`` on one device. Arguments as those of `on_parts`."""
    return f(v, *arrays)


def on_parts(
    v: Variant, f: Callable[..., Any], axes: _Axes, arrays: Sequence[Any], results: _Axes, summed: bool = False,
    any_band: bool = True,
) -> Sequence[Any]:  # fmt: skip
    """``f(variant, *arrays)``, each device on its part of the arrays and with a variant of their sizes.

    Split may be batches, heads of K with the whole groups of heads of Q that share each, heads of one group, and
    queries. Over a band each part of the queries is a variant of its own, which a device chooses by its place: at most
    `_MOST_BANDS` of them, and only for `any_band`; else queries are whole. Keys and depths are summed over by the
    kernel, and whole.

    `axes`: of the dimensions of each array; `results`: of each result. `summed`: results are sums over the axes that
    they do not have.
    """
    r, is_banded = v.roles, v.band != Band()
    free = [*r.batch, *r.group, *([r.query] if any_band or not is_banded else [])]
    names = {a: f"x{k}" for k, a in enumerate(free)}

    def part(places: Any, *parts: Any) -> Sequence[Any]:
        sizes = dict(v.sizes)
        for of, x in zip(axes, parts, strict=True):
            sizes.update(zip(of, x.shape, strict=True))
        of_part, own = dataclasses.replace(v, sizes=tuple(sizes.items())), sizes[r.query]
        count = v.size(r.query) // own
        if count == 1 or not is_banded:
            return f(of_part, *parts)
        variants = [dataclasses.replace(of_part, band=v.band.moved(k * own)) for k in range(count)]
        return jax.lax.switch(places[0] // own, [functools.partial(f, x) for x in variants], *parts)

    axes_of_all = ((r.query,), *axes)
    inputs, outputs = (tuple(tuple(names.get(a) for a in of) for of in all_of) for all_of in (axes_of_all, results))
    most = {names[r.query]: _MOST_BANDS} if is_banded and r.query in names else {}
    rule = Partition(inputs, outputs, tuple(range(len(results))) if summed else (), most=most)
    return split(part, rule)(jnp.arange(v.size(r.query), dtype=jnp.int32), *arrays)


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
