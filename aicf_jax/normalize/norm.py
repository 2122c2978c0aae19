"""Canonical norms: every equation between x and ``(x - mean) / sqrt(variance + eps) * scale + bias`` becomes one node.

From each root the sums it is computed from are found by going back; the values around the array that is summed are
polynomials in it and its statistics (`_norm_region`), and one of them is a layer norm or an RMS norm or none is,
whatever the spelling: variance of deviations or from moments, clamped or not, `rsqrt`, powers and divisions,
statistics and results in other types, ``x * (r * scale)`` or ``(x * r) * scale``. Scale and bias belong to the norm
where they vary along the normalized axes only; what varies along others (the shift and scale of a modulated norm, the
channels of an instance norm) stays outside. Where statistics are kept for something else, nothing is canonical, but of
a norm over other axes than trailing ones (a batch norm) mean and variance may be: they are further results.

An addition whose sum is normalized is marked as a residual.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from aicf_jax.flags import OpFlags
from aicf_jax.graph import NOP, Graph, Node
from aicf_jax.normalize import _moments as moments
from aicf_jax.normalize._batch_statistics import statistics_of
from aicf_jax.normalize._constants import SAME_VALUE, is_float, number
from aicf_jax.normalize._norm_forms import NEAR_MISSES, Norm, almost, norm_of, roots_of
from aicf_jax.normalize._norm_region import RULES, NormRegion
from aicf_jax.normalize._rule import Rule
from aicf_jax.normalize.bias import broadcast_source

_SEEDS = ("rsqrt", "sqrt", "pow")
#: From a root back to the sums, no further than this.
_STEPS = 32

Axes = tuple[int, ...]


def _apply(graph: Graph) -> dict[int, Node]:
    found: dict[int, Node] = {}
    near: dict[int, Node] = {}
    for chain in _regions(graph):
        missed: dict[int, Node] = {}
        for region in chain:
            hits, missed = _norms_in(region)
            found.update(hits)
            if hits:
                break
        near.update(missed)
    covered = {c for node in found.values() for c in node.covers}
    near = {p: n for p, n in near.items() if covered.isdisjoint(n.covers)}
    moved = {int(graph.producer[v]): NOP for node in found.values() for v in node.outputs[1:]}
    return {**_residuals(graph, found), **near, **moved, **found}


# -- where to look ---------------------------------------------------------------------------------------


def _sums(graph: Graph) -> Iterator[tuple[int, Axes]]:
    """``(VID that is summed, axes)`` of the sums that roots are computed from, each once."""
    seen: set[tuple[int, Axes]] = set()
    for node in graph.nodes:
        if node.op not in _SEEDS or len(node.covers) != 1:
            continue
        queue, visited = deque(node.inputs), set(node.inputs)
        while queue and len(visited) < _STEPS:
            position = int(graph.producer[queue.popleft()])
            below = graph.nodes[position] if position >= 0 else None
            if below is None or below.op not in RULES or len(below.covers) != 1:
                continue
            if below.op == "reduce_sum":
                axes = tuple(sorted(graph.eqn(below.covers[0]).params["axes"]))
                if axes and (below.inputs[0], axes) not in seen:
                    seen.add((below.inputs[0], axes))
                    yield below.inputs[0], axes
            new = [v for v in below.inputs if v not in visited]
            visited.update(new)
            queue.extend(new)


def _regions(graph: Graph) -> Iterator[list[NormRegion]]:
    """For each candidate for x the regions of it in all its types, the one converted from first."""
    regions: dict[tuple[int, Axes], NormRegion] = {}
    chains: dict[tuple[int, Axes], list[int]] = {}
    for summed, axes in _sums(graph):
        for chain in _candidates(graph, summed):
            shape = graph.values[chain[0]].aval.shape
            if is_float(graph, chain[0]) and all(isinstance(shape[a], int) and shape[a] for a in axes):
                known = chains.setdefault((chain[0], axes), [])
                known.extend(v for v in chain if v not in known)
    for (_, axes), chain in chains.items():
        for v in chain:
            regions[v, axes] = NormRegion(graph, v, axes)
    # x^2 and x - mean have means and squares of their own; the norm is one of x.
    inner = {
        (v, region.axes)
        for region in regions.values()
        for v, form in region.forms.items()
        if form.poly != moments.power(moments.X) and not form.has_root
    }
    for (_, axes), chain in chains.items():
        if not any((v, axes) in inner for v in chain):
            yield [regions[v, axes] for v in chain]


def _candidates(graph: Graph, vid: int) -> Iterator[list[int]]:
    """Values that the summed one is, or is the square of; each with what it was widened from, that first."""
    while True:
        chain = [vid]
        while (node := _producer(graph, vid)) is not None and node.op in SAME_VALUE[:1]:
            if not _is_exact(graph, node):
                break
            vid = node.inputs[0]
            chain.append(vid)
        yield chain[::-1]
        is_square = node is not None and (
            node.op == "square"
            or (node.op == "integer_pow" and graph.eqn(node.covers[0]).params["y"] == 2)
            or (node.op == "pow" and (number(graph, node.inputs[1]) or (0.0,))[0] == 2)
            or (node.op == "mul" and node.inputs[0] == node.inputs[1])
        )
        if node is None or not is_square:
            return
        vid = node.inputs[0]


def _is_exact(graph: Graph, node: Node) -> bool:
    """Whether a conversion keeps every value: what was rounded is another value."""
    before, after = (graph.values[v].aval.dtype for v in (node.inputs[0], node.outputs[0]))
    return is_float(graph, node.inputs[0]) and jnp.promote_types(before, after) == after


def _producer(graph: Graph, vid: int) -> Node | None:
    position = int(graph.producer[vid])
    node = graph.nodes[position] if position >= 0 else None
    return node if node is not None and len(node.covers) == 1 and node.inputs else None


# -- what is there ---------------------------------------------------------------------------------------


def _norms_in(region: NormRegion) -> tuple[dict[int, Node], dict[int, Node]]:
    """``(norms, near misses)`` by position."""
    graph = region.graph
    axes = frozenset(region.axes)
    trailing = set(axes) == set(range(len(region.shape) - len(axes), len(region.shape)))
    # Where scale and bias vary: along the normalized axes, or of a batch norm along all others.
    along = axes if trailing else frozenset(range(len(region.shape))) - axes
    wide = frozenset(a for a in along if region.shape[a] != 1)
    exits = [
        (p, norm)
        for p in reversed(region.members)
        if graph.values[graph.nodes[p].outputs[0]].aval.shape == region.shape
        and (norm := norm_of(_poly(region, p), along, wide, region.tolerance)) is not None
        and (trailing or norm.is_centered)
    ]
    found: dict[int, Node] = {}
    taken: set[int] = set()
    for position, norm in exits:
        members = region.needed(position)
        if position in taken:
            continue
        if not trailing:
            statistics = statistics_of(region, members, position)
            if statistics is not None:
                found[position] = _batch_norm(region, position, members, norm, statistics)
                taken.update(members)
        elif region.is_closed(members, (position,)):
            found[position] = _node(region, position, members, norm)
            taken.update(members)
    return found, _near_misses(region, found, taken, exits, trailing)


def _poly(region: NormRegion, position: int) -> moments.Poly:
    return region.forms[region.graph.nodes[position].outputs[0]].poly


def _near_misses(
    region: NormRegion, found: dict[int, Node], taken: set[int], exits: list[tuple[int, Norm]], trailing: bool
) -> dict[int, Node]:
    """One mark for each root that no norm was found with, at the first value that resembles one."""
    settled = {s for p in found for s in roots_of(_poly(region, p))}
    norms = {s for p, _ in exits for s in roots_of(_poly(region, p))}
    near: dict[int, Node] = {}
    for p in region.members:
        poly = _poly(region, p)
        new = roots_of(poly) - settled
        if not new or p in taken:
            continue
        code = almost(poly, region.length, region.shape, frozenset(region.axes), region.tolerance)
        if code is None or (code == "other_value" and _has_own_norm(region, new)):
            continue
        settled |= new
        if not trailing and not new & norms:
            code = "axes_not_trailing" if code not in ("other_value", "stopped_statistics") else code
        elif new & norms:
            code = "statistics_reused"
        near[p] = _marked(region.graph.nodes[p], poly, code)
    return near


def _has_own_norm(region: NormRegion, roots: set[moments.Symbol]) -> bool:
    """Whether x itself is multiplied by one of these roots somewhere: what else is, is that norm's second user."""
    return any(
        roots & {s for s, _ in m} and any(s == moments.X for s, _ in m)
        for p in region.members
        for m in _poly(region, p)
    )


def _marked(node: Node, poly: moments.Poly, code: str) -> Node:
    """A node as it is, marked as a near miss."""
    expected, found = NEAR_MISSES[code]
    attrs = (("code", code), ("expected", expected), ("found", found))
    flags = OpFlags.IS_NEAR_NORM
    if moments.contains(poly, "mean", "variance"):
        flags |= OpFlags.IS_CENTERED
    return dataclasses.replace(node, flags=node.flags | flags, attrs=attrs)


def _node(region: NormRegion, position: int, members: list[int], norm: Norm) -> Node:
    graph = region.graph
    values = [s for s in (norm.scale, norm.bias) if s is not None]
    ndim = len(region.shape)
    statistics = _statistics_type(region, members)
    attrs = (
        ("axes", len(region.axes)),
        ("eps", norm.eps if statistics == "float64" else float(str(np.float32(norm.eps)))),
        ("variance", norm.formula),
        ("clamped", norm.clamped),
        ("statistics", statistics),
        ("scale", _from_the_end(norm.scale, ndim)),
        ("bias", _from_the_end(norm.bias, ndim)),
    )
    flags = OpFlags.IS_NORMALIZATION
    if norm.is_centered:
        flags |= OpFlags.IS_CENTERED
    if values:
        flags |= OpFlags.HAS_PARAM
    inputs = (region.x, *(int(s[1]) for s in values))
    name = "layer_norm" if norm.is_centered else "rms_norm"
    return Node(name, flags, inputs, graph.nodes[position].outputs, region.covers(members), attrs)


def _batch_norm(
    region: NormRegion, position: int, members: list[int], norm: Norm, statistics: list[tuple[int, str]]
) -> Node:
    """The norm over other axes than trailing ones, whose statistics may be results too."""
    node = _node(region, position, members, norm)
    attrs = dict(node.attrs)
    attrs["axes"] = tuple(sorted(int(a) - len(region.shape) for a in region.axes))
    attrs["kept"] = tuple(kind for _, kind in statistics)
    flags = OpFlags.IS_BATCH_NORM | (node.flags & OpFlags.HAS_PARAM)
    outputs = (*node.outputs, *(v for v, _ in statistics))
    return dataclasses.replace(node, op="batch_norm", flags=flags, outputs=outputs, attrs=tuple(attrs.items()))


def _from_the_end(symbol: moments.Symbol | None, ndim: int) -> tuple[int, ...] | None:
    """The dimensions that a scale or bias varies along, counted from the end, since batching adds some in front."""
    return None if symbol is None else tuple(sorted(d - ndim for d in symbol[2]))


def _statistics_type(region: NormRegion, members: list[int]) -> str:
    """The type whose root is taken."""
    graph = region.graph
    return next(str(graph.values[graph.nodes[p].outputs[0]].aval.dtype) for p in members if graph.nodes[p].op in _SEEDS)


# -- residuals -------------------------------------------------------------------------------------------


def _residuals(graph: Graph, norms: dict[int, Node]) -> dict[int, Node]:
    """The additions whose sums are normalized, marked: of two arrays of one shape, and nothing of the norm on them."""
    found: dict[int, Node] = {}
    for node in norms.values():
        position = int(graph.producer[node.inputs[0]])
        below = graph.nodes[position] if position >= 0 else None
        if below is None or below.op not in ("add", "add_any") or len(below.covers) != 1:
            continue
        if all(_is_whole(graph, v, node.inputs[0]) for v in below.inputs) and not any(
            _rests_on(graph, v, position) for n in norms.values() if n.inputs[0] == node.inputs[0] for v in n.inputs[1:]
        ):
            found[position] = dataclasses.replace(below, flags=below.flags | OpFlags.IS_RESIDUAL)
    return found


def _is_whole(graph: Graph, vid: int, like: int) -> bool:
    """Whether an array is of this type and was not broadcast to it."""
    aval, want = graph.values[vid].aval, graph.values[like].aval
    if aval.shape != want.shape or aval.dtype != want.dtype or number(graph, vid) is not None:
        return False
    return len(broadcast_source(graph, vid)[1]) == sum(n != 1 for n in aval.shape)


def _rests_on(graph: Graph, vid: int, position: int) -> bool:
    """Whether a value is computed from the result of the node at a position."""
    todo, seen = [vid], {vid}
    while todo:
        p = int(graph.producer[todo.pop()])
        if p == position:
            return True
        # In a program nothing is computed from what comes later.
        new = [v for v in graph.nodes[p].inputs if v not in seen] if p > position else []
        seen.update(new)
        todo.extend(new)
    return False


RULE = Rule("norm", 3, _apply)
