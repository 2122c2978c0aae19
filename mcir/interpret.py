"""Executes a program slowly and obviously: NumPy arrays, Python loops over all blocks. The oracle of `lower_jax`.

A tile is a plain array with the axes of its type, in their order; ragged last blocks are shorter. Element types are
those of the statements; products are added up in float32 or wider.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from mcir._signature import pointwise
from mcir.ir import Axis, Compute, Load, OnlineReduction, Program, Skip, Store, Stream, Tile, Type, Update
from mcir.monoid import Moments, Simple
from mcir.operations import PARAMETERS, POINTWISE, random_bits, shifted_exp
from mcir.visibility import visited

#: Where each axis is at: start and stop.
Ranges = Mapping[str, tuple[int, int]]


def interpret(program: Program, *inputs: Any) -> tuple[np.ndarray, ...]:
    """The outputs of the program, in the order of its buffers.

    Args:
      program: any program that verifies.
      inputs: one array for each input buffer, in order, with the axes of its type. A buffer without axes is passed
        through as it is, so key data of random bits keep their two words.

    Raises TypeError for inputs of another number, shape or element type.
    """
    expected = program.role("input")
    if len(inputs) != len(expected):
        raise TypeError(f"{program.name}: expected {len(expected)} inputs, found {len(inputs)}")
    memory: dict[str, np.ndarray] = {}
    for buffer, value in zip(expected, inputs, strict=True):
        array = np.asarray(value)
        shape = tuple(program.axis(a).size for a in buffer.type.axes)
        if array.dtype != jnp.dtype(buffer.type.dtype) or (shape and array.shape != shape):
            raise TypeError(
                f"{program.name}: expected {buffer.type} of shape {shape} for {buffer.name}, "
                f"found {array.dtype} of shape {array.shape}"
            )
        memory[buffer.name] = array
    for buffer in (*program.role("output"), *program.role("temporary")):
        shape = tuple(program.axis(a).size for a in buffer.type.axes)
        memory[buffer.name] = np.zeros(shape, jnp.dtype(buffer.type.dtype))
    with np.errstate(all="ignore"):
        for nest in program.nests:
            _Nest(program, nest, memory).run()
    return tuple(memory[b.name] for b in program.role("output"))


def blocks(axis: Axis) -> list[tuple[int, int]]:
    """Start and stop of each block; the last may be shorter."""
    return [(start, min(start + axis.block, axis.size)) for start in range(0, axis.size, axis.block)]


def whole(program: Program) -> dict[str, tuple[int, int]]:
    """All of every axis."""
    return {a.name: (0, a.size) for a in program.axes}


class _Nest:
    """One nest at work: `memory` holds the buffers, `env` the tiles on chip."""

    def __init__(self, program: Program, nest: Tile, memory: dict[str, np.ndarray]):
        self.program, self.nest, self.memory = program, nest, memory
        self.axes: dict[str, tuple[str, ...]] = {}
        self.declarations: dict[str, OnlineReduction] = {}
        for s in walk(nest.body):
            if isinstance(s, Load | Compute):
                self.axes[s.result] = s.type.axes
            elif isinstance(s, OnlineReduction):
                self.axes.update(dict.fromkeys(s.results, s.type.axes))
                self.declarations.update(dict.fromkeys(s.results, s))
        self.env: dict[str, Any] = {}
        self.relative_to: dict[str, Any] = {}  # of corrected state: the maximum that it is relative to
        self.ranges = whole(program)

    def run(self) -> None:
        loops = [blocks(self.program.axis(axis)) for axis in self.nest.axes]
        for position in itertools.product(*loops):
            self.env, self.ranges = {}, {**whole(self.program), **dict(zip(self.nest.axes, position, strict=True))}
            self.body(self.nest.body)

    def body(self, body: Sequence[Any]) -> None:
        for s in body:
            match s:
                case Load():
                    self.env[s.result] = self.memory[s.buffer][self.slices(s.type)]
                case Compute():
                    args = [(self.env[name], self.axes[name]) for name in s.args]
                    self.env[s.result] = compute(s, args, self.ranges)
                case OnlineReduction():
                    self.declare(s)
                case Update():
                    self.update(s)
                case Store():
                    self.store(s)
                case Stream():
                    self.stream(s)

    def slices(self, type: Type) -> tuple[slice, ...] | Any:
        return tuple(slice(*self.ranges[axis]) for axis in type.axes) or ...

    def store(self, s: Store) -> None:
        target, at = self.memory[s.buffer], self.slices(self.program.buffer(s.buffer).type)
        target[at] = target[at] + self.env[s.value] if s.accumulate else self.env[s.value]

    # -- online reductions -------------------------------------------------------------------------------------

    def declare(self, s: OnlineReduction) -> None:
        shape, dtype = _shape(s.type.axes, self.ranges), jnp.dtype(s.type.dtype)
        state = Moments().empty(shape, dtype) if s.monoid == "moments" else Simple(s.monoid).empty(shape, dtype)
        self.env.update(zip(s.results, state, strict=True))
        if s.corrected_by is not None:
            self.relative_to[s.results[0]] = self.env[s.corrected_by]

    def update(self, s: Update) -> None:
        d = self.declarations[s.results[0]]
        dtype = jnp.dtype(d.type.dtype)
        args = [(np.asarray(self.env[name]).astype(dtype), self.axes[name]) for name in s.args]
        state = tuple(self.env[name] for name in s.results)
        if d.monoid == "sum":
            tile = _contract(args, d.type.axes, dtype)
            self.env[s.results[0]] = np.asarray(Simple("sum").combine((self.corrected(s, d),), (tile,))[0])
            return
        x, axes = args[0]
        split = _aligned(x, axes, (*d.type.axes, *d.over), self.ranges)
        flat = jnp.asarray(split.reshape(*split.shape[: len(d.type.axes)], -1))
        if flat.shape[-1] == 0:
            return
        monoid = Moments() if d.monoid == "moments" else Simple(d.monoid)
        combined = monoid.combine(state, monoid.lift(flat, flat.ndim - 1))
        self.env.update(zip(s.results, map(np.asarray, combined), strict=True))

    def corrected(self, s: Update, d: OnlineReduction) -> Any:
        """The state of a sum, relative to the present maximum: what `Rescaled.combine` does to its left operand."""
        name = s.results[0]
        if d.corrected_by is None:
            return self.env[name]
        old, new = self.relative_to[name], self.env[d.corrected_by]
        self.relative_to[name] = new
        dtype, axes = jnp.dtype(d.type.dtype), self.axes[d.corrected_by]
        factor = np.asarray(shifted_exp(np.asarray(old).astype(dtype), np.asarray(new).astype(dtype), d.base))
        return np.asarray(self.env[name]) * _aligned(factor, axes, d.type.axes, self.ranges)

    # -- streams -----------------------------------------------------------------------------------------------

    def stream(self, s: Stream) -> None:
        todo = blocks(self.program.axis(s.axis))
        rest: list[tuple[int, int]] = []
        if s.skip is not None and not self.low(s.skip, self.loaded_rows(s.skip)):
            seen = self.visible(s)
            rest = [at for at, visible in zip(todo, seen, strict=True) if not visible]
            todo = [at for at, visible in zip(todo, seen, strict=True) if visible]
        self.visit(s, todo)
        if s.skip is not None and s.skip.rows in self.declarations and self.low(s.skip, self.env[s.skip.rows]):
            self.visit(s, rest)

    def visible(self, s: Stream) -> list[bool]:
        """For each block of the stream, whether it may hold something visible at the position of the loops."""
        axes, blocks_seen = visited(self.program, s)
        index = tuple(self.ranges[a][0] // self.program.axis(a).block for a in axes[:-1])
        return [bool(x) for x in blocks_seen[index]]

    def visit(self, s: Stream, todo: list[tuple[int, int]]) -> None:
        before = self.ranges
        for at in todo:
            self.ranges = {**before, s.axis: at}
            self.body(s.body)
        self.ranges = before

    def loaded_rows(self, skip: Skip) -> Any:
        """The values that forbid skipping beforehand, if any."""
        if skip.rows is None or skip.rows in self.declarations:
            return np.zeros(())[None][:0]
        if skip.rows in self.memory:
            return self.memory[skip.rows][self.slices(self.program.buffer(skip.rows).type)]
        return self.env[skip.rows]

    def low(self, skip: Skip, rows: Any) -> bool:
        """Whether a row's maximum is so near `fill` that weights there do not underflow to zero (or it is NaN)."""
        rows = np.asarray(rows)
        smallest = float(jnp.finfo(rows.dtype).smallest_subnormal)
        exponent = skip.base * (np.float64(skip.fill) - rows.astype(np.float64))
        return bool(np.any(~(exponent <= math.log(smallest))))


# -- single statements -------------------------------------------------------------------------------------------------


def walk(body: Sequence[Any]) -> Iterator[Any]:
    """Every statement, streams before their bodies."""
    for s in body:
        yield s
        if isinstance(s, Stream):
            yield from walk(s.body)


def compute(s: Compute, args: Sequence[tuple[Any, tuple[str, ...]]], ranges: Ranges) -> np.ndarray:
    """One operation on tiles; arguments come with their axes."""
    axes, dtype = s.type.axes, jnp.dtype(s.type.dtype)
    if s.op == "constant":
        return np.asarray(s.param("value"), dtype)
    if s.op == "iota":
        return np.arange(*ranges[s.param("axis")]).astype(dtype)
    if s.op == "bits":
        return np.asarray(random_bits(jnp.asarray(args[0][0]), _flat_positions(s, ranges)))
    if s.op == "dot" or s.op == "reduce_sum":
        return _contract(args, axes, dtype)
    if not pointwise(s):
        x, given = args[0]
        return np.asarray(
            Simple(s.op.removeprefix("reduce_")).lift(x, tuple(given.index(a) for a in s.param("over")))[0]
        ).astype(dtype)
    values = [_aligned(x, given, axes, ranges) for x, given in args]
    if s.op == "shifted_exp":
        x, m = values
        return np.asarray(shifted_exp(x, m, s.param("base", 1.0))).astype(dtype)
    shape = _shape(axes, ranges)
    params = {name: s.param(name) for name in PARAMETERS.get(s.op, ())}
    return np.asarray(POINTWISE[s.op](*(np.broadcast_to(x, shape) for x in values), **params)).astype(dtype)


def _shape(axes: Sequence[str], ranges: Ranges) -> tuple[int, ...]:
    return tuple(ranges[a][1] - ranges[a][0] for a in axes)


def _aligned(x: Any, given: Sequence[str], axes: Sequence[str], ranges: Ranges) -> np.ndarray:
    """`x` with these axes, in this order, of size one where it does not vary."""
    x = np.asarray(x)
    order = [given.index(a) for a in axes if a in given]
    return np.transpose(x, order).reshape([ranges[a][1] - ranges[a][0] if a in given else 1 for a in axes])


def _contract(args: Sequence[tuple[Any, Sequence[str]]], axes: Sequence[str], dtype: Any) -> np.ndarray:
    """The sum of products over all axes but these, added up in float32 or wider."""
    wide = jnp.promote_types(dtype, np.float32) if jnp.issubdtype(dtype, jnp.inexact) else dtype
    numbers = {a: i for i, a in enumerate(dict.fromkeys(a for _, given in args for a in given))}
    operands: list[Any] = []
    for x, given in args:
        operands += [np.asarray(x).astype(wide), [numbers[a] for a in given]]
    return np.einsum(*operands, [numbers[a] for a in axes], optimize=True).astype(dtype)


def _flat_positions(s: Compute, ranges: Ranges) -> np.ndarray:
    """The flat position of each element in an array of the shape that `bits` names."""
    counter, stride = np.zeros([1] * len(s.type.axes), np.uint32), 1
    for size, axis in reversed(list(zip(s.param("shape"), s.param("axes"), strict=True))):
        if axis:
            at = np.arange(*ranges[axis], dtype=np.uint32) * np.uint32(stride)
            counter = counter + _aligned(at, (axis,), s.type.axes, ranges)
        stride *= size
    return np.broadcast_to(counter, _shape(s.type.axes, ranges))
