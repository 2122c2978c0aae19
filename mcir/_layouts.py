"""Between arrays of the outside and buffers, where a program runs as lax loops: the order of axes, whole blocks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mcir.derive import Derived
from mcir.graph import View
from mcir.ir import Buffer, Load, Program, Store, Stream

Axes = tuple[str, ...]


def layouts(derived: Derived) -> dict[str, Axes]:
    """Input or output -> the order of its axes, that of the array outside wherever tiles alone can be transposed.

    A tile is copied out of its array in any case, and into it; that copy may as well exchange axes. To bring the whole
    array into the program's order is one more pass over memory, and another array. What is read or written whole keeps
    the program's order, since within a loop it would be transposed again and again, as does what varies fastest along
    another axis, since to turn that takes longer than to copy it.
    """
    program = derived.program
    outside = {b.name: view for b, (_, view) in zip(program.role("input"), derived.arguments, strict=True)}
    outside |= {name: view for name, view in derived.results if name not in outside}
    return {b.name: _order(program, b, outside.get(b.name)) for b in program.buffers}


def _order(program: Program, buffer: Buffer, view: View | None) -> Axes:
    axes = buffer.type.axes
    if view is None or not _by_tiles(program, buffer):
        return axes
    order = tuple(a for dim in view.dims for a in dim if a in axes)
    return order if order[-1:] == axes[-1:] and len(order) == len(axes) else axes


def _by_tiles(program: Program, buffer: Buffer) -> bool:
    """Whether each load and store of a buffer takes a part of it, and nothing asks for all of it."""
    for loops, s in program.statements():
        if isinstance(s, Load | Store) and s.buffer == buffer.name:
            cut = [program.axis(a) for a in buffer.type.axes if a in loops]
            if all(a.count == 1 for a in cut):
                return False
        if isinstance(s, Stream) and s.skip is not None and s.skip.rows == buffer.name:
            return False
    return True


def to_axes(array: Any, view: View, program: Program, axes: Axes) -> Any:
    """An argument with one dimension for each of these axes."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(array)
    flat = [a for dim in view.dims for a in dim]
    if view.place is not None:
        starts, strides = view.place.starts, view.place.strides
        limits = [s + t * (n - 1) + 1 for s, t, n in zip(starts, strides, view.shape, strict=True)]
        array = jax.lax.slice(array, starts, limits, strides)
    array = array.reshape([program.axis(a).size for a in flat])
    return array.transpose([flat.index(a) for a in axes])


def from_axes(array: Any, view: View, program: Program, axes: Axes) -> Any:
    """A result in its own layout; along axes that its value does not vary along it is repeated."""
    flat = [a for dim in view.dims for a in dim]
    have = [a for a in flat if a in axes]
    array = array.transpose([axes.index(a) for a in have])
    sizes = [program.axis(a).size for a in flat]
    if have != flat:
        array = jax.lax.broadcast_in_dim(array, sizes, [flat.index(a) for a in have])
    array = array.reshape(view.shape)
    if view.place is None:
        return array
    config = [
        (start, whole - (start + stride * (n - 1) + 1), stride - 1)
        for n, whole, start, stride in zip(
            view.shape, view.place.whole, view.place.starts, view.place.strides, strict=True
        )
    ]
    return jax.lax.pad(array, jnp.zeros((), array.dtype), config)


def padded(array: Any, axes: Axes, program: Program) -> Any:
    """Zeros up to whole blocks; reductions leave them out."""
    if array.ndim != len(axes):
        return array  # the two words of a key
    widths = [(0, a.count * a.block - a.size) for a in map(program.axis, axes)]
    return jnp.pad(array, widths) if any(w for _, w in widths) else array


def cut(array: Any, axes: Axes, program: Program) -> Any:
    """The elements of an array that `padded` brought to whole blocks, or that loops wrote as such."""
    sizes = [program.axis(a).size for a in axes]
    return array if list(array.shape) == sizes else array[tuple(slice(0, n) for n in sizes)]
