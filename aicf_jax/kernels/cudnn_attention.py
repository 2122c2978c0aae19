"""``cudnn_attention``: cuDNN's attention, as `jax.nn.dot_product_attention(implementation="cudnn")` calls it.

Memory moved: Q, K, V and the result once, and a number a row where the backward wants it; accumulated in float32.
Without measurements it is ranked behind the kernels whose traffic is known.
"""

from __future__ import annotations

from aicf_jax.kernels._attention import capabilities, forward, moved_bytes
from aicf_jax.kernels._cudnn import TARGETS, TEXT, available, fits, library, ranked_bytes
from aicf_jax.kernels._kernel import Kernel

KERNEL = Kernel(
    "cudnn_attention",
    "attention",
    ("cuda",),
    capabilities(TEXT, fits),
    **forward(library, any_band=False),
    cost_bytes=ranked_bytes,
    moved_bytes=moved_bytes,
    targets=TARGETS,
    opaque=True,
    with_devices=True,
    available=available,
)
