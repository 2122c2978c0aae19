"""``O = softmax(scale Q K^T) V``, with masks, the statistics of its rows, and its gradients, for Hopper GPUs."""

from pallas_kernels.attention.backward import backward
from pallas_kernels.attention.config import ForwardConfig
from pallas_kernels.attention.dropout import Bernoulli
from pallas_kernels.attention.forward import forward
from pallas_kernels.attention.gradient_problem import BackwardConfig

__all__ = ["BackwardConfig", "Bernoulli", "ForwardConfig", "backward", "forward"]
