"""``conv_epilogue_grad``: the derived backward of `conv_epilogue` as one operation.

Its equations are what the steps' own derivatives trace to (`ops._stepwise`): the cotangent of the convolution's result,
the sums that are the vectors' gradients, the two convolutions for X and W.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from aicf_jax.attrs import Schema
from aicf_jax.ops._semantic import FusedOp, SemanticOp
from aicf_jax.ops.conv_epilogue import FIELDS

SCHEMA = Schema(kind_id=14, schema_id=1, fields=FIELDS)


def _attributes(match: Any) -> Mapping[str, object]:
    raise ValueError("conv_epilogue_grad is derived from a conv_epilogue; no pattern stands for it")


def _requirements(op: FusedOp) -> Mapping[str, Hashable]:
    return {
        "activation": op.blob["activation"],
        "spatial": op.blob["spatial"],
        "dtypes": tuple(sorted({str(a.dtype) for a in op.out_avals})),
    }


OP = SemanticOp("conv_epilogue_grad", SCHEMA, _attributes, _requirements)
