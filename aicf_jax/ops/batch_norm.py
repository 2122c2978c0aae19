"""``batch_norm``: ``Y = act((X - mean) * rstd * scale + bias)`` with ``rstd = 1 / sqrt(variance + eps)`` of X itself.

Mean and variance are over some axes of X that are not its trailing ones: of images with channels last all but the last
(batch norm in training), or positions only (instance norm). Scale and bias, which may be missing, vary along the
others. The variance is ``E[(X - mean)^2]`` or ``E[X^2] - mean^2``, whichever the equations compute, perhaps clamped at
0; the activation is optional. Mean and variance are further results where running averages are made of them.
Accumulation: as in the equations; what the backward keeps is float32 or wider. Memory moved by one kernel: X read
twice, for the statistics and for the result, Y written once; as written each equation reads and writes.

What a kernel needs: all of X before the first element of Y, so two passes with a barrier, or partial sums and a second
kernel; and the axes that it can reduce (requirement ``axes``), counted from the end. Statistics that are averaged over
devices (``axis_name``) come from outside of it: then nothing is fused (``synchronized_statistics``).

Backward, from X and for each channel mean and rstd, in float32 or wider; n elements a channel::

    dZ = dY act'(Z)     N = (X - mean) rstd     g = dZ scale     dscale = sum dZ N     dbias = sum dZ
    dX = rstd (g - E[g] - a N E[g N]) + dmean / n + 2 a dvariance (X - mean) / n

with a = 1, or the derivative of the clamp. Two passes over X and dY. Z is kept, or of a relu Y, which says where Z > 0.

Ioffe and Szegedy, "Batch normalization", 2015; Ulyanov, Vedaldi and Lempitsky, "Instance normalization", 2016.
"""

from __future__ import annotations

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
from aicf_jax.ops._norm import FORMULAS, beside, bits, dimensions, slope_of, summed, wide
from aicf_jax.ops._semantic import Composite, FusedOp, SemanticOp, Step, nbytes
from aicf_jax.ops.epilogue import ACTIVATIONS
from aicf_jax.pattern import Match

#: Statistics that may be results, as digits of the attribute ``kept``.
KINDS = ("mean", "variance", "clamped")

FIELDS = (
    Field("axes", "int"),  # bit k: dimension -1 - k is normalized over
    Field("eps", "float"),
    Field("variance", "enum", FORMULAS),
    Field("clamped", "int"),
    Field("statistics", "enum", ("float32", "float64", "bfloat16", "float16")),
    Field("has_scale", "int"),
    Field("scale_axes", "int"),
    Field("has_bias", "int"),
    Field("bias_axes", "int"),
    Field("kept", "int"),  # a digit to base 4 for each further result: 1 + its place in `KINDS`
    Field("activation", "enum", ACTIVATIONS),
    Field("alpha", "float"),
)

SCHEMA = Schema(kind_id=15, schema_id=1, fields=FIELDS)


def _attributes(match: Match) -> Mapping[str, object]:
    norm = match.first(OpFlags.IS_BATCH_NORM)
    if norm is None:
        raise ValueError("batch_norm: the pattern's sequence needs BATCH_NORM")
    activation = match.first(OpFlags.IS_ACTIVATION)
    scale, bias = norm.attr("scale"), norm.attr("bias")
    return {
        "axes": bits(norm.attr("axes")),
        "eps": norm.attr("eps"),
        "variance": norm.attr("variance"),
        "clamped": int(norm.attr("clamped")),
        "statistics": norm.attr("statistics"),
        "has_scale": int(scale is not None),
        "scale_axes": bits(scale or ()),
        "has_bias": int(bias is not None),
        "bias_axes": bits(bias or ()),
        "kept": sum((1 + KINDS.index(kind)) * 4**k for k, kind in enumerate(norm.attr("kept"))),
        "activation": activation.op if activation else "none",
        "alpha": activation.attr("alpha", 0.0) if activation else 0.0,
    }


def _check(match: Match) -> Refusal | None:
    shape = match.graph.values[match.nodes[0].outputs[0]].aval.shape
    if 0 in shape:
        return refuse(match, "empty", "arrays with elements", f"an array of shape {shape}")
    activation = match.first(OpFlags.IS_ACTIVATION)
    if activation is not None and activation.op not in ACTIVATIONS:
        return refuse(match, "activation", f"one of {', '.join(ACTIVATIONS)}", activation.op, activation)
    return None


def requirements(op: FusedOp) -> Mapping[str, Hashable]:
    """What a kernel of a batch norm or of its gradient must be capable of."""
    attrs, ndim = op.blob.unpack(), 32  # more than any array has

    def counted(name: str) -> tuple[int, ...]:
        return tuple(d - ndim for d in dimensions(op.blob[name], ndim))

    return {
        "axes": counted("axes"),
        "variance": attrs["variance"],
        "clamped": bool(attrs["clamped"]),
        "statistics": attrs["statistics"],
        "activation": attrs["activation"],
        "kept": kinds(op),
        "scale_axes": counted("scale_axes") if attrs["has_scale"] else None,
        "bias_axes": counted("bias_axes") if attrs["has_bias"] else None,
        "input_dtypes": tuple(str(a.dtype) for a in op.in_avals),
        "output_dtypes": tuple(str(a.dtype) for a in op.out_avals),
    }


def kinds(op: FusedOp) -> tuple[str, ...]:
    """What the further results of the norm are."""
    found, left = [], op.blob["kept"]
    while left:
        found.append(KINDS[left % 4 - 1])
        left //= 4
    return tuple(found)


# -- slots -----------------------------------------------------------------------------------------------


def _slots(op: FusedOp) -> tuple[int, int | None, int | None]:
    """Slots of X, scale and bias."""
    x, *rest = op.steps[0].operands
    scale = rest.pop(0) if op.blob["has_scale"] else None
    return x, scale, rest.pop(0) if op.blob["has_bias"] else None


def _activation(op: FusedOp) -> Step | None:
    return op.steps[1] if len(op.steps) > 1 else None


def _names(op: FusedOp) -> dict[int, str]:
    x, scale, bias = _slots(op)
    found = {x: "X"}
    for slot, name in ((scale, "scale"), (bias, "bias")):
        if slot is not None:
            found.setdefault(slot, name)
    return found


def _keeps(op: FusedOp) -> tuple[int, ...]:
    """Of a relu the result: it says where Z is larger than 0."""
    return (0,) if op.blob["activation"] == "relu" else ()


def _saved_names(op: FusedOp) -> tuple[str, ...]:
    """Of what the backward keeps."""
    slope = ("slope",) if op.blob["clamped"] else ()
    z = ("Z",) if op.blob["activation"] not in ("relu", "none") else ()
    return (*("Y" for _ in _keeps(op)), "mean", "rstd", *slope, *z)


# -- forward and backward --------------------------------------------------------------------------------


def _mean(op: FusedOp, x: Any) -> Any:
    return jnp.mean(x, axis=dimensions(op.blob["axes"], x.ndim), keepdims=True)


def save(op: FusedOp, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """``(results, [mean, rstd, slope, Z])``, the first three one a channel; slope of a clamped variance only."""
    slots = op.evaluate(inputs)
    x = wide(op, slots[_slots(op)[0]])
    mean = _mean(op, x)
    centered = op.blob["variance"] == "centered"
    variance = _mean(op, jnp.square(x - mean)) if centered else _mean(op, jnp.square(x)) - jnp.square(mean)
    rstd = jax.lax.rsqrt((jnp.maximum(variance, 0) if op.blob["clamped"] else variance) + op.blob["eps"])
    saved = [mean, rstd]
    if op.blob["clamped"]:
        saved.append(slope_of(variance))
    if "Z" in _saved_names(op):
        saved.append(slots[len(op.in_avals)])
    return [slots[s] for s in op.results], saved


def cotangent(
    op: FusedOp,
    inputs: Sequence[Any],
    results: Sequence[Any],
    saved: Sequence[Any],
    cts: Sequence[Any],
    wanted: Sequence[int],
) -> list[Any]:
    """See the module's docstring."""
    slot, scale, bias = _slots(op)
    given = {s: ct for s, ct in zip(op.results, cts, strict=True) if ct is not None}
    x = wide(op, inputs[slot])
    mean, rstd, *more = saved
    slope = more[0] if op.blob["clamped"] else 1.0
    normalized = (x - mean) * rstd
    found: dict[int, Any] = {}
    dx = _of_statistics(op, x - mean, slope, given)
    dz = _before_activation(op, results, more[-1] if more else None, given)
    if dz is not None:
        dz = dz.astype(x.dtype)
        for where, name, term in ((scale, "scale", lambda: dz * normalized), (bias, "bias", lambda: dz)):
            if where is not None and where in wanted:
                found[where] = summed(op, name, term(), op.in_avals[where])
        g = dz if scale is None else dz * beside(op, wide(op, inputs[scale]))
        inner = rstd * (g - _mean(op, g) - normalized * slope * _mean(op, g * normalized))
        dx = inner if dx is None else inner + dx
    if dx is not None:
        found[slot] = dx.astype(op.in_avals[slot].dtype)
    return [found[i] if i in found else jnp.zeros(op.in_avals[i].shape, op.in_avals[i].dtype) for i in wanted]


def _before_activation(op: FusedOp, results: Sequence[Any], z: Any, given: Mapping[int, Any]) -> Any:
    """The cotangent of what the activation takes, None where there is none."""
    n, step = len(op.in_avals), _activation(op)
    own = given.get(n)
    ct = None if step is None else given.get(op.results[0])
    if step is None or ct is None:
        return own
    at = results[0] if op.blob["activation"] == "relu" else z
    through = jax.vjp(lambda z: _compat.as_function(step.body)(z)[0], at)[1](ct)[0]
    return through if own is None else through + own


def _of_statistics(op: FusedOp, centered: Any, slope: Any, given: Mapping[int, Any]) -> Any:
    """The cotangent that mean and variance pass to X where they are results; None where they have none."""
    first = len(op.in_avals) + 1
    reduced = dimensions(op.blob["axes"], centered.ndim)
    shape = [1 if d in reduced else n for d, n in enumerate(centered.shape)]
    count = math.prod(centered.shape[d] for d in reduced)
    total = None
    for k, kind in enumerate(kinds(op)):
        ct = given.get(first + k)
        if ct is None:
            continue
        term = wide(op, ct).reshape(shape) / count
        if kind != "mean":
            term = 2 * centered * term * (slope if kind == "clamped" else 1.0)
        total = term if total is None else total + term
    return total


def _not_by_step(op: FusedOp) -> None:
    """Batching makes a statistic of other dimensions: the equations are batched and matched anew."""
    return None


def _unfused_bytes(op: FusedOp, platform: str) -> int:
    """Inputs and results once, and X once more: it is read for the statistics and for the result."""
    return op.outer_bytes() + nbytes(op.in_avals[_slots(op)[0]])


OP = SemanticOp(
    "batch_norm",
    SCHEMA,
    _attributes,
    requirements,
    _check,
    names=_names,
    composite=Composite(save, cotangent, "batch_norm_grad", _saved_names, _not_by_step, _keeps),
    unfused_bytes=_unfused_bytes,
)
