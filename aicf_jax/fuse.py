"""`fuse`: the front door."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from aicf_jax.engine import Context
from aicf_jax.fronts import state
from aicf_jax.fronts.function import FusedFunction
from aicf_jax.kernels import KERNELS, Kernel
from aicf_jax.normalize import with_rules
from aicf_jax.ops import OPS
from aicf_jax.pattern import Pattern
from aicf_jax.patterns import FUSION_PATTERNS
from aicf_jax.policy import Policy


def fuse(
    target: Any,
    *,
    policy: Policy = Policy(),
    patterns: Sequence[Pattern] = FUSION_PATTERNS,
    kernels: Sequence[Kernel] = KERNELS,
) -> Any:
    """A drop-in for `target` that runs fused: same values, same gradients of any order, same pytrees.

    Args:
      target: a function (anything callable), a flax linen module or a flax nnx module.
      policy: limits on what may be done, see `Policy`.
      patterns: what to look for, in order of preference.
      kernels: what fused operations may run as. "Leave it to XLA" is always a candidate.

    Returns:
      For a function, a function with the same name and signature. For a linen module, a module of a subclass of its
      type with fused ``apply``. For an nnx module, an instance of a subclass of its type that shares its state.

    Called outside of ``jit`` the result runs the user's Python again at every call, so closed-over values and module
    state are the current ones; rewriting and compiling happen once per program. Inside ``jit`` or ``grad`` it costs
    one trace.

    Raises:
      TypeError: `target` is none of these, or patterns/kernels hold something else; the argument is named.
      FuseError: at a call, when state cannot be handled or (``on_failure="raise"``) when the framework fails.
    """
    context = make_context(policy, patterns, kernels)
    if isinstance(target, FusedFunction):
        target = target.__wrapped__
    if is_linen(target):
        from aicf_jax.fronts import linen_module

        return linen_module.fuse_module(target, context)
    if state.is_object(target):
        from aicf_jax.fronts import nnx_module

        return nnx_module.fuse_module(target, context)
    if not callable(target) or isinstance(target, type):
        hint = ". Fuse an instance of the class" if isinstance(target, type) else ""
        raise TypeError(
            "fuse(target=...): expected a function, a flax linen module or a flax nnx module, "
            f"found {target!r} of type {type(target).__name__}{hint}"
        )
    return FusedFunction(target, context)


def make_context(policy: Policy, patterns: Sequence[Pattern], kernels: Sequence[Kernel]) -> Context:
    """A checked `Context`. Raises TypeError or ValueError naming the argument."""
    if not isinstance(policy, Policy):
        raise TypeError(f"fuse(policy=...): expected a Policy, found {policy!r}")
    for name, items, kind in (("patterns", patterns, Pattern), ("kernels", kernels, Kernel)):
        if not isinstance(items, (tuple, list)):
            raise TypeError(f"fuse({name}=...): expected a tuple of {kind.__name__} objects, found {items!r}")
        wrong = [x for x in items if not isinstance(x, kind)]
        if wrong:
            raise TypeError(f"fuse({name}=...): expected {kind.__name__} objects, found {wrong[0]!r}")
        names = [x.name for x in items]
        twice = [n for n in names if names.count(n) > 1]
        if twice:
            raise ValueError(f"fuse({name}=...): expected distinct names, found {twice[0]!r} twice")
    try:
        with_rules(rule for pattern in patterns for rule in pattern.rules)
    except ValueError as error:
        raise ValueError(
            f"fuse(patterns=...): expected normalization rules of distinct names, found {error}"
        ) from error
    known = {*OPS, *(p.rewrite.name for p in patterns)}
    for kernel in kernels:
        if kernel.op not in known:
            raise ValueError(
                f"fuse(kernels=...): {kernel.name} implements {kernel.op!r}, expected one of {sorted(known)}"
            )
    return Context(policy, tuple(patterns), tuple(kernels))


def is_linen(target: Any) -> bool:
    """Whether `target` is a flax linen module. Imports nothing: no linen, no linen modules."""
    linen = sys.modules.get("flax.linen")
    return linen is not None and isinstance(target, linen.Module)
