"""Q, K and V as the program has them before it scales or transposes them for their products.

To scale an array, or to exchange its dimensions, is a pass over memory and one more array. Tile by tile it costs nearly
nothing: a tile is copied in any case, and a number that Q or K is multiplied by is one that multiplies the scores.
"""

from __future__ import annotations

import dataclasses
import math

from aicf_jax.flags import OpFlags
from aicf_jax.graph import Graph, Node
from aicf_jax.normalize._constants import number
from aicf_jax.ops._absorb import absorb, behind
from aicf_jax.pattern import Match

_PRODUCT, _SCALE, _TRANSPOSE, _SAFE = (
    int(f) for f in (OpFlags.IS_GEMM_LIKE, OpFlags.IS_SCALE, OpFlags.IS_TRANSPOSE, OpFlags.SAFE_NODE)
)


def extend(match: Match) -> Match:
    """The match with what `absorb` finds, and with what nothing but its two products needs of Q, K and V."""
    graph, match = match.graph, absorb(match)
    taken = set(match.absorbed)
    products = [n for n in match.nodes if n.flags & _PRODUCT]
    for node, passed in zip(products, (_SCALE | _TRANSPOSE, _TRANSPOSE), strict=True):
        # What is both operands has rows and columns of the scores: two arrays, as the backward has it.
        for v in (v for v in node.inputs if node.inputs.count(v) == 1):
            taken |= _before(graph, v, passed)
    taken -= set(match.positions)
    return dataclasses.replace(match, absorbed=tuple(sorted(taken)))


def _before(graph: Graph, v: int, passed: int) -> set[int]:
    """The nodes that stand between an operand and the array it is made of, and those of the numbers they use."""
    taken: set[int] = set()
    while (p := int(graph.producer[v])) >= 0 and graph.flag_list[p] & passed and graph.flag_list[p] & _SAFE:
        node = graph.nodes[p]
        if node.flags & _TRANSPOSE:
            taken, v = taken | {p}, node.inputs[0]
        elif (found := _shrunk(graph, node)) is not None:
            (v, factor) = found
            taken |= {p, *behind(graph, factor)[0]}
        else:
            break
    return taken


def _shrunk(graph: Graph, node: Node) -> tuple[int, int] | None:
    """``(x, c)`` of x times or by a positive number c that makes nothing larger; None for anything else.

    Loops leave hidden blocks out where all arguments are finite: what they compute of them has to be finite then too.
    """
    if node.op not in ("mul", "div") or len(node.inputs) != 2:
        return None
    x, c = node.inputs
    known = number(graph, c)
    if known is None and node.op == "mul":
        x, c = c, x
        known = number(graph, c)
    if known is None:
        return None
    factor, _ = known
    shrinks = 0 < factor <= 1 if node.op == "mul" else 1 <= factor < math.inf
    return (x, c) if shrinks else None
