"""``triton_layer_norm_grad``: `pallas_kernels.norm.portable.backward` for Ampere and Ada: dX and sums of each block."""

from __future__ import annotations

from aicf_jax.kernels._ampere import NORMS
from aicf_jax.kernels._norm import gradient_kernel

KERNEL = gradient_kernel("layer_norm_grad", NORMS)
