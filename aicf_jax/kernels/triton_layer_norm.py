"""``triton_layer_norm``: `pallas_kernels.norm.portable.forward` for Ampere and Ada. One read, one write."""

from __future__ import annotations

from aicf_jax.kernels._ampere import NORMS
from aicf_jax.kernels._norm import forward_kernel

KERNEL = forward_kernel("layer_norm", NORMS)
