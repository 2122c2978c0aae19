"""Arrays beside the scores of attention: masks, segment ids and biases that are data of the program.

A kernel reads them as they are, or as what the program's own equations make of smaller arrays: `computed`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aicf_jax.ops._position_band import Unidentified
from mcir.operations import POINTWISE


@dataclasses.dataclass(frozen=True)
class Side:
    """An array beside the scores: a value of the operation's graph, along some of the scores' axes.

    `whole`: it is an argument of the operation as it stands, and nothing has to be computed.
    """

    value: int
    axes: tuple[str, ...]
    dtype: str
    whole: bool


@dataclasses.dataclass(frozen=True)
class Mask:
    """A key is seen where `side` is true, or, where `seen` is not, where it is false."""

    side: Side
    seen: bool


@dataclasses.dataclass(frozen=True)
class Segments:
    """A key is seen where both numbers are the same."""

    query: Side
    key: Side


@dataclasses.dataclass(frozen=True)
class Bias:
    """`factor` times `side` is added to the scores, behind their softcap."""

    side: Side
    factor: float


def side(graph: Any, v: int) -> Side:
    """A value as an array beside the scores. Raises Unidentified for what is no function of arguments and positions."""
    _check(graph, v)
    value = graph.values[v]
    whole = value.op == "input" and graph.views[v].place is None
    return Side(v, value.axes, value.dtype, whole)


def _check(graph: Any, v: int) -> None:
    for i in behind(graph, v):
        op = graph.values[i].op
        if op not in ("input", "constant", "iota", "bits") and op not in POINTWISE:
            raise Unidentified(f"a mask or a bias from {op}")


def arguments(graph: Any, found: Side) -> set[int]:
    """The arguments of the operation that an array is made of."""
    values = (graph.values[i] for i in behind(graph, found.value))
    return {int(value.param("argument")) for value in values if value.op == "input"}


def behind(graph: Any, v: int) -> list[int]:
    """A value and all it is computed from."""
    found, seen = [v], {v}
    for i in found:
        new = [a for a in graph.values[i].args if a not in seen]
        seen.update(new)
        found += new
    return found


def mask(graph: Any, v: int, seen: bool, query: str, key: str) -> Mask | Segments:
    """A condition as a mask; as segment ids where it compares integers of the query with those of the key."""
    value = graph.values[v]
    if value.op == ("eq" if seen else "ne"):
        for a, b in (value.args, value.args[::-1]):
            dtypes = {graph.values[i].dtype for i in (a, b)}
            along = [set(graph.values[i].axes) for i in (a, b)]
            is_ids = all(jnp.issubdtype(d, jnp.signedinteger) and d.itemsize <= 4 for d in map(jnp.dtype, dtypes))
            if is_ids and query in along[0] and key in along[1] and key not in along[0] and query not in along[1]:
                return Segments(side(graph, a), side(graph, b))
    return Mask(side(graph, v), seen)


def computed(graph: Any, found: Side, inputs: Sequence[Any], sizes: Mapping[str, int]) -> Any:
    """The array, with a dimension for each of its axes."""
    values: dict[int, Any] = {}

    def get(v: int) -> Any:
        if v not in values:
            values[v] = _value(graph, v, inputs, sizes, get)
        return values[v]

    return get(found.value)


def _value(graph: Any, v: int, inputs: Sequence[Any], sizes: Mapping[str, int], get: Any) -> Any:
    value = graph.values[v]
    if value.op == "input":
        return _argument(graph.views[v], inputs[int(value.param("argument"))], value.axes, sizes)
    if value.op == "constant":
        return jnp.asarray(np.asarray(value.param("value"), jnp.dtype(value.dtype)))
    if value.op == "iota":
        return jax.lax.iota(jnp.dtype(value.dtype), sizes[value.param("axis")])
    if value.op == "bits":
        axes = value.param("axes")
        x = jax.random.bits(get(value.args[0]), [sizes[a] for a in axes])
        return x.transpose([axes.index(a) for a in value.axes])
    shape = tuple(sizes[a] for a in value.axes)
    args = []
    for a in value.args:
        dims = [value.axes.index(axis) for axis in graph.values[a].axes]
        args.append(jax.lax.broadcast_in_dim(get(a), shape, dims))
    return POINTWISE[value.op](*args, **dict(value.params))


def _argument(view: Any, x: Any, axes: Sequence[str], sizes: Mapping[str, int]) -> Any:
    if view.place is not None:
        starts, strides = view.place.starts, view.place.strides
        limits = [s + t * (n - 1) + 1 for s, t, n in zip(starts, strides, view.shape, strict=True)]
        x = jax.lax.slice(x, starts, limits, strides)
    flat = [a for d in view.dims for a in d]
    return x.reshape([sizes[a] for a in flat]).transpose([flat.index(a) for a in axes])
