"""flax nnx objects in a call: found, taken apart into arrays, updated afterwards.

nnx modules are mutable and may share parts. All that a call can reach (arguments, closures, a bound method's object,
globals the function names) are split together, so sharing is kept; the function runs on copies made of traced arrays;
what it changed is written back to the originals.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from collections.abc import Sequence
from typing import Any

import jax

from aicf_jax import _compat
from aicf_jax.errors import FuseError

_MAX_DEPTH = 4


def is_object(x: Any) -> bool:
    """Whether `x` is a mutable nnx object (module, Rngs, optimizer, ...). Imports nothing: no nnx, no nnx objects."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Pytree) and not isinstance(x, nnx.State)


def captured(function: Any) -> list[Any]:
    """Mutable nnx objects a function holds on to, each once, in a fixed order."""
    found: dict[int, Any] = {}
    _walk(function, found, 0, set())
    return list(found.values())


def _walk(x: Any, found: dict[int, Any], depth: int, seen: set[int]) -> None:
    if is_object(x):
        found.setdefault(id(x), x)
        return
    if depth > _MAX_DEPTH or id(x) in seen:
        return
    seen.add(id(x))
    for part in _held(x):
        _walk(part, found, depth + 1, seen)


def _held(x: Any) -> list[Any]:
    if isinstance(x, types.FunctionType):
        names = [n for n in x.__code__.co_names if is_object(x.__globals__.get(n))]
        return [*(v for _, v in _compat.closure_of(x)), *(x.__globals__[n] for n in names), *(x.__defaults__ or ())]
    if isinstance(x, functools.partial):
        return [x.func, *x.args, *x.keywords.values()]
    if isinstance(x, types.MethodType):
        return [x.__func__, x.__self__]
    if isinstance(x, (list, tuple)) and len(x) <= 64:
        return list(x)
    return list(x.values()) if isinstance(x, dict) and len(x) <= 64 else []


def rebind(x: Any, new: dict[int, Any], depth: int = 0) -> Any:
    """`x` with captured objects exchanged for others; the same object when it holds none of them."""
    if id(x) in new:
        return new[id(x)]
    if depth > _MAX_DEPTH:
        return x
    if isinstance(x, types.FunctionType):
        return _rebind_function(x, new, depth)
    if isinstance(x, functools.partial):
        func, args, kw = (rebind(p, new, depth + 1) for p in (x.func, x.args, x.keywords))
        return functools.partial(func, *args, **kw)
    if isinstance(x, types.MethodType):
        return types.MethodType(x.__func__, rebind(x.__self__, new, depth + 1))
    if isinstance(x, (list, tuple)) and len(x) <= 64:
        parts = [rebind(p, new, depth + 1) for p in x]
        if all(a is b for a, b in zip(parts, x, strict=True)):
            return x
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    if isinstance(x, dict) and len(x) <= 64:
        parts = {k: rebind(v, new, depth + 1) for k, v in x.items()}
        return x if all(parts[k] is x[k] for k in x) else parts
    return x


def _rebind_function(f: types.FunctionType, new: dict[int, Any], depth: int) -> Any:
    cells, changed = [], False
    for cell in f.__closure__ or ():
        try:
            old = cell.cell_contents
        except ValueError:
            cells.append(cell)
            continue
        value = rebind(old, new, depth + 1)
        changed |= value is not old
        cells.append(cell if value is old else types.CellType(value))
    replaced = {n: new[id(v)] for n in f.__code__.co_names if id(v := f.__globals__.get(n)) in new}
    if not changed and not replaced:
        return f
    scope = {**f.__globals__, **replaced} if replaced else f.__globals__
    copy = types.FunctionType(f.__code__, scope, f.__name__, rebind(f.__defaults__, new, depth + 1), tuple(cells))
    copy.__kwdefaults__ = f.__kwdefaults__
    return functools.update_wrapper(copy, f)


@dataclasses.dataclass(frozen=True)
class Objects:
    """nnx objects of one call, split into arrays."""

    originals: tuple[Any, ...]
    graphdef: Any
    leaves: tuple[Any, ...]
    tree: Any

    @staticmethod
    def of(objects: Sequence[Any]) -> Objects:
        """Takes the objects apart together, so that what they share stays shared."""
        if not objects:
            return Objects((), None, (), None)
        from flax import nnx

        graphdef, state = nnx.split(tuple(objects))
        leaves, tree = jax.tree.flatten(state)
        return Objects(tuple(objects), graphdef, tuple(leaves), tree)

    def copies(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Objects of the same types and sharing, made of other arrays."""
        if not self.originals:
            return ()
        from flax import nnx

        return nnx.merge(self.graphdef, jax.tree.unflatten(self.tree, leaves))

    def changes(self, copies: tuple[Any, ...], leaves: Sequence[Any]) -> tuple[list[Any], Changes]:
        """What a call did to its copies: new arrays, and how to write them back."""
        if not self.originals:
            return [], Changes((), None)
        from flax import nnx

        after, tree = jax.tree.flatten(nnx.split(copies)[1])
        if tree != self.tree:
            return after, Changes(None, tree)
        where = tuple(i for i, (a, b) in enumerate(zip(after, leaves, strict=True)) if a is not b)
        return [after[i] for i in where], Changes(where, tree)

    def write_back(self, changes: Changes, values: Sequence[Any]) -> None:
        """Gives the originals what the call changed; arrays it left alone are not touched."""
        if not values and changes.where == ():
            return
        from flax import errors, nnx

        leaves = list(values)
        if changes.where is not None:
            leaves = list(self.leaves)
            for i, v in zip(changes.where, values, strict=True):
                leaves[i] = v
        try:
            nnx.update(self.originals, jax.tree.unflatten(changes.tree, leaves))
        except errors.TraceContextError as error:
            raise FuseError(
                "the function changes the state of an nnx object that was made outside of the transformation it runs "
                "in; pass the object as an argument of the transformed function, or use nnx.jit, nnx.grad, ..."
            ) from error


@dataclasses.dataclass(frozen=True)
class Changes:
    """`where`: positions of changed arrays, None when the structure itself changed; `tree`: structure afterwards."""

    where: tuple[int, ...] | None
    tree: Any
