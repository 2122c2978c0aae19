"""Fused functions: one call traces the user's Python, looks up the plan, runs it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

import jax

from aicf_jax import _compat, log
from aicf_jax.cache import PLANS, run
from aicf_jax.engine import Context
from aicf_jax.errors import FuseError
from aicf_jax.fronts import state
from aicf_jax.fronts.leaves import Split, has_host_values, is_traced, split

#: What jax raises when a function needs the value of a traced argument.
_NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


@dataclasses.dataclass(frozen=True)
class Traced:
    """One call as a program.

    Attributes:
      jaxpr: constant-free; closed-over arrays and nnx state are leading arguments.
      values: of all arguments.
      finish: makes the call's result of the program's, and writes state back.
    """

    jaxpr: Any
    values: tuple[Any, ...]
    finish: Callable[[list[Any]], Any]


class FusedFunction:
    """A function that runs fused. Name, docstring and signature are those of the original (``__wrapped__``)."""

    def __init__(self, function: Callable[..., Any], context: Context, lifted: bool = False):
        functools.update_wrapper(self, function, updated=())
        self.__wrapped__ = function
        self.context = context
        #: Called by flax inside a module, on a pure function of its variables: the scope it holds is flax's business,
        #: and the function must not run twice, since its first run drew from the module's rngs.
        self._lifted = lifted
        with contextlib.suppress(TypeError, ValueError):  # some builtins have no signature
            self.__signature__ = inspect.signature(function)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if _compat.jit_disabled():
            return self.__wrapped__(*args, **kwargs)  # for looking into the user's own operations one by one
        try:
            traced = trace_call(self.__wrapped__, args, kwargs, self._lifted)
        except (*_NEEDS_VALUE, state.Unwritable, _HiddenResult) as error:
            if self._lifted:
                raise
            return self._as_written(error, args, kwargs)
        plan = PLANS.get(traced.jaxpr, self.context, any(map(_compat.is_tracer, traced.values)))
        return traced.finish(run(plan, traced.values, self.context))

    def _as_written(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function that cannot be traced runs as it is, where that is possible at all."""
        traced = any(map(_compat.is_tracer, jax.tree.leaves((args, kwargs))))
        if self.context.policy.on_failure == "raise" or (traced and isinstance(error, _NEEDS_VALUE)):
            raise error
        name = getattr(self.__wrapped__, "__qualname__", repr(self.__wrapped__))
        log.once(f"{name} cannot be traced and runs unfused: {str(error).splitlines()[0]}")
        return self.__wrapped__(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.__wrapped__, self.context)

    def __repr__(self) -> str:
        return f"fuse({self.__wrapped__!r})"


def trace_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], lifted: bool = False
) -> Traced:
    """Runs the user's Python once, on tracers.

    Python floats and NumPy values are traced; when the function turns out to need the value of one, it runs once more
    with all of them fixed.
    """
    call = _Call(function, args, kwargs, host_static=False)
    hidden = state.hidden_linen(None if lifted else function, call.leaves.static.values())
    if hidden:
        raise state.Unwritable(
            "it captures a linen module whose variables or rngs it may change; fuse the module instead"
        )
    try:
        return call.trace()
    except Exception as error:
        # Needing a value shows in many ways: jax's own errors, but also a dictionary look-up or a format string that a
        # tracer cannot serve, whose messages name its type.
        needs_value = isinstance(error, _NEEDS_VALUE) or "Tracer" in str(error)
        if not needs_value or not has_host_values(call.leaves):
            raise
    return _Call(function, args, kwargs, host_static=True).trace()


class _Call:
    """One call of one function, taken apart."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], host_static: bool):
        self.function = function
        self.leaves: Split = split(args, kwargs, host_static, is_leaf=state.is_object)
        self.captured = state.captured(function)
        passed = [x for x in self.leaves.static.values() if state.is_object(x)]
        objects = list({id(x): x for x in (*self.captured, *passed)}.values())
        self.objects = state.Objects.of(objects)
        self._outcome: Any = None

    def trace(self) -> Traced:
        PLANS.count_trace()
        args, kwargs = self.leaves.outline()
        inner = _named_like(self.function, self._inside)
        try:
            # A fresh function at every call: jax's tracing cache must not keep the user's Python from running.
            traced = jax.make_jaxpr(inner)(self.objects.leaves, args, kwargs)
        except Exception as error:
            _explain_state(error, self.function)
            raise
        self._check_no_stale_read(traced.consts)
        jaxpr, _consts = _compat.open_jaxpr(traced)  # pyright: ignore[reportGeneralTypeIssues]
        jaxpr, hoisted = _compat.hoist_constants(jaxpr)
        values = (*hoisted, *traced.consts, *self.objects.leaves, *self.leaves.dynamic)
        return Traced(jaxpr, values, self._finish)

    def _inside(self, leaves: Any, args: Any, kwargs: Any) -> list[Any]:
        """What is traced: rebuilds arguments and objects, calls the user's function, takes its result apart."""
        copies = self.objects.copies(leaves)
        new = {id(old): copy for old, copy in zip(self.objects.originals, copies, strict=True)}
        tracers = jax.tree.leaves((args, kwargs))
        passed = {id(t): x for t, x in zip(tracers, self.leaves.dynamic, strict=True)}
        args, kwargs = self.leaves.join(tracers)
        if new:
            args, kwargs = jax.tree.map(lambda x: new.get(id(x), x), (args, kwargs), is_leaf=state.is_object)
        originals = self.objects.parts(copies)
        watched: list[tuple[Any, list[Any]]] = []
        result = (state.rebind(self.function, new, watched) if new else self.function)(*args, **kwargs)
        state.check_untouched(watched)
        if inspect.isgenerator(result):
            raise _HiddenResult("a generator computes its values after the call")
        out, tree = jax.tree.flatten(result, is_leaf=lambda x: id(x) in originals)
        # An argument that comes back untouched is the caller's own object.
        fixed = {i: passed[id(x)] for i, x in enumerate(out) if id(x) in passed}
        fixed |= {i: originals.get(id(x), x) for i, x in enumerate(out) if not isinstance(x, jax.Array)}
        arrays = [x for i, x in enumerate(out) if i not in fixed]
        _check_no_leak(fixed[i] for i in fixed if not isinstance(out[i], jax.Array) and id(out[i]) not in originals)
        updates, changes = self.objects.changes(copies, leaves)
        self._outcome = (tree, fixed, changes, len(updates))
        return [*updates, *arrays]

    def _check_no_stale_read(self, constants: Iterable[Any]) -> None:
        """An object that is changed must not also be read where `fuse` did not find it: that read is of old arrays."""
        read = {id(c) for c in constants}
        if any(id(self.objects.leaves[i]) in read for i in self._outcome[2].where):
            raise state.Unwritable("it changes an nnx object that it also reaches in a way fuse cannot follow")

    def _finish(self, values: list[Any]) -> Any:
        tree, fixed, changes, n = self._outcome
        self.objects.write_back(changes, values[:n])
        arrays = iter(values[n:])
        return jax.tree.unflatten(tree, [fixed[i] if i in fixed else next(arrays) for i in range(tree.num_leaves)])


class _HiddenResult(Exception):
    """A result that is no pytree holds arrays: they cannot be taken out of the trace."""


def _check_no_leak(results: Iterable[Any]) -> None:
    for x in results:
        if (
            inspect.isgenerator(x)
            or state.is_object(x)
            or any(map(_compat.is_tracer, getattr(x, "__dict__", {}).values()))
        ):
            raise _HiddenResult(f"a result of type {type(x).__name__} is not a pytree and holds arrays")


def _named_like(function: Any, inner: Callable[..., Any]) -> Callable[..., Any]:
    """A fresh function with the user's name, for jax's messages and profiles."""

    def traced(objects: Any, args: Any, kwargs: Any) -> Any:
        return inner(objects, args, kwargs)

    name = getattr(function, "__name__", type(function).__name__)
    traced.__name__ = traced.__qualname__ = name if isinstance(name, str) else type(function).__name__
    return traced


def _explain_state(error: Exception, function: Any) -> None:
    """Turns nnx's complaint about a hidden module into one that names the remedy."""
    if type(error).__name__ != "TraceContextError":
        return
    name = getattr(function, "__qualname__", repr(function))
    raise FuseError(
        f"{name} changes the state of an nnx object that fuse could not find among its arguments and closures "
        f"({error}). Fuse the module itself, or pass it as an argument"
    ) from error


__all__ = ["FusedFunction", "Traced", "is_traced", "trace_call"]
