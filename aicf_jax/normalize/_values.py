"""Whether two values of a program are the same: computed by equal equations from the same values."""

from __future__ import annotations

from aicf_jax.fingerprint import Keys
from aicf_jax.graph import Graph

#: Equations compared between two values, at most.
_STEPS = 8


def same_value(graph: Graph, a: int, b: int, keys: Keys, steps: int = _STEPS) -> bool:
    """Whether two values are equal by their equations: each flax layer casts its input anew, with the same result."""
    if a == b:
        return True
    one, other = (int(graph.producer[v]) for v in (a, b))
    if one < 0 or other < 0 or not steps:
        return False
    first, second = graph.nodes[one], graph.nodes[other]
    if first.op != second.op or not len(first.covers) == len(second.covers) == 1:
        return False
    e, f = graph.eqn(first.covers[0]), graph.eqn(second.covers[0])
    name = e.primitive.name
    if (
        e.primitive is not f.primitive
        or e.effects
        or f.effects
        or keys.params(name, e.params) != keys.params(name, f.params)
    ):
        return False
    if first.outputs.index(a) != second.outputs.index(b) or len(first.inputs) != len(second.inputs):
        return False
    return all(_same_operand(graph, v, w, keys, steps - 1) for v, w in zip(first.inputs, second.inputs, strict=True))


def _same_operand(graph: Graph, a: int, b: int, keys: Keys, steps: int) -> bool:
    if graph.values[a].kind == graph.values[b].kind == "literal":
        return keys.literal(graph.values[a].atom) == keys.literal(graph.values[b].atom)
    return same_value(graph, a, b, keys, steps)
