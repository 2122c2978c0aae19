"""``linear_cross_entropy_grad``: the derived backward of `linear_cross_entropy` as one operation.

Its equations are what `ops._loss_composition.cotangent` traces to. Of a loss that is one number they multiply the
gradients that the forward computed by the cotangent; of one loss a row they compute the logits again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from aicf_jax.attrs import Schema
from aicf_jax.ops import _programs
from aicf_jax.ops._loss_variant import variant
from aicf_jax.ops._semantic import FusedOp, SemanticOp
from aicf_jax.ops.linear_cross_entropy import FIELDS

SCHEMA = Schema(kind_id=10, schema_id=1, fields=FIELDS)


def _attributes(match: Any) -> Mapping[str, object]:
    raise ValueError("linear_cross_entropy_grad is derived from a linear_cross_entropy; no pattern stands for it")


def _requirements(op: FusedOp) -> Mapping[str, Hashable]:
    products = any(eqn.primitive.name == "dot_general" for step in op.steps for eqn in step.body.eqns)
    return {
        "dtypes": tuple(sorted({str(a.dtype) for a in op.out_avals})),
        "recomputes": products,
        "variant": "a batch of losses" if op.gradient_of is None else variant(op.gradient_of[0]),
    }


OP = SemanticOp(
    "linear_cross_entropy_grad",
    SCHEMA,
    _attributes,
    _requirements,
    any_operands=True,
    unfused_bytes=_programs.unfused_bytes,
)
