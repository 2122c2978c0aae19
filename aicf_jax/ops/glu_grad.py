"""``glu_grad``: the derived backward of `glu` as one operation.

Its equations are what the steps' own derivatives trace to (`ops._stepwise`): the shared cotangents dG and dU, and from
them those of the inputs. A kernel for it is one more way to run them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from aicf_jax.attrs import Schema
from aicf_jax.ops._semantic import FusedOp, SemanticOp
from aicf_jax.ops.glu import FIELDS

SCHEMA = Schema(kind_id=12, schema_id=1, fields=FIELDS)


def _attributes(match: Any) -> Mapping[str, object]:
    raise ValueError("glu_grad is derived from a glu; no pattern stands for it")


def _requirements(op: FusedOp) -> Mapping[str, Hashable]:
    return {
        "activation": op.blob["activation"],
        "projections": op.blob["projections"],
        "dtypes": tuple(sorted({str(a.dtype) for a in op.out_avals})),
    }


OP = SemanticOp("glu_grad", SCHEMA, _attributes, _requirements)
