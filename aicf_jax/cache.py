"""The plan cache: a program's key -> its rewritten plan and compiled form. Bounded, thread-safe, holds no arrays."""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aicf_jax import _compat, memo
from aicf_jax.engine import Context, Engine, Rewritten
from aicf_jax.fingerprint import Uncacheable, describe

#: Plans kept; the least recently used goes first.
MAX_PLANS = 256


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A rewritten program whose constants are arguments.

    `rewritten` is None when the framework failed and the program runs as written; `failure` then says why.
    `in_parts`: it must not be compiled as one: it moves arrays between devices, or is built anew at every call.
    """

    jaxpr: Any
    unfused: Any
    rewritten: Rewritten | None
    failure: str | None = None
    in_parts: bool = False

    @functools.cached_property
    def function(self) -> Callable[..., list[Any]]:
        """Binds the plan's equations where it is called."""
        return _compat.as_function(self.jaxpr)

    @functools.cached_property
    def compiled(self) -> Callable[..., list[Any]]:
        """The plan under `jax.jit`."""
        return jax.jit(self.function)

    @functools.cached_property
    def reference(self) -> Callable[..., list[Any]]:
        """The unfused program under `jax.jit`, for ``Policy(verify=True)``."""
        return jax.jit(_compat.as_function(self.unfused))


@dataclasses.dataclass(frozen=True)
class CacheInfo:
    """Totals of this process.

    Attributes:
      traces: times `fuse` ran a user's Python function.
      rewrites: plans built (all six stages). A second call with an equal program builds none.
      hits: calls served by a plan that was there.
      size, max_size: plans held now, and at most.
    """

    traces: int
    rewrites: int
    hits: int
    size: int
    max_size: int


class PlanCache:
    """See the module's docstring."""

    def __init__(self, max_size: int = MAX_PLANS):
        self._plans: collections.OrderedDict[Hashable, Plan] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._max_size = max_size
        self.traces = self.rewrites = self.hits = 0

    def count_trace(self) -> None:
        with self._lock:
            self.traces += 1

    def get(self, jaxpr: Any, context: Context, transformed: bool = False) -> Plan:
        """The plan of a constant-free program under a context; built when there is none.

        `transformed`: the call may be differentiated. A program with rules of the user's own is then never taken from
        the cache: jax traces a rule once per program and would not see what it reads a second time.

        Two threads may build the same plan at the same time; either result is right, the later one stays.
        """
        try:
            program, user_rules = describe(jaxpr)
            key = None if user_rules and transformed else (program, context)
        except Uncacheable:
            key = None
        if key is not None:
            with self._lock:
                plan = self._plans.get(key)
                if plan is not None:
                    self._plans.move_to_end(key)
                    self.hits += 1
                    return plan
        plan = build_plan(jaxpr, context)
        in_parts = key is None or _compat.places_arrays(jaxpr)
        plan = dataclasses.replace(plan, in_parts=in_parts)
        with self._lock:
            self.rewrites += 1
            if key is not None:
                self._plans[key] = plan
                while len(self._plans) > self._max_size:
                    self._plans.popitem(last=False)
        return plan

    def info(self) -> CacheInfo:
        with self._lock:
            return CacheInfo(self.traces, self.rewrites, self.hits, len(self._plans), self._max_size)

    def clear(self) -> None:
        with self._lock:
            self._plans.clear()


def build_plan(jaxpr: Any, context: Context) -> Plan:
    """All six stages on one program. A failure of the framework gives the unfused plan, or `FuseError` if asked for."""
    from aicf_jax import log
    from aicf_jax.errors import FuseError

    try:
        done = Engine(context).rewrite(jaxpr)
    except Exception as error:
        if context.policy.on_failure == "raise":
            if isinstance(error, FuseError):
                raise
            raise FuseError(
                f"fuse failed on this program: {type(error).__name__}: {error}. "
                "Policy(on_failure='fallback') runs it unfused instead"
            ) from error
        message = f"{type(error).__name__}: {error}"
        log.once(f"fuse failed on a program, which runs unfused: {message}")
        return Plan(jaxpr, jaxpr, None, message)
    return Plan(done.jaxpr, jaxpr, done)


PLANS = PlanCache()


def cache_info() -> CacheInfo:
    """Counts of traces, rewrites and cache hits of this process."""
    return PLANS.info()


def clear_caches() -> None:
    """Forgets all plans and derived programs. Counters go on."""
    PLANS.clear()
    memo.clear()


def run(plan: Plan, values: Sequence[Any], context: Context) -> list[Any]:
    """The plan's results on constants and arguments.

    Inside a program that is being traced (jit, scan, export, ...) the plan's equations become part of it. Outside,
    the compiled plan runs, also under grad, jvp and vmap. ``numerics="bitwise"`` runs equation by equation outside of
    a trace, as the unfused call does: a compiler may contract a multiplication and an addition that follow each
    other.
    """
    from aicf_jax import verify

    values = prepared(values)
    if context.policy.verify and _compat.at_top_level():
        return verify.compared(plan, values)
    if plan.in_parts or context.policy.numerics == "bitwise" or any(_compat.is_staged(v) for v in values):
        return plan.function(*values)
    return plan.compiled(*values)


def prepared(values: Sequence[Any]) -> list[Any]:
    """Arguments as a plan takes them: host numbers and arrays as arrays of jax."""
    return [jnp.asarray(v) if isinstance(v, (float, complex, np.ndarray, np.generic)) else v for v in values]
