"""Memory flow programs of fused operations, derived once for equal operations and scheduled for this machine."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import mcir
from aicf_jax.ops import FusedOp
from mcir.derive import Derived, from_graph
from mcir.lower_jax import lower


@functools.lru_cache(maxsize=512)
def forward(op: FusedOp) -> Derived:
    """The program of the operation's results."""
    return _derived(op, lambda *xs: _results(op, xs), "attention")


@functools.lru_cache(maxsize=512)
def forward_saving(op: FusedOp) -> Derived:
    """The program of the operation's results and of what its backward wants kept."""
    composite = op.semantic.composite
    assert composite is not None

    def f(*xs: Any) -> list[Any]:
        results, saved = composite.save(op, xs)
        return [*results, *saved]

    return _derived(op, f, "attention")


@functools.lru_cache(maxsize=512)
def backward(op: FusedOp) -> Derived:
    """The program of a derived backward."""
    return _derived(op, lambda *xs: _results(op, xs), "attention_backward")


def _results(op: FusedOp, xs: Any) -> list[Any]:
    from aicf_jax import autodiff

    return list(autodiff.reference(op, *xs))


def _derived(op: FusedOp, f: Any, name: str) -> Derived:
    derived = from_graph(mcir.trace(f, *op.in_avals), name)
    return dataclasses.replace(derived, program=scheduled(derived.program))


def scheduled(program: mcir.Program) -> mcir.Program:
    """Blocks for this machine. Independent axes other than the two large ones stay whole: they may be sharded."""
    batch = math.prod(a.size for a in program.axes if a.name in ("b", "h") or a.name.startswith("b"))
    budget = 1 << 20
    block = 32
    while block < 512 and batch * (2 * block) ** 2 <= 2 * budget:
        block *= 2
    return program.with_blocks(**{a.name: min(block, a.size) for a in program.axes if a.name in ("i", "j")})


def cache_bytes(platform: str) -> int:
    """What an intermediate may measure and still stay in the cache of a machine of this platform."""
    return 2 << 20


@functools.lru_cache(maxsize=512)
def lowered(make: Any, op: FusedOp) -> Any:
    """The program of an operation as a function."""
    return lower(make(op))


def moved_bytes(op: FusedOp) -> int:
    """Inputs and results once: blocks that are read again come from the cache."""
    from aicf_jax.select import nbytes

    return sum(nbytes(a) for a in (*op.in_avals, *op.out_avals))
