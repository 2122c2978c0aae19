"""Structural keys: equal programs get equal keys, whatever objects tracing made them of.

`program_key` numbers variables in order of appearance and takes in everything that can change what is computed:
primitives, parameters, types (shape, dtype, weak type, sharding), literals, contexts, nested programs, and user-written
differentiation rules. It leaves out what cannot: source lines, variable names, and the values
of the program's constants, which are arguments of the rewritten program.

A rule equals another when code, defaults and closed-over values do, since tracing wraps rules in fresh closures and a
user's ``def`` may run again at every call. That holds for closures of constants and functions only: a rule that closes
over something that can change (a list, an array, an object) is never compared, and its program never cached.

Keys are exact (tuples compared by value, not digests), so a collision cannot give a stale program.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from aicf_jax import _compat

_ATOMS = (str, bytes, int, bool, type(None), type, np.dtype, types.CodeType, types.ModuleType)
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy", "functools", "builtins", "aicf_jax")


class Uncacheable(Exception):
    """The program holds something that must not outlive this call or may change until the next (inside a rule)."""


class _ById:
    """Equal only to itself; holds arrays weakly so that a key keeps no buffer alive."""

    def __init__(self, value: Any):
        self._hash = id(value)
        try:
            self._ref = weakref.ref(value)
        except TypeError:
            self._ref = lambda: value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, _ById) and self._ref() is not None and self._ref() is other._ref()


class Keys:
    """Makes keys; remembers those of nested programs so that shared bodies are walked once."""

    def __init__(self) -> None:
        self._jaxprs: dict[int, tuple[Any, Hashable]] = {}
        self._open: list[int] = []
        #: Whether a differentiation rule written outside of jax, flax and optax was met.
        self.user_rules = False

    def program(self, jaxpr: Any, consts: Sequence[Any] = ()) -> Hashable:
        """The key of a jaxpr. `consts` are values of nested constants, which are told apart by identity."""
        memo = self._jaxprs.get(id(jaxpr))
        if memo is None:
            # The jaxpr is kept beside its key: an id is only meaningful while its object lives.
            memo = self._jaxprs[id(jaxpr)] = (jaxpr, _Body(self._jaxpr(jaxpr)))
        return (memo[1], *(self._nested_constant(c) for c in consts)) if consts else memo[1]

    def _nested_constant(self, value: Any) -> Hashable:
        if _compat.is_tracer(value):
            raise Uncacheable("a nested program closes over a tracer")
        return _ById(value)

    def _jaxpr(self, jaxpr: Any) -> Hashable:
        number: dict[Any, int] = {}

        def define(v: Any) -> Hashable:
            number[v] = len(number)
            return v.aval

        def atom(v: Any) -> Hashable:
            return self.literal(v) if isinstance(v, _compat.Literal) else number[v]

        head = tuple(define(v) for v in (*jaxpr.constvars, *jaxpr.invars))
        body = tuple(
            (
                eqn.primitive,
                tuple(atom(v) for v in eqn.invars),
                tuple(define(v) for v in eqn.outvars),
                self.params(eqn.primitive.name, eqn.params),
                eqn.ctx,
            )
            for eqn in jaxpr.eqns
        )
        return head, len(jaxpr.constvars), body, tuple(atom(v) for v in jaxpr.outvars)

    def literal(self, v: Any) -> Hashable:
        value = np.asarray(v.val)
        return v.aval, value.dtype, value.tobytes()

    def params(self, primitive: str, params: dict[str, Any]) -> Hashable:
        """The key of an equation's parameters; custom rules are keyed by the user's functions."""
        if "jvp_jaxpr_fun" in params:
            params = dict(params, jvp_jaxpr_fun=_compat.rule_function(params, "jvp"))
        elif "fwd_jaxpr_thunk" in params:
            # out_trees follows from fwd; tracing makes a fresh function of it each time.
            params = dict(params, fwd_jaxpr_thunk=_compat.rule_function(params, "fwd"), out_trees=None)
        return tuple([(name, self.value(params[name])) for name in sorted(params)])

    def value(self, x: Any) -> Hashable:
        """The key of one parameter: containers by content, programs by structure, functions by code and closure."""
        if isinstance(x, _ATOMS):
            return (type(x), x)
        if isinstance(x, (float, complex)):
            return (type(x), complex(x).real.hex(), complex(x).imag.hex())  # tells -0.0 from 0.0
        if isinstance(x, (tuple, list)):
            return (type(x), *map(self.value, x))
        if isinstance(x, dict):
            return (dict, *((k, self.value(v)) for k, v in sorted(x.items(), key=repr)))
        if isinstance(x, (set, frozenset)):
            return (type(x), frozenset(map(self.value, x)))
        opened = _compat.open_jaxpr(x)
        if opened is not None:
            return self.program(*opened)
        if _compat.is_tracer(x):
            raise Uncacheable("a parameter or differentiation rule closes over a tracer")
        if isinstance(x, (np.ndarray, np.generic)):
            return (x.dtype, x.shape, x.tobytes()) if x.dtype != object else _ById(x)
        if isinstance(x, jax.Array):
            return _ById(x)
        return self._structured(x)

    def _structured(self, x: Any) -> Hashable:
        """Functions and rule objects: equal when their parts are."""
        if id(x) in self._open:  # a rule that refers to its own function
            return ("recursive", self._open.index(id(x)))
        parts = _parts(x)
        if parts is None:
            return self._object(x)
        self._open.append(id(x))
        try:
            if _is_library(x):
                return (type(x), *map(self.value, parts))
            self.user_rules = True
            return (type(x), *map(self._held, parts))
        finally:
            self._open.pop()

    def _held(self, x: Any) -> Hashable:
        """The key of what a user's function holds on to. Raises Uncacheable for what can change."""
        if isinstance(x, tuple):
            return (tuple, *map(self._held, x))
        known = isinstance(x, (*_ATOMS, float, complex)) or _parts(x) is not None or _is_library(x)
        if known and not isinstance(x, (np.ndarray, jax.Array)):
            return self.value(x)
        if _compat.is_tracer(x):
            raise Uncacheable("a differentiation rule closes over a tracer")
        raise Uncacheable(f"a differentiation rule closes over a {type(x).__name__}, which can change")

    def _object(self, x: Any) -> Hashable:
        try:
            hash(x)
        except TypeError:
            return _ById(x)
        return x


def _parts(x: Any) -> tuple[Any, ...] | None:
    """What decides the behaviour of a function-like object, None for objects that are compared as they are."""
    wrapped = _compat.wrapped_parts(x)
    if wrapped is not None:
        return wrapped
    if isinstance(x, functools.partial):
        return (x.func, x.args, x.keywords)
    if isinstance(x, types.MethodType):
        return (x.__func__, x.__self__)
    if isinstance(x, types.FunctionType):
        cells = tuple(_compat.closure_of(x))
        return (x.__code__, id(x.__globals__), x.__defaults__, x.__kwdefaults__, cells)
    return _compat.rule_parts(x)


def _is_library(x: Any) -> bool:
    """Whether a function, or the type of an object, comes from the libraries whose objects do not change."""
    module = getattr(x, "__module__", None) if isinstance(x, types.FunctionType) else type(x).__module__
    return isinstance(module, str) and module.partition(".")[0] in _LIBRARIES and not isinstance(x, (list, dict, set))


class _Body:
    """A key with its hash computed once: nested keys are hashed again by every enclosing one otherwise."""

    __slots__ = ("_hash", "key")

    def __init__(self, key: Hashable):
        self.key, self._hash = key, hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Body) and self._hash == other._hash and self.key == other.key)


def describe(jaxpr: Any) -> tuple[Hashable, bool]:
    """``(key, user_rules)``: the key of a program, and whether it holds rules of the user's own. Raises Uncacheable."""
    keys = Keys()
    return keys.program(jaxpr), keys.user_rules


def program_key(jaxpr: Any) -> Hashable:
    """The structural key of a jaxpr (see the module's docstring).

    Raises:
      Uncacheable: a rule holds a tracer or something that can change; the program must be rewritten anew each time.
    """
    return Keys().program(jaxpr)
