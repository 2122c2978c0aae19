"""``cudnn_attention_grad``: the gradients of cuDNN's attention, whatever ran forward.

Memory moved: Q, K, V and the cotangent once and the gradients once, and what its forward, which runs again, moves.
Accumulated in float32, in no fixed order.
"""

from __future__ import annotations

from aicf_jax.kernels._attention import gradient, gradient_capabilities, moved_bytes
from aicf_jax.kernels._cudnn import TARGETS, TEXT, available, fits, library, ranked_bytes
from aicf_jax.kernels._kernel import Kernel

KERNEL = Kernel(
    "cudnn_attention_grad",
    "attention_grad",
    ("cuda",),
    gradient_capabilities(TEXT, fits),
    **gradient(library, any_band=False),
    deterministic=False,
    cost_bytes=ranked_bytes,
    moved_bytes=moved_bytes,
    targets=TARGETS,
    opaque=True,
    with_devices=True,
    available=available,
)
