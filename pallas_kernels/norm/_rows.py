"""Rows in registers: what forward and backward share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _compat, _mosaic
from pallas_kernels.norm.config import NormConfig, Segment, segments


class Rows:
    """A group of rows over the threads of one block, in segments of columns; statistics have one value a row.

    In memory arrays are ``(groups, length)`` where one row is over all threads, else ``(groups, rows, length)``.
    """

    def __init__(self, config: NormConfig, length: int, vector: int, simulated: bool) -> None:
        self.gpu = _mosaic.mosaic().gpu
        self.config, self.simulated = config, simulated
        self.length = length
        self.segments = segments(length, config.threads, vector)
        self.single = config.rows == 1

    # -- shapes and layouts ----------------------------------------------------------------------------

    def grouped(self, x: Any) -> Any:
        """An array ``(count, ...)`` as it lies in memory here."""
        return x if self.single else x.reshape(x.shape[0] // self.config.rows, self.config.rows, *x.shape[1:])

    def struct(self, count: int, width: int, dtype: Any) -> jax.ShapeDtypeStruct:
        """An array ``(count, width)``, or for a width of 0 one value a row."""
        tail = (width,) if width else ()
        return jax.eval_shape(self.grouped, jax.ShapeDtypeStruct((count, *tail), dtype))

    def _shape(self, segment: Segment) -> tuple[int, ...]:
        return (segment.width,) if self.single else (self.config.rows, segment.width)

    def _layout(self, segment: Segment) -> Any:
        """The threads of a row side by side, `vector` elements each."""
        v, n = segment.vector, self.config.threads
        tiles = ((n * v,), (32 * v,), (v,)) if self.single else ((self.config.rows, n * v), (v,))
        tiling = self.gpu.Tiling(tiles)
        return self.gpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)

    def _row_layout(self, segment: Segment) -> Any:
        """Of one row that each row of a group is put beside."""
        return self._layout(segment) if self.single else self._layout(segment).reduce(0)

    def _placed(self, x: Any, segment: Segment) -> Any:
        return x if self.simulated else self.gpu.layout_cast(x, self._layout(segment))

    # -- memory ------------------------------------------------------------------------------------------

    def _at(self, ref: Any, group: Any, segment: Segment) -> Any:
        """The segment of a group; `group` is None in an array of one."""
        columns = slice(segment.start, segment.start + segment.width)
        where = (columns,) if self.single else (slice(None), columns)
        return ref.at[where] if group is None else ref.at[(group, *where)]

    def load(self, ref: Any, group: Any) -> tuple[Any, ...]:
        """A group of rows as it is stored."""
        return tuple(_compat.load(self._at(ref, group, s), self._layout(s), self.simulated) for s in self.segments)

    def store(self, ref: Any, group: Any, values: Sequence[Any]) -> None:
        for segment, value in zip(self.segments, values, strict=True):
            _compat.store(self._at(ref, group, segment), value.astype(ref.dtype), self.simulated)

    def load_parameter(self, ref: Any) -> tuple[Any, ...]:
        """An array ``(length,)`` in float32, beside each row."""
        found = []
        for s in self.segments:
            where = ref.at[s.start : s.start + s.width]
            value = _compat.load(where, self._row_layout(s), self.simulated).astype(jnp.float32)
            if not self.single:
                value = self._placed(lax.broadcast_in_dim(value, self._shape(s), (1,)), s)
            found.append(value)
        return tuple(found)

    def load_statistic(self, ref: Any, group: Any) -> Any:
        if self.single:
            return ref[group]
        return _compat.load(ref.at[group], self._layout(self.segments[0]).reduce(1), self.simulated)

    def store_statistic(self, ref: Any, group: Any, value: Any) -> None:
        if self.single:
            ref[group] = value
        else:
            _compat.store(ref.at[group], value, self.simulated)

    def held(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """The same values, of which the compiler does not know that they are."""
        pairs = zip(values, self.segments, strict=True)
        return tuple(lax.optimization_barrier(v) if s.vector > 1 else v for v, s in pairs)

    # -- arithmetic --------------------------------------------------------------------------------------

    def zeros(self) -> tuple[Any, ...]:
        return tuple(self._placed(jnp.zeros(self._shape(s), jnp.float32), s) for s in self.segments)

    def beside(self, statistic: Any) -> tuple[Any, ...]:
        """One value a row, beside each element of it."""
        if self.single:
            return (statistic,) * len(self.segments)
        return tuple(self._placed(lax.broadcast_in_dim(statistic, self._shape(s), (0,)), s) for s in self.segments)

    def over_rows(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """The sum over the rows of a group, ``(width,)`` for each segment."""
        return tuple(values) if self.single else tuple(jnp.sum(v, axis=0) for v in values)

    def zero_row(self) -> tuple[Any, ...]:
        found = (jnp.zeros((s.width,), jnp.float32) for s in self.segments)
        return tuple(
            v if self.simulated else self.gpu.layout_cast(v, self._row_layout(s))
            for v, s in zip(found, self.segments, strict=True)
        )

    def store_row(self, ref: Any, index: Any, values: Sequence[Any]) -> None:
        """One row of an array ``(count, ...)``."""
        for s, value in zip(self.segments, values, strict=True):
            _compat.store(ref.at[index, s.start : s.start + s.width], value, self.simulated)

    def mean(self, values: Sequence[Any]) -> Any:
        """Of each row: the elements of a thread in order, then pairs of threads."""
        parts = [jnp.sum(self._counted(v, s), axis=-1) for v, s in zip(values, self.segments, strict=True)]
        return sum(parts[1:], start=parts[0]) * (1.0 / self.length)

    def _counted(self, value: Any, segment: Segment) -> Any:
        if segment.is_whole:
            return value
        shape = self._shape(segment)
        column = self._placed(lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1), segment)
        inside = column >= segment.first if segment.first else column < segment.last
        return jnp.where(inside, value, 0.0)


def each(f: Any, *values: Sequence[Any]) -> tuple[Any, ...]:
    """A function of the segments of some rows."""
    return tuple(f(*v) for v in zip(*values, strict=True))


def wide(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(v.astype(jnp.float32) for v in values)


def added(here: dict[str, Any]) -> tuple[Any, ...]:
    """``x + residual``, rounded to their type as an addition would; x where nothing is added."""
    if "residual" not in here:
        return here["x"]
    terms = zip(here["x"], here["residual"], strict=True)
    return tuple((a.astype(jnp.float32) + b.astype(jnp.float32)).astype(a.dtype) for a, b in terms)


def loop(config: NormConfig, groups: int, load: Any, step: Any, carry: Any = ()) -> Any:
    """``carry = step(group, load(group), carry)`` for each group of the block this runs in.

    Unless ``config.lean`` the next group is read before this one is worked on.
    """
    block, stride = lax.axis_index("block"), jnp.int32(config.blocks)
    rounds = lax.div(groups - block + (config.blocks - 1), stride)
    if config.lean:
        return lax.fori_loop(0, rounds, lambda k, c: step(block + k * stride, load(block + k * stride), c), carry)

    def ahead(k: Any, state: Any) -> Any:
        here, carry = state
        group = block + k * stride
        following = load(lax.min(group + stride, jnp.int32(groups - 1)))
        return following, step(group, here, carry)

    return lax.fori_loop(0, rounds, ahead, (load(block), carry))[1]


def launch(
    body: Any, blocks: int, inputs: dict[str, Any], out: dict[str, Any], interpret: Any, scratch: dict[str, Any]
) -> dict[str, Any]:
    """Results, by name, of a kernel of `blocks` blocks of one warpgroup; ``body`` takes all references by name."""
    gpu = _mosaic.mosaic().gpu
    names = [*inputs, *out, *scratch]

    def kernel(*refs: Any) -> None:
        body(dict(zip(names, refs, strict=True)))

    kernel.__name__ = body.__name__
    found = gpu.kernel(
        kernel,
        out_type=list(out.values()),
        scratch_types=list(scratch.values()),
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=gpu.CompilerParams(lowering_semantics=gpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(*inputs.values())
    return dict(zip(out, found, strict=True))


def widened(arrays: dict[str, Any], length: int, width: int) -> dict[str, Any]:
    """Arrays whose last dimension is `length`, padded to `width`."""
    if width == length:
        return arrays
    return {name: jnp.pad(a, ((0, 0),) * (a.ndim - 1) + ((0, width - length),)) for name, a in arrays.items()}


def present(**arrays: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: a for name, a in arrays.items() if a is not None}
