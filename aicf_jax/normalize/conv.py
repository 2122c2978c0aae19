"""Canonical convolutions: which dimension of the result holds the channels, whatever the dimension numbers are."""

from __future__ import annotations

import dataclasses

from aicf_jax.flags import OpFlags
from aicf_jax.graph import Graph, Node
from aicf_jax.normalize._rule import Rule


def _apply(graph: Graph) -> dict[int, Node]:
    found = {}
    for i, node in enumerate(graph.nodes):
        if node.op != "conv_general_dilated" or not node.flags & OpFlags.IS_CONV:
            continue
        channel = graph.eqn(node.covers[0]).params["dimension_numbers"].out_spec[1]
        ndim = graph.values[node.outputs[0]].aval.ndim
        roles = "".join("n" if d == channel else "s" for d in range(ndim))
        # Counted from the end: batching adds dimensions in front.
        found[i] = dataclasses.replace(node, op="conv", attrs=(("roles", roles), ("channel", channel - ndim)))
    return found


RULE = Rule("conv", 0, _apply)
