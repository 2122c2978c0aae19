"""``layer_norm_grad``: the derived backward of `layer_norm` as one operation, see there for what it computes.

Memory moved by one kernel: S (or X and R), dY and dS read once, dX, dscale and dbias written once.
"""

from __future__ import annotations

from aicf_jax.ops._norm import norm_grad

OP = norm_grad("layer_norm_grad", 7)
