"""The numbers of rows of ``X W`` that a loss is made of, and their gradients, streamed, for Hopper GPUs."""

from pallas_kernels.linear_cross_entropy.backward import backward
from pallas_kernels.linear_cross_entropy.config import BackwardConfig, ForwardConfig
from pallas_kernels.linear_cross_entropy.forward import Numbers, forward

__all__ = ["BackwardConfig", "ForwardConfig", "Numbers", "backward", "forward"]
