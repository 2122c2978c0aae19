"""``batch_norm_grad``: the derived backward of `batch_norm` as one operation, see there for what it computes.

Memory moved by one kernel: X, Y or Z, and dY read twice, dX, dscale and dbias written once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aicf_jax.attrs import Schema
from aicf_jax.ops._semantic import SemanticOp
from aicf_jax.ops.batch_norm import FIELDS, requirements


def _attributes(match: Any) -> Mapping[str, object]:
    raise ValueError("batch_norm_grad is derived from a batch_norm; no pattern stands for it")


OP = SemanticOp("batch_norm_grad", Schema(kind_id=16, schema_id=1, fields=FIELDS), _attributes, requirements)
