"""``mosaic_layer_norm_grad``: `pallas_kernels.norm.backward` for Hopper: dX and sums of each block, then their sum."""

from __future__ import annotations

from aicf_jax.kernels._norm import gradient_kernel

KERNEL = gradient_kernel("layer_norm_grad")
