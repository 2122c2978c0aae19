"""``gemm_epilogue_grad``: ``dZ = dY * act'(.)`` and ``db = sum(dZ)`` in one pass.

A part of the derived backward of `gemm_epilogue`, found in it by the same matcher. ``dZ`` has the layout of ``Y``: it
feeds the two products ``dX = dZ W^T`` and ``dW = X^T dZ`` without a transpose. Memory moved by one kernel: ``dY`` and
the residual read once, ``dZ`` and ``db`` written once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from aicf_jax.attrs import Field, Schema
from aicf_jax.errors import Refusal
from aicf_jax.flags import OpFlags
from aicf_jax.legality import refuse
from aicf_jax.ops._matrices import rows, summed_axes
from aicf_jax.ops._semantic import FusedOp, SemanticOp
from aicf_jax.ops.epilogue import ACTIVATIONS, formula
from aicf_jax.pattern import Match

SCHEMA = Schema(
    kind_id=2,
    schema_id=1,
    fields=(
        Field("activation", "enum", ACTIVATIONS),
        Field("from_output", "int"),
        Field("alpha", "float"),
        Field("ndim", "int"),
        Field("summed", "int"),  # bit d: the bias gradient sums over dimension d of dZ
    ),
)


def _attributes(match: Match) -> Mapping[str, object]:
    gradient = match.first(OpFlags.IS_ACTIVATION_GRAD)
    if gradient is None:
        raise ValueError("gemm_epilogue_grad stands for an activation's gradient: the sequence needs ACTIVATION_GRAD")
    axes = match.graph.eqn(match.nodes[-1].covers[-1]).params["axes"]
    ndim = match.graph.values[match.nodes[-1].inputs[0]].aval.ndim
    own = {name: gradient.attr(name) for name in ("activation", "from_output", "alpha")}
    return {**own, "ndim": ndim, "summed": sum(1 << d for d in axes)}


def _check(match: Match) -> Refusal | None:
    gradient = match.first(OpFlags.IS_ACTIVATION_GRAD)
    if gradient is not None and gradient.attr("activation") not in ACTIVATIONS:
        found = str(gradient.attr("activation"))
        return refuse(match, "activation", f"the gradient of one of {', '.join(ACTIVATIONS)}", found, gradient)
    found = match.nodes[-1].op
    return None if found == "reduce_sum" else refuse(match, "reduction", "a sum over rows", found)


def _requirements(op: FusedOp) -> Mapping[str, Hashable]:
    attrs = op.blob.unpack()
    return {
        "activation": str(attrs["activation"]),
        "from_output": bool(attrs["from_output"]),
        "summed_axes": summed_axes(op),
        "dtype": str(op.in_avals[-1].dtype),
        "rows": rows(op),
        "formula": "guarded" if attrs["from_output"] else formula(_gradient(op).body),
    }


def _gradient(op: FusedOp) -> Any:
    """The derivative that its steps evaluate."""
    return next(e.params["grad"] for step in op.steps for e in step.body.eqns if "grad" in e.params)


OP = SemanticOp("gemm_epilogue_grad", SCHEMA, _attributes, _requirements, _check)
