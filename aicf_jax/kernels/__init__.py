"""Stage 6, the candidates: one module a kernel, each exporting ``KERNEL``.

A user's kernel is passed with ``fuse(..., kernels=KERNELS + (mine,))``.
"""

from __future__ import annotations

from aicf_jax.kernels._kernel import ANY, XLA, Kernel
from aicf_jax.registry import discover, unique

__all__ = ["ANY", "KERNELS", "XLA", "Kernel", "named"]

#: All built-in kernels. "Leave it to XLA" is always a candidate and is not listed.
KERNELS: tuple[Kernel, ...] = tuple(unique(discover(__name__, "KERNEL"), "name"))


def named(name: str) -> Kernel:
    """The built-in kernel of this name. Raises KeyError if there is none."""
    return {k.name: k for k in KERNELS}[name]
