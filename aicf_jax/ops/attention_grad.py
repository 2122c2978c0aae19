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

#: What gradients are wanted: of what the scores and the result are computed from, or of biases too.
QKV, MORE = "Q, K and V", "Q, K, V and what is beside the scores"

SCHEMA = Schema(kind_id=4, schema_id=1, fields=FIELDS)


def _attributes(match: Any) -> Mapping[str, object]:
    raise ValueError("attention_grad is derived from an attention; no pattern stands for it")


def _requirements(op: FusedOp) -> Mapping[str, Hashable]:
    """``gradients``: whether more is wanted than those of Q, K and V, whose types are `dtypes`."""
    found, dtypes, gradients = _variant(op), [a.dtype for a in op.out_avals], QKV
    if op.gradient_of is not None and isinstance(found, Variant):
        wanted, arguments = op.gradient_of[1], {found.q.argument, found.k.argument, found.v.argument}
        dtypes = [d for d, argument in zip(dtypes, wanted, strict=True) if argument in arguments]
        gradients = QKV if arguments >= set(wanted) else MORE
    return {"dtypes": tuple(sorted(set(map(str, dtypes)))), "gradients": gradients, "variant": found}


def _variant(op: FusedOp) -> Variant | str:
    """The kind of attention it is the backward of, or why that is not known."""
    if op.gradient_of is None:
        return "a backward of which some inputs are batched"
    origin, _ = op.gradient_of
    # No kernel wants to know it of wider types.
    if any(a.dtype.itemsize > 2 for a in origin.out_avals):
        return "gradients of wider types"
    return variant(origin)


OP = SemanticOp(
    "attention_grad", SCHEMA, _attributes, _requirements, any_operands=True, unfused_bytes=_programs.unfused_bytes
)
