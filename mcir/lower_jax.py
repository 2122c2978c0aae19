"""Runs a memory flow program as lax loops.

Tiles become one loop over all blocks of the tiled axes, streams a loop inside it with the running state as its carry,
buffers in memory arrays that the loops update in place. Within a tile every value is an array whose dimensions are its
axes in the program's order; XLA compiles what stands between loads and stores.

The loops are for running, not for differentiating: reverse mode through them would keep every tile's state, which is
the memory that streaming saves. Derivatives are programs of their own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from mcir._bounds import Bounds
from mcir._layouts import Axes, cut, from_axes, layouts, padded, to_axes
from mcir._tiles import Env, Scope, Tiles, flat
from mcir.derive import Derived
from mcir.ir import Axis, Compute, Load, OnlineReduction, Program, Store, Stream, Tile, Update
from mcir.monoid import Moments
from mcir.operations import empty_value, never, shifted_exp
from mcir.visibility import block_visibility, needs_all

#: In the environment: whether all numbers in memory are known to be finite.
_FINITE = "all finite"


def lower(derived: Derived) -> Callable[..., tuple[Any, ...]]:
    """A function of the arrays that the original function takes, in their own layout, giving its results."""
    orders = layouts(derived)
    program = lower_program(derived.program, orders)

    def run(*arguments: Any) -> tuple[Any, ...]:
        inputs = [
            to_axes(arguments[k], view, derived.program, orders[buffer.name])
            for (k, view), buffer in zip(derived.arguments, derived.program.role("input"), strict=True)
        ]
        found = dict(zip((b.name for b in derived.program.role("output")), program(*inputs), strict=True))
        return tuple(from_axes(found[name], view, derived.program, orders[name]) for name, view in derived.results)

    return run


def lower_program(
    program: Program, orders: Mapping[str, Axes] = MappingProxyType({})
) -> Callable[..., tuple[Any, ...]]:
    """A function from the program's inputs to its outputs: arrays whose dimensions are the axes of their types.

    Args:
      program: one that verifies.
      orders: buffer -> the order of its axes in memory, of those that do not have the order of their type.
    """
    axes = {b.name: orders.get(b.name, b.type.axes) for b in program.buffers}
    runs = [_Nest(program, nest, axes) for nest in program.nests]
    skipping = any(isinstance(s, Stream) and s.skip is not None for _, s in program.statements())

    def run(*inputs: Any) -> tuple[Any, ...]:
        memory: Env = {}
        for buffer, array in zip(program.role("input"), inputs, strict=True):
            memory[buffer.name] = padded(array, axes[buffer.name], program)
        if skipping:
            arrays = [memory[b.name] for b in program.role("input")]
            finite = [_is_finite(x) for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
            memory[_FINITE] = jnp.stack(finite).all() if finite else jnp.bool_(True)
        for nest in runs:
            nest(memory)
        return tuple(cut(memory[b.name], axes[b.name], program) for b in program.role("output"))

    return run


def _is_finite(x: Any) -> Any:
    """Whether all numbers are finite, by their sum, which is one pass: false too where only the sum overflows."""
    return jnp.isfinite(jnp.sum(x, dtype=jnp.promote_types(x.dtype, "float32")))


# -- one nest -----------------------------------------------------------------------------------------------------


class _Nest(Tiles):
    """Attributes: order: buffer -> its axes as they lie in memory."""

    def __init__(self, program: Program, nest: Tile, order: Mapping[str, Axes]):
        super().__init__(program, nest)
        self.order = order
        self.loops = [self.axes[a] for a in nest.axes]
        stored = [s for s in flat(nest.body) if isinstance(s, Store)]
        self.stored = list(dict.fromkeys(s.buffer for s in stored))

    def __call__(self, memory: Env) -> None:
        for name in self.stored:
            buffer = self.program.buffer(name)
            shape = [a.count * a.block for a in map(self.program.axis, self.order[name])]
            memory[name] = jnp.full(shape, self._zero(memory).astype(buffer.type.dtype))
        counts = [a.count for a in self.loops]

        def body(step: Any, buffers: tuple[Any, ...]) -> tuple[Any, ...]:
            view = {**memory, **dict(zip(self.stored, buffers, strict=True))}
            scope = Scope({}, self._position(step, counts))
            for statement in self.nest.body:
                self._statement(statement, scope, view)
            return tuple(view[name] for name in self.stored)

        buffers = tuple(memory[name] for name in self.stored)
        total = math.prod(counts)
        buffers = body(0, buffers) if total == 1 else jax.lax.fori_loop(0, total, body, buffers)
        memory.update(zip(self.stored, buffers, strict=True))

    def _zero(self, memory: Env) -> Any:
        """False, but not to the compiler: it would fill the buffers of all loops when the program starts."""
        for b in reversed(self.program.role("input")):
            x = memory[b.name]
            if jnp.issubdtype(x.dtype, jnp.floating) and x.size:
                return never(x)
        return jnp.bool_(False)

    def _position(self, step: Any, counts: Sequence[int]) -> Env:
        position: Env = {}
        for axis, count in reversed(list(zip(self.loops, counts, strict=True))):
            position[axis.name] = 0 if count == 1 else step % count
            step = step if count == 1 else step // count
        return position

    # -- statements -------------------------------------------------------------------------------------------
    def _statement(self, s: Any, scope: Scope, memory: Env) -> None:
        if isinstance(s, Load):
            scope.values[s.result] = self._load(memory[s.buffer], s, scope.position)
        elif isinstance(s, Compute):
            scope.values[s.result] = self._compute(s, scope)
        elif isinstance(s, OnlineReduction):
            self._declare(s, scope)
        elif isinstance(s, Store):
            self._store(s, scope, memory)
        elif isinstance(s, Stream):
            self._stream(s, scope, memory)
        else:
            raise TypeError(f"{type(s).__name__} outside of a stream")

    def _load(self, array: Any, s: Load, position: Env) -> Any:
        if array.ndim != len(s.type.axes):
            return array
        order = self.order[s.buffer]
        sizes = [self.axes[a].block if a in position else self.axes[a].size for a in order]
        if list(array.shape) != sizes:
            array = jax.lax.dynamic_slice(array, self._starts(order, position), sizes)
        return array.transpose([order.index(a) for a in s.type.axes])

    def _starts(self, axes: Sequence[str], position: Env) -> list[Any]:
        """Where a tile begins. In one type: with 64-bit types enabled, loops count in several."""
        return [jnp.int32(position[a] * self.axes[a].block if a in position else 0) for a in axes]

    def _store(self, s: Store, scope: Scope, memory: Env) -> None:
        buffer, array = self.program.buffer(s.buffer), memory[s.buffer]
        order = self.order[s.buffer]
        starts = self._starts(order, scope.position)
        value = scope.values[s.value].astype(buffer.type.dtype)
        value = value.transpose([buffer.type.axes.index(a) for a in order])
        if s.accumulate:
            value = value + jax.lax.dynamic_slice(array, starts, value.shape)
        memory[s.buffer] = value if array.shape == value.shape else jax.lax.dynamic_update_slice(array, value, starts)

    def _declare(self, s: OnlineReduction, scope: Scope) -> None:
        shape = [self._extent(a, scope) for a in s.type.axes]
        for name in s.results:
            empty = empty_value("sum" if s.monoid == "moments" else s.monoid, s.type.dtype)
            scope.values[name] = jnp.full(shape, empty)

    # -- streams ----------------------------------------------------------------------------------------------
    def _stream(self, stream: Stream, scope: Scope, memory: Env) -> None:
        reductions = {n: d for d in self.nest.body if isinstance(d, OnlineReduction) for n in d.results}
        states = [n for s in stream.body if isinstance(s, Update) for n in s.results]
        stored = list(dict.fromkeys(s.buffer for s in stream.body if isinstance(s, Store)))
        axis = self.axes[stream.axis]
        turned = self._turned(stream.body, scope.values) if axis.count > 1 else {}

        def body(unmasked: bool, step: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            inner = Scope({**scope.values, **dict(zip(states, carry, strict=False))}, dict(scope.position), turned)
            inner.position[stream.axis] = step
            known = {stream.skip.predicate: jnp.asarray(stream.skip.visible)} if unmasked and stream.skip else {}
            view = {**memory, **dict(zip(stored, carry[len(states) :], strict=True))}
            before = dict(inner.values)
            corrections: dict[tuple[str, float], Any] = {}
            for s in stream.body:
                if isinstance(s, Update):
                    self._update(s, reductions, inner, before, corrections)
                elif isinstance(s, Compute) and s.result in known:
                    shape = [self._extent(a, inner) for a in s.type.axes]
                    inner.values[s.result] = jnp.broadcast_to(known[s.result], shape)
                else:
                    self._statement(s, inner, view)
            return (*(inner.values[n] for n in states), *(view[n] for n in stored))

        carry = (*(scope.values[n] for n in states), *(memory[n] for n in stored))
        if axis.count == 1:
            carry = body(False, 0, carry)
        else:
            carry = self._walk(stream, axis, scope, memory, body, carry, states)
        scope.values.update(zip(states, carry, strict=False))
        memory.update(zip(stored, carry[len(states) :], strict=True))

    def _walk(
        self, stream: Stream, axis: Axis, scope: Scope, memory: Env, body: Any, carry: Any, states: list[str]
    ) -> Any:
        """All blocks, or those that may be visible: the others only where rows are so low that hidden scores count."""
        found, skip = block_visibility(self.program, stream), stream.skip
        if found is None or skip is None or bool(found[1].all()):
            return jax.lax.fori_loop(0, axis.count, functools.partial(body, False), carry)
        # A hidden block adds 0 times something: nothing, unless that is NaN or infinite.
        finite = memory[_FINITE]
        bounds = Bounds(found, scope.position, not any(isinstance(s, Store) for s in stream.body))
        low, high = jnp.where(finite, bounds.low, 0), jnp.where(finite, bounds.high, axis.count)
        if skip.rows is None:
            return bounds.walk(low, high, body, carry)
        if skip.rows in states:
            carry = bounds.walk(low, high, body, carry)
            declared = next(d for d in self.nest.body if isinstance(d, OnlineReduction) and skip.rows in d.results)
            rest = needs_all(skip, dict(zip(states, carry, strict=False))[skip.rows], declared.type.dtype)
            masked = functools.partial(body, False)
            carry = jax.lax.fori_loop(jnp.where(rest, high, axis.count), axis.count, masked, carry)
            return jax.lax.fori_loop(0, jnp.where(rest, low, 0), masked, carry)
        buffer = self.program.buffer(skip.rows)
        rest = needs_all(skip, cut(memory[skip.rows], self.order[skip.rows], self.program), buffer.type.dtype)
        return bounds.walk(jnp.where(rest, 0, low), jnp.where(rest, axis.count, high), body, carry)

    def _update(self, s: Update, reductions: Env, scope: Scope, before: Env, corrections: Any) -> None:
        declared: OnlineReduction = reductions[s.results[0]]
        valid = self._valid(declared.over, scope)
        if declared.monoid == "moments":
            self._update_moments(s, declared, scope, valid)
            return
        (name,) = s.results
        share = self._share(s, declared, scope, valid)
        old = scope.values[name]
        if declared.monoid != "sum":
            scope.values[name] = (jnp.maximum if declared.monoid == "max" else jnp.minimum)(old, share)
            return
        if declared.corrected_by is not None:
            m = declared.corrected_by
            key = (m, declared.base)
            if key not in corrections:
                corrections[key] = shifted_exp(before[m], scope.values[m], declared.base)
            m_axes = reductions[m].type.axes
            old = old * self._aligned(corrections[key], m_axes, declared.type.axes)
        scope.values[name] = old + share

    def _share(self, s: Update, declared: OnlineReduction, scope: Scope, valid: Any) -> Any:
        """The tile's own part of a reduction."""
        types = [self.types[a] for a in s.args]
        args = [scope.values[a] for a in s.args]
        dtype = declared.type.dtype
        if valid is not None:
            empty = "sum" if declared.monoid == "sum" else declared.monoid
            args = [
                x if not set(t.axes) & set(valid) else self._masked(x, t, valid, empty)
                for x, t in zip(args, types, strict=True)
            ]
        if len(args) == 2:
            return self._dot(args, types, declared.type, None)
        if declared.monoid == "sum" and valid is None:
            picked = self._picked(s.args[0], declared.type, scope)
            if picked is not None:
                return picked
        return self._reduce(declared.monoid, args[0], types[0], declared.type.axes, dtype)

    def _update_moments(self, s: Update, declared: OnlineReduction, scope: Scope, valid: Any) -> None:
        x, type_ = scope.values[s.args[0]], self.types[s.args[0]]
        over = [type_.axes.index(a) for a in declared.over]
        mask = None
        if valid is not None:
            mask = jnp.ones((), bool)
            for axis, inside in valid.items():
                if axis in type_.axes:
                    mask = mask & self._aligned(inside, (axis,), type_.axes)
        moments = Moments()
        # Moments.lift takes one axis: fold several into the last one
        keep = [k for k in range(x.ndim) if k not in over]
        folded = x.transpose(*keep, *over).reshape([x.shape[k] for k in keep] + [-1])
        if mask is not None:
            mask = jnp.broadcast_to(mask, x.shape).transpose(*keep, *over).reshape(folded.shape)
        state = tuple(scope.values[n] for n in s.results)
        new = moments.combine(state, moments.lift(folded.astype(declared.type.dtype), -1, mask))
        scope.values.update(zip(s.results, new, strict=True))
