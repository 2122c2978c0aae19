"""Masks, segment ids and biases of an operation as the Mosaic GPU kernels of attention take them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from aicf_jax.kernels._attention_layouts import order
from aicf_jax.ops import FusedOp
from aicf_jax.ops._attention_variant import Variant, scores_graph
from aicf_jax.ops._side_arrays import Mask, Segments, Side, computed

#: Types of a bias that are read as they are.
_BIAS_DTYPES = ("bfloat16", "float16", "float32")


def sides(v: Variant) -> tuple[Side, ...]:
    """All that a kind of attention has beside the scores."""
    masks = [m.side if isinstance(m, Mask) else (m.query, m.key) for m in v.masks]
    flat = [s for found in masks for s in (found if isinstance(found, tuple) else (found,))]
    return tuple(dict.fromkeys((*flat, *(b.side for b in v.biases))))


def values(op: FusedOp, v: Variant, found: Sequence[Side], inputs: Any) -> list[Any]:
    """These from the operation's arguments, with a dimension for each of their axes."""
    graph, sizes = scores_graph(op), dict(v.sizes)
    return [computed(graph, side, inputs, sizes) for side in found]


def arrays(v: Variant, given: Mapping[Side, Any]) -> dict[str, Any]:
    """Keyword arguments of `pallas_kernels.attention.forward`, from what `values` has of each of `sides`.

    What varies along queries or keys alone is a vector, and what varies along both an array of both, of which the
    kernel takes one mask and one bias: several are combined before.
    """
    sizes, (batch, heads) = dict(v.sizes), order(v)
    dims = batch, (*heads, *v.roles.group)

    def laid_out(side: Side, *last: str) -> Any:
        return _laid_out(given[side], side.axes, [*dims, *((a,) for a in last)], sizes)

    r = v.roles
    truth: dict[tuple[str, ...], list[Any]] = {kind: [] for kind in ((), (r.query,), (r.key,), (r.query, r.key))}
    for mask in v.masks:
        if isinstance(mask, Mask):
            last = _last(v, mask.side)
            x = laid_out(mask.side, *last).astype(bool)
            truth[last].append(x if mask.seen else ~x)
    segments = [(laid_out(m.query, r.query), laid_out(m.key, r.key)) for m in v.masks if isinstance(m, Segments)]
    of_keys = [*truth[r.key,], *(x[..., None] for x in truth[()])]
    segments += _padding(truth[r.query,], of_keys, sizes[r.query], sizes[r.key])
    masks, tiles = truth[r.query, r.key], [b for b in v.biases if r.query in b.side.axes]
    vectors = [laid_out(b.side, r.key).astype(jnp.float32) * b.factor for b in v.biases if b not in tiles]
    return {
        "segments": segments,
        "mask": functools.reduce(jnp.logical_and, masks) if masks else None,
        **_bias([(laid_out(b.side, r.query, r.key), b.factor * v.base) for b in tiles]),
        "key_bias": sum(vectors[1:], start=vectors[0]) * v.base if vectors else None,
        **({} if v.fill is None else {"fill": v.fill * v.base}),
    }


def _last(v: Variant, side: Side) -> tuple[str, ...]:
    return tuple(a for a in (v.roles.query, v.roles.key) if a in side.axes)


def _padding(of_queries: Sequence[Any], of_keys: Sequence[Any], queries: int, keys: int) -> list[tuple[Any, Any]]:
    """A pair of segment ids: queries and keys that take part have 0, others numbers that no one shares."""
    if not of_queries and not of_keys:
        return []
    first, second = None, jnp.zeros((1, 1, keys), jnp.int32)
    if of_queries:
        first = jnp.where(functools.reduce(jnp.logical_and, of_queries), 0, 1)
    if of_keys:
        taking_part = functools.reduce(jnp.logical_and, of_keys)
        second = jnp.where(jnp.broadcast_to(taking_part, (*taking_part.shape[:2], keys)), 0, 2)
    return [(None if first is None else first.astype(jnp.int32), second.astype(jnp.int32))]


def _bias(tiles: Sequence[tuple[Any, float]]) -> dict[str, Any]:
    if not tiles:
        return {"bias": None}
    if len(tiles) == 1:
        x, factor = tiles[0]
        return {"bias": x if str(x.dtype) in _BIAS_DTYPES else x.astype(jnp.float32), "bias_factor": factor}
    return {"bias": functools.reduce(jnp.add, (x.astype(jnp.float32) * factor for x, factor in tiles))}


def _laid_out(x: Any, axes: Sequence[str], dims: Sequence[Sequence[str]], sizes: dict[str, int]) -> Any:
    """An array with these dimensions, each of some axes; of one element where it varies along none of them."""
    kept = [tuple(d) if set(d) & set(axes) else () for d in dims]
    flat = [a for d in kept for a in d]
    have = [a for a in flat if a in axes]
    x = x.transpose([list(axes).index(a) for a in have])
    if have != flat:
        x = jax.lax.broadcast_in_dim(x, [sizes[a] for a in flat], [flat.index(a) for a in have])
    return x.reshape([math.prod(sizes[a] for a in d) for d in kept])


def moved_bytes(op: FusedOp, v: Variant) -> int:
    """What is moved beside reading the operation's arguments once: arrays of queries x keys that are made first."""
    tiles = [m.side for m in v.masks if isinstance(m, Mask) and len(_last(v, m.side)) == 2]
    biases = [b.side for b in v.biases if v.roles.query in b.side.axes]
    made = 0
    # Masks become one of bytes, and several biases, or what is no argument, one of its own.
    for sides, is_made, size in ((tiles, bool(tiles), 1), (biases, len(biases) > 1, 4)):
        if is_made or any(not s.whole for s in sides):
            axes = {a for s in sides for a in s.axes}
            made += 2 * size * v.size(*axes)
    return made
