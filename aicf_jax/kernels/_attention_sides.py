"""Masks, segment ids and biases of an operation as the Mosaic GPU kernels of attention take them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from aicf_jax.kernels._attention_layouts import order
from aicf_jax.ops import FusedOp, _attention_dropout
from aicf_jax.ops._attention_dropout import Drawn
from aicf_jax.ops._attention_variant import Variant, scores_graph
from aicf_jax.ops._side_arrays import Bias, Mask, Segments, Side, arguments, computed

#: Types of a bias that are read as they are.
_BIAS_DTYPES = ("bfloat16", "float16", "float32")

#: Biases of queries x keys, and those that are the same for all queries.
_NAMES = ("bias", "key_bias")


def fills_low(v: Variant) -> bool:
    """Whether hidden scores are -inf, or so low that their exponential is 0 beside others."""
    from pallas_kernels.attention.arguments import HIGHEST_FILL

    return v.fill is None or -math.inf < v.fill * v.base <= HIGHEST_FILL


def sides(v: Variant, drawn: Any = None) -> tuple[Side, ...]:
    """All arrays that a kind of attention has beside the scores, but for dropout that is `drawn`."""
    keeps = () if v.dropout is None or drawn is not None else v.dropout.keeps
    of_masks = (s for m in (*v.masks, *keeps) for s in ((m.side,) if isinstance(m, Mask) else (m.query, m.key)))
    return tuple(dict.fromkeys((*of_masks, *(b.side for b in v.biases))))


def values(op: FusedOp, v: Variant, found: Sequence[Side], inputs: Sequence[Any]) -> list[Any]:
    """These from the operation's arguments, with a dimension for each of their axes."""
    return [computed(scores_graph(op), side, inputs, dict(v.sizes)) for side in found]


def arrays(v: Variant, given: Mapping[Side, Any], drawn: Any = None) -> dict[str, Any]:
    """Keyword arguments of `pallas_kernels.attention.forward`, from what `values` has of each of `sides`.

    What varies along queries or keys alone is a vector, and what varies along both an array of both, of which the
    kernel takes one mask and one bias: several are combined before. `drawn`: what `drawn_keep` found.
    """
    r, laid_out = v.roles, functools.partial(_made, v, given)
    truth: dict[tuple[str, ...], list[Any]] = {kind: [] for kind in ((), (r.query,), (r.key,), (r.query, r.key))}
    for mask in v.masks:
        if isinstance(mask, Mask):
            last = _last(v, mask.side)
            x = laid_out(mask.side, *last).astype(bool)
            truth[last].append(x if mask.seen else ~x)
    segments = [(laid_out(m.query, r.query), laid_out(m.key, r.key)) for m in v.masks if isinstance(m, Segments)]
    of_keys = [*truth[r.key,], *(x[..., None] for x in truth[()])]
    segments += _padding(truth[r.query,], of_keys, v.size(r.query), v.size(r.key))
    masks = truth[r.query, r.key]
    return {
        "segments": segments,
        "mask": functools.reduce(jnp.logical_and, masks) if masks else None,
        **biases(v, given),
        **({} if v.fill is None else {"fill": v.fill * v.base}),
        **_dropout(v, given, drawn),
    }


def _dropout(v: Variant, given: Mapping[Side, Any], drawn: Any) -> dict[str, Any]:
    """Of `arrays`, which weights are kept."""
    if v.dropout is None:
        return {}
    r, keep = v.roles, drawn
    if keep is None:
        kept = [(_made(v, given, k.side, r.query, r.key).astype(bool), k.seen) for k in v.dropout.keeps]
        keep = functools.reduce(jnp.logical_and, (x if seen else ~x for x, seen in kept))
        keep = jnp.broadcast_to(keep, (*keep.shape[:2], v.size(r.query), v.size(r.key)))
    return {"keep": keep, "keep_factor": v.dropout.factor}


def drawn_keep(op: FusedOp, v: Variant, inputs: Sequence[Any]) -> Any:
    """Which weights are kept, as the kernel draws it; None where it reads an array.

    It draws by the place in the whole array, and so not on parts.
    """
    found = _drawn(op, v)
    if found is None:
        return None
    from pallas_kernels.attention import Bernoulli

    r, (batch, heads) = v.roles, order(v)
    sizes = v.size(*batch), v.size(*heads, *r.group), v.size(r.query), v.size(r.key)
    return Bernoulli(inputs[found.argument], found.probability, sizes)


def _drawn(op: FusedOp, v: Variant) -> Drawn | None:
    """Dropout that the kernel can draw, in the order of its own array: no array of the scores' size is made.

    What batches or heads share is drawn once for all of them, and read.
    """
    graph, r, (batch, heads) = scores_graph(op), v.roles, order(v)
    found = None if v.dropout is None else _attention_dropout.drawn(graph, v.dropout.keeps)
    axes = tuple(a for a in (*batch, *heads, *r.group, r.query, r.key) if a in graph.axes)
    return found if found is not None and found.axes == axes else None


def biases(v: Variant, given: Mapping[Side, Any]) -> dict[str, Any]:
    """Of `arrays`, what is added to the scores."""
    r, (tiles, of_keys) = v.roles, _split(v)
    vectors = [_made(v, given, b.side, r.key).astype(jnp.float32) * b.factor for b in of_keys]
    return {
        **_bias([(_made(v, given, b.side, r.query, r.key), b.factor * v.base) for b in tiles]),
        "key_bias": sum(vectors[1:], start=vectors[0]) * v.base if vectors else None,
    }


def _made(v: Variant, given: Mapping[Side, Any], side: Side, *last: str) -> Any:
    """An array with dimensions for batches, heads and these axes."""
    batch, heads = order(v)
    dims = [batch, (*heads, *v.roles.group), *((a,) for a in last)]
    return _laid_out(given[side], side.axes, dims, dict(v.sizes))


def _split(v: Variant) -> tuple[list[Bias], list[Bias]]:
    """Biases of queries and keys, and those that are the same for all queries."""
    tiles = [b for b in v.biases if v.roles.query in b.side.axes]
    return tiles, [b for b in v.biases if b not in tiles]


def wanted_biases(op: FusedOp, v: Variant, wanted: Sequence[int]) -> tuple[tuple[str, ...], tuple[Side, ...]]:
    """Which biases of `biases` arguments that are `wanted` take part in, and the arrays that these are made of."""
    found = {name: b for name, b in zip(_NAMES, _split(v), strict=True) if _made_of(op, b) & set(wanted)}
    return tuple(found), tuple(dict.fromkeys(b.side for of in found.values() for b in of))


def pulled(
    v: Variant, given: Mapping[Side, Any], names: Sequence[str], moving: Sequence[Side], gradients: Sequence[Any]
) -> Sequence[Any]:
    """Gradients of the arrays that biases are made of, from those of the biases."""

    def made(*moved: Any) -> tuple[Any, ...]:
        found = biases(v, {**given, **dict(zip(moving, moved, strict=True))})
        return tuple(found[name] for name in names)

    return jax.vjp(made, *(given[s] for s in moving))[1](tuple(gradients))


def pulled_arguments(
    op: FusedOp, v: Variant, inputs: Sequence[Any], wanted: Sequence[int], moving: Sequence[Side], gradients: Any
) -> dict[int, Any]:
    """Gradients of arguments that are `wanted`, from those of the arrays that are made of them."""
    made_of = {i for s in moving for i in arguments(scores_graph(op), s)}
    found = [i for i in wanted if i in made_of]

    def made(*moved: Any) -> list[Any]:
        replaced = dict(zip(found, moved, strict=True))
        return values(op, v, moving, [replaced.get(i, x) for i, x in enumerate(inputs)])

    return dict(zip(found, jax.vjp(made, *(inputs[i] for i in found))[1](list(gradients)), strict=True))


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


def _made_of(op: FusedOp, biases: Sequence[Bias]) -> set[int]:
    """The arguments that biases are made of."""
    return {i for b in biases for i in arguments(scores_graph(op), b.side)}


def pulls_tiles(op: FusedOp, v: Variant, wanted: Sequence[int]) -> bool:
    """Whether the gradient of a bias of queries x keys is wanted."""
    return bool(_made_of(op, _split(v)[0]) & set(wanted))


def bytes_of_score(v: Variant) -> int:
    """What kernels read for each score, dropout too."""
    is_masked = any(isinstance(m, Mask) and len(_last(v, m.side)) == 2 for m in v.masks)
    return _bias_width(v) + is_masked + (v.dropout is not None)


def moved_bytes(op: FusedOp, v: Variant) -> int:
    """What is moved beside reading the operation's arguments once: arrays of queries x keys that are made first."""
    masks, biases = _tile_bytes(op, v)
    # Truth values become one of bytes, and several biases, or what is no argument, one of its own.
    tiles, _ = _split(v)
    return 2 * masks + (2 * biases if len(tiles) > 1 or any(not b.side.whole for b in tiles) else 0)


def gradient_bytes(op: FusedOp, v: Variant) -> int:
    """Likewise of the backward, which reads such arrays twice, the second time transposed."""
    masks, biases = _tile_bytes(op, v)
    return moved_bytes(op, v) + 3 * (masks + biases)


def _bias_width(v: Variant) -> int:
    """Bytes of a number of the bias of queries x keys, as kernels read it; 0: there is none."""
    tiles, _ = _split(v)
    is_one = len(tiles) == 1 and tiles[0].side.dtype in _BIAS_DTYPES
    return jnp.dtype(tiles[0].side.dtype).itemsize if is_one else 4 * bool(tiles)


def _tile_bytes(op: FusedOp, v: Variant) -> tuple[int, int]:
    """Of truth values, and of the bias of queries x keys, as kernels read them."""
    keeps = [] if v.dropout is None or _drawn(op, v) is not None else [k.side for k in v.dropout.keeps]
    masks = [m.side for m in v.masks if isinstance(m, Mask) and len(_last(v, m.side)) == 2]
    sides = (1, masks), (_bias_width(v), [b.side for b in _split(v)[0]]), (1, keeps)
    masked, biased, kept = (n * v.size(*{a for s in found for a in s.axes}) if found else 0 for n, found in sides)
    return masked + kept, biased
