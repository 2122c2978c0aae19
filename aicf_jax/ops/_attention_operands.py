"""Q, K and V as the program has them before it scales or transposes them for their products.

To scale an array, or to exchange its dimensions, is a pass over memory and one more array. Tile by tile it costs nearly
nothing: a tile is copied in any case, and a number that Q or K is multiplied by is one that multiplies the scores.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from aicf_jax.flags import OpFlags
from aicf_jax.graph import Graph, Node
from aicf_jax.ops._absorb import absorb
from aicf_jax.pattern import Match

_PRODUCT, _SCALE, _TRANSPOSE, _SAFE = (
    int(f) for f in (OpFlags.IS_GEMM_LIKE, OpFlags.IS_SCALE, OpFlags.IS_TRANSPOSE, OpFlags.SAFE_NODE)
)

#: What scales are computed with.
_ARITHMETIC: Mapping[str, Callable[..., float]] = {
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "div": lambda x, y: x / y,
    "mul": lambda x, y: x * y,
    "pow": math.pow,
    "convert_element_type": float,
}


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
        found = (node.inputs[0], set[int]()) if node.flags & _TRANSPOSE else _scaled(graph, node)
        if found is None:
            break
        v, numbers = found
        taken |= {p, *numbers}
    return taken


def _scaled(graph: Graph, node: Node) -> tuple[int, set[int]] | None:
    """``(x, nodes of the number)`` of x times a positive number that makes nothing infinite; None for anything else.

    Loops leave hidden blocks out where all arguments are finite: what they compute of them has to be finite then too.
    """
    for k in range(len(node.inputs) if len(node.inputs) == 2 else 0):
        x, v = node.inputs[k], node.inputs[1 - k]
        numbers: set[int] = set()
        number = None if graph.values[v].aval.shape else _number(graph, v, numbers)
        if number is None or not _shrinks(node.op, number, is_left=k == 0):
            continue
        return x, numbers
    return None


def _shrinks(op: str, number: float, is_left: bool) -> bool:
    return (op == "mul" and 0 < number <= 1) or (op == "div" and is_left and 1 <= number < math.inf)


def _number(graph: Graph, v: int, nodes: set[int]) -> float | None:
    """What a value is, where it is arithmetic on literals; the nodes that compute it are added to `nodes`."""
    if (literal := graph.literal(v)) is not None:
        return float(literal)
    position = int(graph.producer[v])
    if position < 0 or (how := _ARITHMETIC.get(graph.nodes[position].op)) is None:
        return None
    operands = [_number(graph, w, nodes) for w in graph.nodes[position].inputs]
    if None in operands:
        return None
    nodes.add(position)
    try:
        return float(how(*operands))
    except (ArithmeticError, ValueError):
        return None
