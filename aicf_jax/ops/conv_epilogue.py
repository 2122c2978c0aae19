"""``conv_epilogue``: ``Y = act(affine(conv(X, W) + b))`` in one operation.

The affine function is one of each channel: a batch norm with given statistics, ``(x - mean) * rsqrt(var + eps) * scale
+ bias``, or any other scale and shift by vectors along the channels. Bias, affine function and activation are optional;
one of them is there. Shapes: X and W as ``lax.conv_general_dilated`` takes them, with any number of spatial dimensions,
strides, padding, dilation, groups and dimension numbers; b and the vectors ``[C]``. Accumulation: as in the equations
it stands for. Memory moved by one kernel: X, W and the vectors read once, Y written once; as written, the convolution
and each step after it are written and read again.

Statistics of the convolution's own result (batch norm in training) are refused: mean and variance need the whole result
before its first element can be normalized, so there is nothing an epilogue could do in one pass.

Backward, from the convolution's result H and Y, each step by its own equations' derivative::

    dZ = dY * act'(Z)     dH = dZ * d affine/dH      dscale, dshift = sum over batch and positions
    dX = conv_transpose(dH, W)      dW = conv(X, dH)      db = sum(dH)

Ioffe and Szegedy, "Batch normalization", 2015.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from aicf_jax.attrs import Field, Schema
from aicf_jax.errors import Refusal
from aicf_jax.flags import OpFlags
from aicf_jax.legality import refuse
from aicf_jax.ops._semantic import FusedOp, SemanticOp
from aicf_jax.ops._stepwise import stepwise
from aicf_jax.ops.epilogue import ACTIVATIONS
from aicf_jax.pattern import Match

FIELDS = (
    Field("spatial", "int"),  # number of spatial dimensions
    Field("channel", "int"),  # of the convolution's result, counted from the end
    Field("groups", "int"),
    Field("batch_groups", "int"),
    Field("has_bias", "int"),
    Field("affine", "int"),
    Field("activation", "enum", ACTIVATIONS),
    Field("alpha", "float"),
)

SCHEMA = Schema(kind_id=13, schema_id=1, fields=FIELDS)


def _attributes(match: Match) -> Mapping[str, object]:
    conv = match.first(OpFlags.IS_CONV)
    if conv is None:
        raise ValueError("conv_epilogue stands for a convolution: the pattern's sequence needs CONV")
    params = match.graph.eqn(conv.covers[0]).params
    activation = match.first(OpFlags.IS_ACTIVATION)
    return {
        "spatial": len(params["window_strides"]),
        "channel": conv.attr("channel"),
        "groups": params["feature_group_count"],
        "batch_groups": params["batch_group_count"],
        "has_bias": int(match.first(OpFlags.IS_BIAS) is not None),
        "affine": int(match.first(OpFlags.IS_AFFINE) is not None),
        "activation": activation.op if activation else "none",
        "alpha": activation.attr("alpha", 0.0) if activation else 0.0,
    }


def _check(match: Match) -> Refusal | None:
    bias = match.first(OpFlags.IS_BIAS)
    if bias is not None and bias.attr("axis") != "features":
        found = "an addend that varies along the batch or the positions"
        return refuse(match, "bias_axis", "a bias along the channels", found, bias)
    activation = match.first(OpFlags.IS_ACTIVATION)
    if activation is not None and activation.op not in ACTIVATIONS:
        return refuse(match, "activation", f"one of {', '.join(ACTIVATIONS)}", activation.op, activation)
    return None


_WINDOW = (
    "window_strides",
    "padding",
    "lhs_dilation",
    "rhs_dilation",
    "feature_group_count",
    "batch_group_count",
    "precision",
)


def _requirements(op: FusedOp) -> Mapping[str, Hashable]:
    attrs = op.blob.unpack()
    body = op.steps[0].body
    a, b = body.invars
    is_plain = len(body.eqns) == 1
    window: dict[str, Any] = {name: str(body.eqns[0].params[name]) for name in _WINDOW} if is_plain else {}
    numbers = body.eqns[0].params["dimension_numbers"] if is_plain else None
    return {
        "activation": str(attrs["activation"]),
        "has_bias": bool(attrs["has_bias"]),
        "affine": bool(attrs["affine"]),
        "spatial": attrs["spatial"],
        # Batched since it was found: reshapes around a convolution of other shapes.
        "batched": not is_plain,
        "dimension_numbers": None if numbers is None else (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec),
        **{name: window.get(name, "") for name in _WINDOW},
        "operand_dtypes": (str(a.aval.dtype), str(b.aval.dtype)),
        "output_dtype": str(op.out_avals[0].dtype),
        "product_dtype": str(body.outvars[0].aval.dtype),
        "steps": tuple(step.name for step in op.steps),
    }


def _kept(op: FusedOp) -> tuple[int]:
    """H, the convolution's result."""
    return (len(op.in_avals),)


#: Names of the region's inputs in prints; c1, c2, ... are the vectors of the affine function in order of use.
NAMES = (
    ("bilinear", 0, "X"),
    ("bilinear", 1, "W"),
    ("linear", 1, "b"),
    *(("joint", k, f"c{k}") for k in range(1, 9)),
)

OP = SemanticOp(
    "conv_epilogue",
    SCHEMA,
    _attributes,
    _requirements,
    _check,
    names=NAMES,
    composite=stepwise("conv_epilogue_grad", _kept, ("H",)),
)
