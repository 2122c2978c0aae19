"""flax nnx objects in a call: found, taken apart into arrays, updated afterwards.

nnx modules are mutable and may share parts. All that a call can reach (arguments, closures, a bound method's object,
globals the function names) are split together, so sharing is kept; the function runs on copies made of traced arrays;
what it changed is written back to the originals.
"""

from __future__ import annotations

import copy
import dataclasses
import dis
import functools
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from aicf_jax import _compat
from aicf_jax.errors import FuseError

_MAX_DEPTH = 4


def is_object(x: Any) -> bool:
    """Whether `x` is a mutable nnx object: a module, Rngs, an optimizer, a Variable.

    Imports nothing: no nnx, no nnx objects. A State is a container of Variables, which are found in it.
    """
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, (nnx.Pytree, nnx.Variable)) and not isinstance(x, nnx.State)


class Unwritable(FuseError):
    """The call does something that cannot be written back from a trace. The function then runs unfused."""


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
        return [
            *(v for _, v in _compat.closure_of(x)),
            *(x.__globals__[n] for n in names),
            x.__defaults__,
            x.__kwdefaults__,
        ]
    if isinstance(x, functools.partial):
        return [x.func, *x.args, *x.keywords.values()]
    if isinstance(x, types.MethodType):
        return [x.__func__, x.__self__]
    if isinstance(x, (list, tuple)) and len(x) <= 64:
        return list(x)
    return list(x.values()) if isinstance(x, dict) and len(x) <= 64 else []


def hidden_linen(function: Any, arguments: Iterable[Any]) -> bool:
    """Whether a call captures a linen module bound to variables it may change, or to rngs it may draw from.

    Such a module writes to scopes outside of the trace. (One bound to fixed variables only reads them.)
    """
    linen = sys.modules.get("flax.linen")
    if linen is None:
        return False
    todo, seen = [(x, 0) for x in (function, *arguments)], set()
    while todo:
        x, depth = todo.pop()
        if id(x) in seen or depth > _MAX_DEPTH:
            continue
        seen.add(id(x))
        if isinstance(x, linen.Module) and x.scope is not None:
            scope = x.scope.root
            if scope.mutable is not False or scope.rngs:
                return True
        todo.extend((part, depth + 1) for part in _held(x))
    return False


def rebind(x: Any, new: dict[int, Any], watched: list[tuple[Any, list[Any]]], depth: int = 0) -> Any:
    """`x` with captured objects exchanged for others; the same object when it holds none of them.

    Containers that had to be copied are added to `watched`, see `check_untouched`.
    """
    if id(x) in new:
        return new[id(x)]
    if depth > _MAX_DEPTH:
        return x

    def inner(part: Any) -> Any:
        return rebind(part, new, watched, depth + 1)

    if isinstance(x, types.FunctionType):
        return _rebind_function(x, new, inner)
    if isinstance(x, functools.partial):
        func, args, kw = map(inner, (x.func, x.args, x.keywords))
        return functools.partial(func, *args, **kw)
    if isinstance(x, types.MethodType):
        return types.MethodType(x.__func__, inner(x.__self__))
    if isinstance(x, (list, tuple, dict)) and len(x) <= 64:
        return _rebind_container(x, inner, watched)
    return x


def _rebind_container(x: Any, inner: Callable[[Any], Any], watched: list[tuple[Any, list[Any]]]) -> Any:
    old = list(x.values()) if isinstance(x, dict) else list(x)
    parts = [inner(p) for p in old]
    if all(a is b for a, b in zip(parts, old, strict=True)):
        return x
    if isinstance(x, tuple):
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    same_kind = copy.copy(x)
    if isinstance(x, dict):
        same_kind.update(zip(x, parts, strict=True))
    else:
        same_kind[:] = parts
    watched.append((same_kind, parts))
    return same_kind


def check_untouched(watched: list[tuple[Any, list[Any]]]) -> None:
    """Raises Unwritable when the call changed a container that stood for one of the user's own."""
    for container, before in watched:
        now = list(container.values()) if isinstance(container, dict) else container
        if len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
            raise Unwritable("it changes a container that also holds an nnx object")


def _rebind_function(f: types.FunctionType, new: dict[int, Any], inner: Callable[[Any], Any]) -> Any:
    cells, changed = [], False
    for cell in f.__closure__ or ():
        try:
            old = cell.cell_contents
        except ValueError:
            cells.append(cell)
            continue
        value = inner(old)
        changed |= value is not old
        cells.append(cell if value is old else types.CellType(value))
    replaced = {n: new[id(v)] for n in f.__code__.co_names if id(v := f.__globals__.get(n)) in new}
    defaults, keywords = inner(f.__defaults__), inner(f.__kwdefaults__)
    if not (changed or replaced or defaults is not f.__defaults__ or keywords is not f.__kwdefaults__):
        return f
    if _writes_outside(f):
        raise Unwritable(f"{f.__qualname__} assigns to global or nonlocal names and captures an nnx object")
    scope = {**f.__globals__, **replaced} if replaced else f.__globals__
    bound = types.FunctionType(f.__code__, scope, f.__name__, defaults, tuple(cells))
    bound.__kwdefaults__ = keywords
    return functools.update_wrapper(bound, f)


def _writes_outside(f: types.FunctionType) -> bool:
    """Whether a function assigns to names that live outside of it: a copy with other cells would lose that."""
    return any(
        i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
        or (i.opname in ("STORE_DEREF", "DELETE_DEREF") and i.argval in f.__code__.co_freevars)
        for i in dis.get_instructions(f)
    )


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

    def parts(self, copies: tuple[Any, ...]) -> dict[int, Any]:
        """``id`` of each module or Variable among the copies -> the original it stands for."""
        if not self.originals:
            return {}
        from flax import nnx

        pairs = zip(nnx.iter_graph(self.originals), nnx.iter_graph(copies), strict=True)
        return {id(new): old for (_, old), (_, new) in pairs if is_object(old)}

    def changes(self, copies: tuple[Any, ...], leaves: Sequence[Any]) -> tuple[list[Any], Changes]:
        """What a call did to its copies: new arrays, and how to write them back."""
        if not self.originals:
            return [], Changes(())
        from flax import nnx

        graphdef, state = nnx.split(copies)
        after, tree = jax.tree.flatten(state)
        if graphdef != self.graphdef or tree != self.tree:
            raise Unwritable("the call adds, removes or exchanges parts of an nnx object, or sets a static attribute")
        where = tuple(i for i, (a, b) in enumerate(zip(after, leaves, strict=True)) if a is not b)
        return [after[i] for i in where], Changes(where)

    def write_back(self, changes: Changes, values: Sequence[Any]) -> None:
        """Gives the originals what the call changed; arrays it left alone are not touched."""
        if not changes.where:
            return
        from flax import errors, nnx

        leaves = list(self.leaves)
        for i, v in zip(changes.where, values, strict=True):
            leaves[i] = v
        try:
            nnx.update(self.originals, jax.tree.unflatten(self.tree, leaves))
        except errors.TraceContextError as error:
            raise FuseError(
                "the function changes the state of an nnx object that was made outside of the transformation it runs "
                "in; pass the object as an argument of the transformed function, or use nnx.jit, nnx.grad, ..."
            ) from error


@dataclasses.dataclass(frozen=True)
class Changes:
    """`where`: positions of changed arrays."""

    where: tuple[int, ...]
