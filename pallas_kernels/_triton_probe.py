"""The kernel that `pallas_kernels._triton` lowers to see whether any can be."""

# Triton's language: `tl` is no module to pyright where it is not installed, and branches on constants are not run.
# pyright: reportInvalidTypeForm=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false

from __future__ import annotations

import importlib
from typing import Any

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")


@triton.jit
def copy(x, y, n: tl.constexpr):
    """``y = x``, of n elements."""
    at = tl.arange(0, n)
    tl.store(y + at, tl.load(x + at))
