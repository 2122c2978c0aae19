"""What `layer_norm` and `rms_norm` share: attributes, statistics, the derived backward, memory traffic."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from aicf_jax import _compat
from aicf_jax.attrs import Field, Schema
from aicf_jax.errors import Refusal
from aicf_jax.flags import OpFlags
from aicf_jax.legality import refuse
from aicf_jax.ops._semantic import Composite, FusedOp, SemanticOp, Step, nbytes
from aicf_jax.pattern import Match
from aicf_jax.recompute import SMALLEST_BYTES, late, recomputed

FORMULAS = ("centered", "moments", "mean_square")

FIELDS = (
    Field("axes", "int"),  # how many trailing axes are normalized
    Field("eps", "float"),
    Field("variance", "enum", FORMULAS),  # E[(x - m)^2], E[x^2] - m^2, E[x^2]
    Field("clamped", "int"),  # a variance below 0 counts as 0
    Field("statistics", "enum", ("float32", "float64", "bfloat16", "float16")),  # their type in the equations
    Field("has_scale", "int"),
    Field("scale_axes", "int"),  # bit k: the scale varies along dimension -1 - k
    Field("has_bias", "int"),
    Field("bias_axes", "int"),
    Field("has_residual", "int"),
)


def _attributes(match: Match) -> Mapping[str, object]:
    norm = match.first(OpFlags.IS_NORMALIZATION)
    if norm is None:
        raise ValueError("a norm: the pattern's sequence needs LAYER_NORM or RMS_NORM")
    scale, bias = norm.attr("scale"), norm.attr("bias")
    return {
        "axes": norm.attr("axes"),
        "eps": norm.attr("eps"),
        "variance": norm.attr("variance"),
        "clamped": int(norm.attr("clamped")),
        "statistics": norm.attr("statistics"),
        "has_scale": int(scale is not None),
        "scale_axes": bits(scale or ()),
        "has_bias": int(bias is not None),
        "bias_axes": bits(bias or ()),
        "has_residual": int(match.first(OpFlags.IS_RESIDUAL) is not None),
    }


def bits(places: Sequence[int]) -> int:
    """Dimensions, counted from the end, as bits."""
    return sum(1 << (-1 - d) for d in places)


def dimensions(packed: int, ndim: int) -> tuple[int, ...]:
    """The dimensions that bits stand for, counted from the front."""
    return tuple(d for d in range(ndim) if packed >> (ndim - 1 - d) & 1)


def _check(match: Match) -> Refusal | None:
    for node in match.nodes:
        shape = match.graph.values[node.outputs[0]].aval.shape
        if 0 in shape:
            return refuse(match, "empty", "arrays with elements", f"{node.op} of shape {shape}", node)
    return None


def requirements(op: FusedOp) -> Mapping[str, Hashable]:
    """What a kernel of a norm must be capable of."""
    names = input_names(op)
    inputs = tuple(names.get(i, f"in{i}") for i in range(len(op.in_avals)))
    return {**_requirements(op, dict(zip(inputs, op.in_avals, strict=True))), "inputs": inputs}


def gradient_requirements(op: FusedOp) -> Mapping[str, Hashable]:
    """What a kernel of a norm's gradient must be capable of.

    A kernel may go by the names, though they are not part of equality: the equations are, and say the same.
    """
    arrays = dict(zip((*op.input_names, *op.result_names), (*op.in_avals, *op.out_avals), strict=False))
    return {**_requirements(op, arrays), "inputs": op.input_names, "results": op.result_names}


def _requirements(op: FusedOp, arrays: Mapping[str, Any]) -> dict[str, Hashable]:
    attrs = op.blob.unpack()
    ndim = 32  # more than any array has
    return {
        "axes": attrs["axes"],
        "length": row_length(op),
        "row_bytes": row_length(op) * op.in_avals[0].dtype.itemsize,
        "variance": attrs["variance"],
        "clamped": bool(attrs["clamped"]),
        "statistics": attrs["statistics"],
        "has_residual": bool(attrs["has_residual"]),
        **{
            f"{name}_axes": tuple(d - ndim for d in dimensions(op.blob[f"{name}_axes"], ndim))
            if attrs[f"has_{name}"]
            else None
            for name in ("scale", "bias")
        },
        "input_dtypes": tuple(str(a.dtype) for a in op.in_avals),
        "output_dtypes": tuple(str(a.dtype) for a in op.out_avals),
        "arrays": _arrays(op, arrays),
    }


def _arrays(op: FusedOp, arrays: Mapping[str, Any]) -> str:
    """``"rows"``: each array has rows like X, one value for each of them, or is a parameter for all rows.

    ``"shared"``: one array has two roles, as in ``x + x``. ``"batched"``: a gradient under ``vmap`` may have a scale,
    a statistic or a cotangent for each element of a batch that X does not have.
    """
    roles = ("X", *(n for n, flag in _OPTIONAL if op.blob[flag]))
    if not set(roles) <= set(arrays):
        return "shared"
    shape, length = op.in_avals[0].shape, row_length(op)
    trailing = shape[-op.blob["axes"] :]
    for name, aval in arrays.items():
        found = math.prod(aval.shape)
        parameter = name.removeprefix("d")
        if parameter in ("scale", "bias"):
            kept = dimensions(op.blob[f"{parameter}_axes"], len(trailing))
            is_plain = found == math.prod(trailing[d] for d in kept)
        elif name in ("mean", "rstd", "slope"):
            is_plain = found == math.prod(shape) // length
        else:
            is_plain = aval.shape == shape
        if not is_plain:
            return "batched"
    return "rows"


def row_length(op: FusedOp) -> int:
    """How many elements are normalized together."""
    return math.prod(op.in_avals[0].shape[-op.blob["axes"] :])


#: Roles that a norm may do without, and the attribute that tells.
_OPTIONAL = (("R", "has_residual"), ("scale", "has_scale"), ("bias", "has_bias"))

# -- slots -----------------------------------------------------------------------------------------------


def _step(op: FusedOp) -> Step:
    return op.steps[-1]


def _slots(op: FusedOp) -> tuple[int, int | None, int | None]:
    """Slots of what is normalized, scale and bias."""
    x, *rest = _step(op).operands
    scale = rest.pop(0) if op.blob["has_scale"] else None
    return x, scale, rest.pop(0) if op.blob["has_bias"] else None


def sum_result(op: FusedOp) -> int | None:
    """Which result the residual sum is, None where nobody else uses it."""
    x = _slots(op)[0]
    return op.results.index(x) if x in op.results else None


def input_names(op: FusedOp) -> dict[int, str]:
    """``X`` and the residual ``R`` added to it, scale and bias."""
    x, scale, bias = _slots(op)
    read = op.steps[0].operands if op.blob["has_residual"] else (x,)
    found: dict[int, str] = dict(zip(reversed(read), ["X"] if len(read) == 1 else ["R", "X"], strict=True))
    for slot, name in ((scale, "scale"), (bias, "bias")):
        if slot is not None:
            found.setdefault(slot, name)
    return found


def saved_names(op: FusedOp) -> tuple[str, ...]:
    """Of what the backward keeps."""
    return (*(["S"] if sum_result(op) is not None else []), *saved_statistics(op))


def saved_statistics(op: FusedOp) -> tuple[str, ...]:
    """Of what `save` returns besides results."""
    found = ["rstd"] if op.blob["variance"] == "mean_square" else ["mean", "rstd"]
    if op.blob["clamped"]:
        found.append("slope")
    return tuple(found)


# -- forward and backward --------------------------------------------------------------------------------


def wide(op: FusedOp, x: Any) -> Any:
    """In float32, or in a wider type that the equations compute in."""
    types = (op.blob["statistics"], *(a.dtype for a in (*op.in_avals, *op.out_avals)))
    return x.astype(functools.reduce(jnp.promote_types, types, jnp.dtype("float32")))


def _mean(op: FusedOp, x: Any) -> Any:
    return jnp.mean(x, axis=tuple(range(-op.blob["axes"], 0)), keepdims=True)


def save(op: FusedOp, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """``(results, [mean, rstd, slope])`` in float32 or wider, one of each for a row.

    No mean for a root mean square. The slope, only of a clamped variance, is the derivative of ``max(0, v)``: 1, 0
    below 0, and 1/2 at 0 as jax has it.
    """
    slots = op.evaluate(inputs)
    x, formula = wide(op, slots[_slots(op)[0]]), op.blob["variance"]
    saved = [] if formula == "mean_square" else [_mean(op, x)]
    variance = _mean(op, jnp.square(x - saved[0] if formula == "centered" else x))
    if formula == "moments":
        variance = variance - jnp.square(saved[0])
    saved.append(jax.lax.rsqrt((jnp.maximum(variance, 0) if op.blob["clamped"] else variance) + op.blob["eps"]))
    if op.blob["clamped"]:
        saved.append(slope_of(variance))
    return [slots[s] for s in op.results], saved


def slope_of(variance: Any) -> Any:
    """The derivative of ``max(0, v)``: 1, 0 below 0, and 1/2 at 0 as jax has it."""
    return jnp.where(variance > 0, 1.0, jnp.where(variance == 0, 0.5, 0.0)).astype(variance.dtype)


def cotangent(
    op: FusedOp,
    inputs: Sequence[Any],
    results: Sequence[Any],
    saved: Sequence[Any],
    cts: Sequence[Any],
    wanted: Sequence[int],
) -> list[Any]:
    """See the docstring of `ops.layer_norm`."""
    slot, scale, bias = _slots(op)
    known = sum_result(op)
    # Without a result of its own the sum is added up again: two arrays read for one kept.
    x = wide(op, results[known] if known is not None else _summed_again(op, inputs))
    x, kept, cts = recomputed((x, list(saved), list(cts)))
    after = next(ct for ct in cts if ct is not None)
    kept = [late(numbers, after) for numbers in kept]
    given = dict(zip(op.results, cts, strict=True))
    aval = op.slot_avals[slot]
    found: dict[int, Any] = {}
    dx = None if given.get(slot) is None else wide(op, given[slot])
    dy = given[op.results[0]]
    if dy is not None:
        dy = dy.astype(x.dtype)
        centered = x - kept.pop(0) if op.blob["variance"] != "mean_square" else x
        rstd = kept.pop(0)
        normalized = centered * rstd
        for where, name, term in ((scale, "scale", lambda: dy * normalized), (bias, "bias", lambda: dy)):
            if where is not None and where in wanted:
                found[where] = summed(op, name, term(), op.in_avals[where])
        g = dy if scale is None else dy * beside(op, wide(op, inputs[scale]))
        along = normalized * _mean(op, g * normalized)
        inner = g - (along * kept.pop(0) if op.blob["clamped"] else along)
        if op.blob["variance"] != "mean_square":
            inner = inner - _mean(op, g)
        dx = rstd * inner if dx is None else dx + rstd * inner
    if dx is not None:
        dx = dx.astype(aval.dtype)
        for s in op.steps[0].operands if op.blob["has_residual"] else (slot,):
            if s in wanted:
                found[s] = found[s] + dx if s in found else dx
    return [found[i] if i in found else jnp.zeros(op.in_avals[i].shape, op.in_avals[i].dtype) for i in wanted]


def _summed_again(op: FusedOp, inputs: Sequence[Any]) -> Any:
    """What is normalized, from the inputs."""
    if not op.blob["has_residual"]:
        return inputs[_slots(op)[0]]
    (found,) = _compat.as_function(op.steps[0].body)(*[inputs[s] for s in op.steps[0].operands])
    return found


def summed(op: FusedOp, name: str, term: Any, aval: Any) -> Any:
    """A sum over the dimensions along which scale or bias are constant, shaped like it."""
    kept = dimensions(op.blob[f"{name}_axes"], term.ndim)
    total = jnp.sum(term, axis=tuple(d for d in range(term.ndim) if d not in kept))
    return total.reshape(aval.shape).astype(aval.dtype)


def beside(op: FusedOp, scale: Any) -> Any:
    """The scale beside what is normalized."""
    shape = op.out_avals[0].shape
    kept = dimensions(op.blob["scale_axes"], len(shape))
    return scale.reshape([n if d in kept else 1 for d, n in enumerate(shape)])


def _not_by_step(op: FusedOp) -> None:
    """Batching a scale makes it one of other axes: the equations are batched and matched anew."""
    return None


def unfused_bytes(op: FusedOp, platform: str) -> int:
    """Inputs and results once, and what is normalized once more: it is read for the statistics and for the result."""
    return op.outer_bytes() + nbytes(op.slot_avals[_slots(op)[0]])


def norm(name: str, kind_id: int) -> SemanticOp:
    """The operation of this name, differentiated by the one named ``<name>_grad``."""
    return SemanticOp(
        name,
        Schema(kind_id=kind_id, schema_id=1, fields=FIELDS),
        _attributes,
        requirements,
        _check,
        names=input_names,
        composite=Composite(
            save, cotangent, f"{name}_grad", saved_names, _not_by_step, _kept_results, lean=_keeps_much_less
        ),
        unfused_bytes=unfused_bytes,
    )


def _keeps_much_less(op: FusedOp) -> bool:
    """Its equations keep two or three arrays of the size of what is normalized."""
    return nbytes(op.slot_avals[_slots(op)[0]]) >= SMALLEST_BYTES


def _kept_results(op: FusedOp) -> tuple[int, ...]:
    """The residual sum where it is a result; the norm's own result is not read backward."""
    known = sum_result(op)
    return () if known is None else (known,)


def norm_grad(name: str, kind_id: int) -> SemanticOp:
    """The derived backward of a norm as one operation; its equations are what `cotangent` traces to."""

    def attributes(match: Any) -> Mapping[str, object]:
        raise ValueError(f"{name} is derived from a norm; no pattern stands for it")

    return SemanticOp(name, Schema(kind_id=kind_id, schema_id=1, fields=FIELDS), attributes, gradient_requirements)
