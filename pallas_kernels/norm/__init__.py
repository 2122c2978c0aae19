"""Layer norm and RMS norm with the residual addition before them, forward and backward, for Hopper."""

from pallas_kernels.norm.backward import Backward, backward
from pallas_kernels.norm.config import NormConfig, default
from pallas_kernels.norm.forward import Forward, forward

__all__ = ["Backward", "Forward", "NormConfig", "backward", "default", "forward"]
