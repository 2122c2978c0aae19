"""``O = softmax(scale Q K^T) V``, with masks, and the statistics of its rows, for Hopper GPUs."""

from pallas_kernels.attention.config import ForwardConfig
from pallas_kernels.attention.forward import forward

__all__ = ["ForwardConfig", "forward"]
