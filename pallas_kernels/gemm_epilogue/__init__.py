"""``Y = act(A @ B + b)`` and its activation's gradient with the sum for the bias, for Hopper GPUs."""

from pallas_kernels.gemm_epilogue.backward import backward
from pallas_kernels.gemm_epilogue.config import BackwardConfig, ForwardConfig
from pallas_kernels.gemm_epilogue.forward import forward

__all__ = ["BackwardConfig", "ForwardConfig", "backward", "forward"]
