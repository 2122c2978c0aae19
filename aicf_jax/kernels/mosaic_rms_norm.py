"""``mosaic_rms_norm``: `pallas_kernels.norm.forward` for Hopper. One read, one write; statistics in float32."""

from __future__ import annotations

from aicf_jax.kernels._norm import forward_kernel

KERNEL = forward_kernel("rms_norm")
