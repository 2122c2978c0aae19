"""Canonical masks: ``where(pred, x, fill)`` and ``where(pred, fill, x)`` with a fill that is not data of x's shape.

The fill is a number, or a value of fewer dimensions that was broadcast. After a softmax a fill of 0 is dropout. What an
activation was recognized in (relu, elu, ...) is that activation and no mask: this rule comes later.
"""

from __future__ import annotations

import numpy as np

from aicf_jax.flags import OpFlags
from aicf_jax.graph import Graph, Node
from aicf_jax.normalize._constants import constant, is_float
from aicf_jax.normalize._rule import Rule
from aicf_jax.normalize.bias import broadcast_source


def _apply(graph: Graph) -> dict[int, Node]:
    found = {}
    for i, node in enumerate(graph.nodes):
        if node.op == "select_n" and len(node.inputs) == 3 and is_float(graph, node.outputs[0]):
            canonical = _as_mask(graph, node)
            if canonical is not None:
                found[i] = canonical
    return found


def _as_mask(graph: Graph, node: Node) -> Node | None:
    pred, *branches = node.inputs
    if graph.values[pred].aval.dtype != np.bool_:
        return None
    for keep_when, x, fill in ((False, *branches), (True, *branches[::-1])):
        number, covers = constant(graph, fill)
        extra: tuple[int, ...] = ()
        if number is None:
            source, varying, covers = broadcast_source(graph, fill)
            if not covers or len(varying) == sum(n != 1 for n in graph.values[fill].aval.shape):
                continue  # data of full size: a choice between two values
            extra = (source,)
        if constant(graph, x)[0] is not None or (extra and broadcast_source(graph, x)[2]):
            continue
        attrs = (("fill", number), ("keep_when", keep_when))
        flags = OpFlags.IS_ELEMENTWISE | OpFlags.IS_MASK
        return Node("mask", flags, (x, pred, *extra), node.outputs, (*sorted(covers), *node.covers), attrs)
    return None


RULE = Rule("mask", 30, _apply, after=("norm", "cross_entropy", "softmax", "activation"))
