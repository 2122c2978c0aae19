"""``attention_grad``: the derived backward of `attention` as one operation.

Its equations are what `ops.attention.cotangent` traces to: the scores and weights computed again from the inputs and
the log-sum-exp of each row, the gradients of everything that enters. A kernel for it is one more way to run them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from aicf_jax.attrs import Schema
from aicf_jax.ops import _programs
from aicf_jax.ops._attention_variant import Variant, variant
from aicf_jax.ops._semantic import FusedOp, SemanticOp
from aicf_jax.ops.attention import FIELDS

SCHEMA = Schema(kind_id=4, schema_id=1, fields=FIELDS)


def _attributes(match: Any) -> Mapping[str, object]:
    raise ValueError("attention_grad is derived from an attention; no pattern stands for it")


def _requirements(op: FusedOp) -> Mapping[str, Hashable]:
    return {"dtypes": tuple(sorted({str(a.dtype) for a in op.out_avals})), "variant": _variant(op)}


def _variant(op: FusedOp) -> Variant | str:
    """The kind of attention it is the backward of, or why that is not known."""
    if op.gradient_of is None:
        return "a backward of which some inputs are batched"
    origin, wanted = op.gradient_of
    # No kernel wants to know it of wider types.
    if any(a.dtype.itemsize > 2 for a in op.out_avals):
        return "gradients of wider types"
    found = variant(origin)
    if isinstance(found, Variant) and not {found.q.argument, found.k.argument, found.v.argument} >= set(wanted):
        return "gradients of more than Q, K and V"
    return found


OP = SemanticOp(
    "attention_grad", SCHEMA, _attributes, _requirements, any_operands=True, unfused_bytes=_programs.unfused_bytes
)
