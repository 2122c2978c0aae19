"""Canonical activation gradients: the nodes a derived backward is made of, with the attributes of their activation."""

from __future__ import annotations

import dataclasses

from aicf_jax.flags import OpFlags
from aicf_jax.graph import Graph, Node
from aicf_jax.normalize._rule import Rule


def _apply(graph: Graph) -> dict[int, Node]:
    found = {}
    for i, node in enumerate(graph.nodes):
        if node.flags & OpFlags.IS_ACTIVATION_GRAD and not node.attrs:
            grad = graph.eqn(node.covers[0]).params["grad"]
            attrs = (("activation", grad.name), ("from_output", int(grad.from_output)), ("alpha", grad.alpha))
            found[i] = dataclasses.replace(node, op=f"{grad.name}_grad", attrs=attrs)
    return found


RULE = Rule("activation_grad", 0, _apply)
