"""`tune`: measures the candidates for each fused operation on this machine."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from aicf_jax import tuning
from aicf_jax.cache import build_plan, clear_caches
from aicf_jax.derived import backward_program
from aicf_jax.explain import entry
from aicf_jax.fronts.function import trace_call
from aicf_jax.kernels import XLA, Kernel
from aicf_jax.ops import FusedOp
from aicf_jax.pattern import Pattern
from aicf_jax.policy import TARGETS, Policy
from aicf_jax.select import refusal_of, trial


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What `tune` measured.

    Attributes:
      policy: the policy that was given, with ``tuning`` set to the table.
      seconds: operation -> kernel name -> seconds.
    """

    policy: Policy
    seconds: tuning.Table

    def __str__(self) -> str:
        if not self.seconds:
            return "nothing to tune: no fused operation has a kernel besides XLA's here"
        lines = []
        for name, found in self.seconds.items():
            best = min(found, key=lambda k: found[k])
            lines.append(name)
            lines += [f"  {'*' if k == best else ' '} {s * 1e3:10.3f} ms  {k}" for k, s in sorted(found.items())]
        return "\n".join(lines)


def tune(
    target: Any,
    /,
    *args: Any,
    path: str | Path,
    policy: Policy | None = None,
    patterns: Sequence[Pattern] | None = None,
    kernels: Sequence[Kernel] | None = None,
    budget_s: float = 1.0,
    **kwargs: Any,
) -> Tuned:
    """Measures, on this machine, each kernel that a call of `target` could run against XLA's own, and writes a table.

    Every fused operation of the program and of its derived backwards is run by itself on random data of its types.
    ``fuse(target, policy=tuned.policy)`` then takes the fastest. Tables of several programs and machines share a file.

    Args:
      target: as for `fuse`.
      *args: of a call, as for `explain`; `jax.ShapeDtypeStruct` may stand for arrays.
      path: the table, made where there is none.
      policy: as for `fuse`.
      patterns: as for `fuse`.
      kernels: as for `fuse`.
      budget_s: seconds for each operation, besides compiling; every candidate runs at least three times.
      **kwargs: of the call.

    Raises:
      TypeError: `target` is not callable.
      ValueError: the policy's target is another machine than this, or `path` is a folder or lies in none that can be
        written to.
    """
    tuning.check_path(Path(path))
    function, _, context = entry(target, policy, patterns, kernels, tuning=None)
    platform = TARGETS.get(jax.default_backend(), jax.default_backend())
    device = tuning.machine(platform)
    if device is None or platform not in context.policy.platforms():
        raise ValueError(f"tune(policy=...): expected a target that is this machine, found {context.policy.target!r}")
    plan = build_plan(trace_call(function, args, kwargs).jaxpr, context)
    seconds: dict[str, dict[str, float]] = {}
    for fused in plan.rewritten.fusions if plan.rewritten is not None else ():
        for op in _with_backward(fused.op):
            kernels_of = _candidates(op, platform)
            if kernels_of and tuning.key_of(op) not in seconds:
                seconds[tuning.key_of(op)] = measure(op, kernels_of, budget_s)
    if seconds:
        tuning.write(Path(path), device, seconds)
        clear_caches()  # plans that were made before know nothing of it
    return Tuned(dataclasses.replace(context.policy, tuning=str(path)), seconds)


def measure(op: FusedOp, kernels: Sequence[Kernel], budget_s: float) -> dict[str, float]:
    """Seconds of the operation's equations and of each kernel: medians of runs one after the other, on random data."""
    inputs = [_random(i, a) for i, a in enumerate(op.in_avals)]
    candidates = {XLA: jax.jit(lambda *xs: op.reference(*xs))}
    candidates |= {k.name: jax.jit(functools.partial(k.run, op)) for k in kernels}
    for run in candidates.values():
        jax.block_until_ready(run(*inputs))
    found: dict[str, list[float]] = {name: [] for name in candidates}
    end = time.perf_counter() + budget_s
    while len(found[XLA]) < 3 or (time.perf_counter() < end and len(found[XLA]) < 200):
        for name, run in candidates.items():
            found[name].append(_seconds(run, inputs))
    return {name: statistics.median(runs) for name, runs in found.items()}


def _seconds(run: Callable[..., Any], inputs: Sequence[Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(*inputs))
    return time.perf_counter() - start


def _random(seed: int, aval: Any) -> Any:
    """Random numbers; zeros for indices, which are valid whatever they index, and True for masks."""
    key = jax.random.key(seed)
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(key, aval.shape)
    if jnp.issubdtype(aval.dtype, jnp.floating):
        return jax.random.normal(key, aval.shape).astype(aval.dtype)
    return jnp.ones(aval.shape, aval.dtype) if aval.dtype == bool else jnp.zeros(aval.shape, aval.dtype)


def _candidates(op: FusedOp, platform: str) -> list[Kernel]:
    """The kernels that may run the operation on a platform and can be traced, whatever they cost."""
    requirements = op.requirements()
    return [
        k
        for k in op.context.kernels
        if k.op == op.semantic.name
        and platform in k.platforms
        and refusal_of(k, op, op.pattern, requirements, platform) is None
        and trial(k, op, op.pattern) is None
    ]


def _with_backward(op: FusedOp) -> list[FusedOp]:
    """The operation, and those of its derived backward."""
    if any(step.role in ("gradient", "opaque") for step in op.steps):
        return [op]
    wanted = tuple(i for i, a in enumerate(op.in_avals) if jnp.issubdtype(a.dtype, jnp.inexact))
    backward = backward_program(op, wanted)
    if backward.op is not None:
        return [op, backward.op]
    return [op, *(f.op for f in backward.rewritten.fusions)] if backward.rewritten is not None else [op]
