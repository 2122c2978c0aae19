"""``rms_norm_grad``: the derived backward of `rms_norm` as one operation, see there for what it computes."""

from __future__ import annotations

from aicf_jax.ops._norm import norm_grad

OP = norm_grad("rms_norm_grad", 8)
