"""Taking in what is cheaper to compute again than to read: masks from positions or small vectors, random bits."""

from __future__ import annotations

import dataclasses
import math

from aicf_jax.flags import OpFlags
from aicf_jax.graph import Graph
from aicf_jax.pattern import Match
from mcir.operations import POINTWISE
from mcir.read import streams_bits

#: More nodes than this are not taken in.
_NODES = 96
_LAYOUT = ("broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "iota", "copy", "stop_gradient")
_IS_GEMM = int(OpFlags.IS_GEMM_LIKE)


def absorb(match: Match) -> Match:
    """The match with the producers of its side inputs, where those rest on less data than they are."""
    graph = match.graph
    inside = {v for n in match.nodes for v in n.outputs}
    taken: set[int] = set()
    for node in match.nodes:
        for v in node.inputs:
            if v in inside or node.flags & _IS_GEMM:
                continue
            found, leaves = behind(graph, v)
            if found and sum(_size(graph, leaf) for leaf in leaves) < _size(graph, v):
                taken |= found
    taken -= set(match.positions)
    return dataclasses.replace(match, absorbed=tuple(sorted(taken))) if taken else match


def behind(graph: Graph, vid: int) -> tuple[set[int], set[int]]:
    """Nodes that compute a value pointwise or by position, and the values those start from."""
    nodes: set[int] = set()
    leaves: set[int] = set()
    todo, seen = [vid], {vid}
    while todo:
        v = todo.pop()
        if graph.values[v].kind == "literal":
            continue
        position = int(graph.producer[v])
        if position < 0 or len(nodes) >= _NODES or not _can_repeat(graph, position):
            leaves.add(v)
            continue
        # A value that is small already is read, unless it is known from positions: that tells which blocks are masked.
        if v != vid and _size(graph, v) * 16 <= _size(graph, vid) and not _from_positions(graph, v):
            leaves.add(v)
            continue
        nodes.add(position)
        for w in graph.nodes[position].inputs:
            if w not in seen:
                seen.add(w)
                todo.append(w)
    return nodes, leaves


def _from_positions(graph: Graph, vid: int) -> bool:
    """Whether a value rests on nothing but positions and constants."""
    todo, seen = [vid], {vid}
    while todo:
        v = todo.pop()
        if graph.values[v].kind == "literal":
            continue
        position = int(graph.producer[v])
        if position < 0 or len(seen) > _NODES or not _can_repeat(graph, position):
            return False
        new = [w for w in graph.nodes[position].inputs if w not in seen]
        seen.update(new)
        todo += new
    return True


def _can_repeat(graph: Graph, position: int) -> bool:
    node = graph.nodes[position]
    if node.payload is not None or len(node.outputs) != 1:
        return False
    for c in node.covers:
        eqn = graph.eqn(c)
        name = eqn.primitive.name
        if eqn.effects or not (name in POINTWISE or name in _LAYOUT or streams_bits(eqn)):
            return False
    return bool(node.covers)


def _size(graph: Graph, vid: int) -> int:
    aval = graph.values[vid].aval
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 8)
