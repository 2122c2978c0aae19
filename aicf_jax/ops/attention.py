"""``attention``: a placeholder that keeps the name until the operation lands; it refuses every match."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from aicf_jax.attrs import Field, Schema
from aicf_jax.errors import Refusal
from aicf_jax.flags import OpFlags
from aicf_jax.legality import refuse
from aicf_jax.ops._semantic import FusedOp, SemanticOp
from aicf_jax.pattern import Match

SCHEMA = Schema(kind_id=3, schema_id=1, fields=(Field("axis", "int"),))


def _attributes(match: Match) -> Mapping[str, object]:
    softmax = match.first(OpFlags.IS_SOFTMAX)
    return {"axis": softmax.attr("axis") if softmax else 0}


def _check(match: Match) -> Refusal | None:
    return refuse(match, "not_implemented", "the attention operation", "its placeholder")


def _requirements(op: FusedOp) -> Mapping[str, Hashable]:
    return {}


OP = SemanticOp("attention", SCHEMA, _attributes, _requirements, _check)
