"""Canonical cross entropy: every equation between logits and their loss becomes one node.

One loss for each row of the logits, or, where nothing else uses it, their sum: from each ``exp`` that is summed along
an axis the candidates for the logits x are found as for a softmax; where all that is computed from x flows through one
value, and that is arithmetic on the log-sum-exp of x, on single elements and on weighted sums of x, it is a loss
(`_loss_region`). Integer labels, one-hot and soft labels, label smoothing, z-loss, ``where=``, log-softmax, the
logarithm of a softmax at the label, guards, masks and temperatures are what comes of that, in any spelling.
"""

from __future__ import annotations

import dataclasses
import math

from aicf_jax.flags import OpFlags
from aicf_jax.graph import Graph, Node
from aicf_jax.normalize._constants import constant
from aicf_jax.normalize._loss_region import LossRegion
from aicf_jax.normalize._rule import Rule
from aicf_jax.normalize.softmax import regions, seeds, shift_code
from mcir.operations import POINTWISE

#: From the loss of a row to the sum of all, no further than this.
_STEPS = 8
_ROW_LAYOUT = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "convert_element_type", "copy")

#: code -> (expected, found)
NEAR_MISSES = {
    "logits_returned": (
        "the logits are used by the loss only",
        "the logits are also a result of the program",
    ),
    "logits_reused": (
        "the logits are used by the loss only",
        "the logits are used elsewhere too, as by an argmax: compute that from a call of its own",
    ),
    "log_probs_reused": (
        "log-probabilities and their sum are used by the loss only",
        "a loss whose inner values are used elsewhere too",
    ),
    "rows_summed": (
        "a loss for each row first, then their sum",
        "a sum over labels and rows at once: sum over the labels, axis=-1, and then over the rows",
    ),
    "log_of_softmax": (
        "log_softmax, which is finite for finite logits",
        "the logarithm of a softmax under a sum: it is NaN where a weight underflows",
    ),
    "depends_on_max": (
        "a loss that depends on the log-sum-exp of the logits and on their elements",
        "a loss that depends on the maximum of the logits itself",
    ),
    "several_softmaxes": (
        "one log-sum-exp of the logits",
        "several, of different scales or masks",
    ),
    "no_max_subtraction": (
        "the row maximum is subtracted before exp",
        "a log-sum-exp without it: it overflows where the operation does not",
    ),
    "shift_not_row_max": (
        "the row maximum of the same values along the same axis is subtracted before exp",
        "a log-sum-exp that subtracts something else: it overflows, and yields NaN, in other places",
    ),
}


def _apply(graph: Graph) -> dict[int, Node]:
    found: dict[int, Node] = {}
    near: dict[int, Node] = {}
    for seed, axis in seeds(graph):
        for log in regions(graph, seed, axis):
            region, foreign = LossRegion(log), ()
            if region.exit is None and region.foreign:
                foreign = tuple(region.foreign)
                spoiled, region = region.deepest, LossRegion(log, ignored=frozenset(p for p, _ in foreign))
                region.deepest = spoiled
            code = _code(region, foreign)
            if region.exit is not None and code is None:
                found.update([_node(region)])
                break
            if code is not None:
                # What a softmax will cover loses the mark: there it is the place where the loss ends.
                for p in (min(graph.users(log.x)), *(p for p, _ in foreign[-1:])):
                    near.setdefault(p, almost(graph.nodes[p], code))
    covered = {c for node in found.values() for c in node.covers}
    return {**{p: n for p, n in near.items() if covered.isdisjoint(n.covers)}, **found}


def _code(region: LossRegion, foreign: tuple[tuple[int, int], ...]) -> str | None:
    graph = region.graph
    ours = {region.x, *(v for p in region.members if p != region.exit for v in graph.nodes[p].outputs)}
    if region.exit is None:
        of_labels = region.picks or region.sums or region.deepest in ("rows_summed", "log_of_softmax")
        return region.deepest if foreign and of_labels else None
    code = shift_code(region.log, [p for p in region.members if p in region.log.members])
    if code is not None:
        return code
    if region.x in graph.escaping:
        return "logits_returned"
    if any(v == region.x for _, v in foreign):
        return "logits_reused"
    return "log_probs_reused" if foreign or not graph.escaping.isdisjoint(ours) else None


def almost(node: Node, code: str) -> Node:
    """A node as it is, marked as the first of what is almost a cross entropy."""
    if node.flags & OpFlags.IS_NEAR_CROSS_ENTROPY:
        return node
    expected, found = NEAR_MISSES[code]
    attrs = (*node.attrs, ("code", code), ("expected", expected), ("found", found))
    return dataclasses.replace(node, flags=node.flags | OpFlags.IS_NEAR_CROSS_ENTROPY, attrs=attrs)


def _node(region: LossRegion) -> tuple[int, Node]:
    graph = region.graph
    inside = dict.fromkeys(region.members)
    assert region.exit is not None
    position = _total(graph, region.exit, inside)
    covers: set[int] = set()
    inputs: dict[int, None] = {}
    for pick in region.picks.values():
        covers.update(pick.covers)
    computed = {v for p in inside for v in graph.nodes[p].outputs}
    for p in inside:
        covers.update(graph.nodes[p].covers)
    computed |= {v for c in covers for v in graph.nodes[c].outputs}
    for c in sorted(covers):
        for v in graph.nodes[c].inputs:
            if v != region.x and v not in computed and graph.values[v].kind != "literal":
                number, more = constant(graph, v)
                if number is None:
                    # Of a mask that was broadcast anew for each of its uses: there it is one value.
                    _, source, more = region.log.masks.get(v, (None, v, ()))
                    inputs[source] = None
                covers.update(more)
    attrs = (("axis", region.axis),)
    outputs = graph.nodes[position].outputs
    return position, Node(
        "cross_entropy", OpFlags.IS_CROSS_ENTROPY, (region.x, *inputs), outputs, tuple(sorted(covers)), attrs
    )


def _total(graph: Graph, start: int, inside: dict[int, None]) -> int:
    """The sum of all rows' losses that the loss goes into and nothing else does, else the loss itself.

    What lies in between joins `inside`.
    """
    position, way = start, []
    for _ in range(_STEPS):
        users, out = graph.consumers(position), graph.nodes[position].outputs[0]
        if len(users) != 1 or out in graph.escaping:
            return start
        position = users[0]
        node = graph.nodes[position]
        if len(node.covers) != 1 or node.inputs.count(out) != 1:
            return start
        way.append(position)
        if node.op == "reduce_sum" and graph.values[node.outputs[0]].aval.shape == ():
            way += _mean(graph, position)
            inside.update(dict.fromkeys(way))
            return way[-1]
        if (node.op not in POINTWISE and node.op not in _ROW_LAYOUT) or _size(graph, position) > _size(graph, start):
            return start
    return start


def _mean(graph: Graph, total: int) -> list[int]:
    """The node that multiplies or divides a sum by a number, where nothing else uses the sum.

    As part of the loss its gradient comes with those of the forward, which else were multiplied once more, as a whole.
    """
    users, out = graph.consumers(total), graph.nodes[total].outputs[0]
    if len(users) != 1 or out in graph.escaping:
        return []
    node = graph.nodes[users[0]]
    if node.op not in ("mul", "div") or len(node.covers) != 1 or node.inputs[0] != out:
        return []
    return users[:1] if graph.literal(node.inputs[1]) is not None else []


def _size(graph: Graph, position: int) -> int:
    return math.prod(graph.values[graph.nodes[position].outputs[0]].aval.shape)


RULE = Rule("cross_entropy", 4, _apply)
