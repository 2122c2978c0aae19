"""Semantic fusion for JAX.

`fuse` rewrites a function or flax model by what its operations mean and keeps it differentiable in every mode;
`explain` says what was fused, what was not, and why; `bisect` finds the rewrite that breaks a comparison. The six
stages behind them are described in ``docs/design``.
"""

from aicf_jax import ops
from aicf_jax.bisect import Bisection, bisect
from aicf_jax.cache import CacheInfo, cache_info, clear_caches
from aicf_jax.compare import compare
from aicf_jax.errors import Comparison, FuseError, GraphError, Refusal, VerificationError
from aicf_jax.explain import explain
from aicf_jax.flags import OpFlags
from aicf_jax.fuse import fuse
from aicf_jax.kernels import KERNELS, Kernel
from aicf_jax.pattern import Pattern
from aicf_jax.patterns import FUSION_PATTERNS
from aicf_jax.policy import Policy
from aicf_jax.report import Fusion, Report
from aicf_jax.tune import Tuned, tune

__all__ = [
    "FUSION_PATTERNS",
    "KERNELS",
    "Bisection",
    "CacheInfo",
    "Comparison",
    "FuseError",
    "Fusion",
    "GraphError",
    "Kernel",
    "OpFlags",
    "Pattern",
    "Policy",
    "Refusal",
    "Report",
    "Tuned",
    "VerificationError",
    "bisect",
    "cache_info",
    "clear_caches",
    "compare",
    "explain",
    "fuse",
    "ops",
    "tune",
]
