"""What is compared with plain jit: `aicf_jax`, or nothing at all, which measures the noise of the measurement."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from experiments.benchmarks.program import Target


@dataclass(frozen=True)
class Work:
    """Process totals: runs of user Python by `fuse`, and plans built."""

    traces: int
    rewrites: int

    def __sub__(self, other: Work) -> Work:
        return Work(self.traces - other.traces, self.rewrites - other.rewrites)


@dataclass(frozen=True)
class Fuser:
    """`fuse(target)`, the totals of its work so far, how to forget it, and the fused operations it finds by name."""

    name: str
    fuse: Callable[[Target], Target]
    work: Callable[[], Work]
    clear: Callable[[], None]
    fusions: Callable[[Target, tuple[Any, ...]], dict[str, int]]


def identity() -> Fuser:
    """Leaves every program as it is: its ratios are the noise floor, its rewriting cost zero plus noise."""
    return Fuser("identity", lambda target: target, lambda: Work(0, 0), lambda: None, lambda target, args: {})


def aicf() -> Fuser:
    """`aicf_jax` with its default policy. Raises RuntimeError when the installed package cannot fuse."""
    import aicf_jax

    lacking = [n for n in ("fuse", "explain", "cache_info", "clear_caches") if not hasattr(aicf_jax, n)]
    if lacking:
        raise RuntimeError(f"this aicf_jax has no {', '.join(lacking)}; --fuse identity measures the noise floor")

    def work():
        info = aicf_jax.cache_info()
        return Work(info.traces, info.rewrites)

    def fusions(target, args):
        return dict(sorted(collections.Counter(f.op for f in aicf_jax.explain(target, *args).fusions).items()))

    return Fuser("aicf_jax", aicf_jax.fuse, work, aicf_jax.clear_caches, fusions)


FUSERS: dict[str, Callable[[], Fuser]] = {"aicf_jax": aicf, "identity": identity}
