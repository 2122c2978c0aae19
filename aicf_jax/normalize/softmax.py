"""Canonical softmax: every equation between x and ``exp(a x - log sum exp(a x))`` along one axis becomes one node.

From each ``exp`` whose value is summed along an axis the candidates for x are found by going back; the forms of all
values around it (`_log_region`) tell whether one of them is a softmax, whatever the spelling: divided by the sum,
multiplied by its reciprocal, ``exp(log_softmax(x))``, ``exp(x - logsumexp(x))``, base 2, ``where=``, guards against
infinite maxima, casts and broadcasts in between. What is subtracted must be the row maximum of that very x along that
very axis: any other shift moves overflow, NaN and infinity to other places, and is a near miss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from aicf_jax.flags import OpFlags
from aicf_jax.graph import Graph, Node
from aicf_jax.normalize._constants import constant, is_float
from aicf_jax.normalize._log_forms import Form
from aicf_jax.normalize._log_region import LogRegion
from aicf_jax.normalize._rule import Rule
from aicf_jax.normalize.bias import broadcast_source

#: From ``exp`` back to x, and forward to the sum, no further than this.
_STEPS = 8
_PASSED = ("convert_element_type", "copy", "copy_p", "select_n", "mul", "div")
_CASTS = int(OpFlags.IS_CAST | OpFlags.IS_LAYOUT | OpFlags.IS_BROADCAST)
_IS_REDUCTION = int(OpFlags.IS_REDUCTION)

#: code -> (expected, found)
NEAR_MISSES = {  # the most telling last
    "no_max_subtraction": (
        "the row maximum is subtracted before exp",
        "a softmax without it: it overflows where attention does not",
    ),
    "shift_not_row_max": (
        "the row maximum of the same values along the same axis is subtracted before exp",
        "a softmax that subtracts something else: it overflows, and yields NaN, in other places",
    ),
    "softmax_parts_reused": (
        "the maximum, the exponentials and their sum are used by the softmax only",
        "a softmax whose inner values are used elsewhere too (by its gradient? fuse f, then differentiate)",
    ),
}


def _apply(graph: Graph) -> dict[int, Node]:
    found: dict[int, Node] = {}
    near: dict[int, Node] = {}
    for seed, axis in seeds(graph):
        for region in regions(graph, seed, axis):
            position, node, code = _softmax_in(region)
            if node is not None and code is None:
                found[position] = node
                break
            if node is not None and _says_more(node, near.get(position)):
                near[position] = node
    covered = {c for node in found.values() for c in node.covers}
    return {**{p: n for p, n in near.items() if covered.isdisjoint(n.covers)}, **found}


def _says_more(node: Node, known: Node | None) -> bool:
    codes = list(NEAR_MISSES)
    return known is None or codes.index(node.attr("code")) > codes.index(known.attr("code"))


def seeds(graph: Graph) -> Iterator[tuple[int, int]]:
    """``exp`` nodes whose value is summed along an axis, with the axis."""
    for position, node in enumerate(graph.nodes):
        if node.op not in ("exp", "exp2") or not is_float(graph, node.outputs[0]):
            continue
        axes, todo, seen = set(), [position], {position}
        while todo and len(seen) < _STEPS:
            for c in graph.consumers(todo.pop()):
                op = graph.nodes[c].op
                if op == "reduce_sum" and len(graph.eqn(graph.nodes[c].covers[0]).params["axes"]) == 1:
                    axes.add(int(graph.eqn(graph.nodes[c].covers[0]).params["axes"][0]))
                elif op in ("convert_element_type", "copy", "copy_p", "select_n") and c not in seen:
                    seen.add(c)
                    todo.append(c)
        yield from ((position, axis) for axis in sorted(axes))


def regions(graph: Graph, seed: int, axis: int) -> Iterator[LogRegion]:
    """The regions of all candidates for x, those first whose maximum is taken."""
    candidates = list(_candidates(graph, graph.nodes[seed].inputs[0], axis))
    candidates.sort(key=lambda c: not any(graph.nodes[u].op == "reduce_max" for u in graph.users(c[0])))
    for x, along in candidates:
        if is_float(graph, x) and graph.values[x].aval.ndim == graph.values[graph.nodes[seed].outputs[0]].aval.ndim:
            region = LogRegion(graph, x, along)
            if graph.nodes[seed].outputs[0] in region.forms:
                yield region


def _candidates(graph: Graph, vid: int, axis: int) -> Iterator[tuple[int, int]]:
    """Values a log-affine function of which is `vid`, nearest first, each with the axis in its own dimensions."""
    for _ in range(_STEPS):
        yield vid, axis
        position = int(graph.producer[vid])
        node = graph.nodes[position] if position >= 0 else None
        if node is None or len(node.covers) != 1 or node.op not in ("sub", "add", "neg", "transpose", *_PASSED):
            return
        main = [v for v in node.inputs if constant(graph, v)[0] is None and is_float(graph, v)]
        if len(main) == 2 and node.op in ("sub", "add"):
            if graph.values[vid].aval.shape[axis] == 1:
                main = main[:1]  # everything is constant along such an axis
            else:
                main = [v for v in main if axis in broadcast_source(graph, v)[1]]
        if len(main) != 1:
            return
        vid = main[0]
        if node.op == "transpose":
            axis = graph.eqn(node.covers[0]).params["permutation"][axis]


def _softmax_in(region: LogRegion) -> tuple[int, Node | None, str | None]:
    """``(position, node, code)`` of the last softmax of the region; code None for a true one, node None for none."""
    graph, tolerance = region.graph, region.tolerance
    exits = [
        p
        for p in region.members
        if not graph.nodes[p].flags & _CASTS
        and (form := region.forms.get(graph.nodes[p].outputs[0])) is not None
        and form.is_softmax(tolerance)
    ]
    near: tuple[int, Node | None, str | None] = (-1, None, None)
    for position in reversed(exits):
        members = region.needed(position)
        code = shift_code(region, members)
        if not region.is_closed(members, (position,)):
            if code is None and near[1] is None:
                near = position, almost(graph.nodes[position], "softmax_parts_reused"), "softmax_parts_reused"
            continue
        return position, _node(region, position, members, code), code
    return near


def shift_code(region: LogRegion, members: list[int]) -> str | None:
    """Why the exponentials among the members do not subtract the row maximum, None when all of them do."""
    for p in members:
        node = region.graph.nodes[p]
        form = region.forms.get(node.outputs[0])
        if node.op not in ("exp", "exp2") or form is None or form.is_shifted(region.tolerance):
            continue
        if not form.is_softmax(region.tolerance):
            return "shift_not_row_max" if form.terms or _subtracts_reduction(region) else "no_max_subtraction"
    return None


def _subtracts_reduction(region: LogRegion) -> bool:
    """Whether x is itself a difference with the maximum or sum of something: with a maximum along another axis."""
    graph = region.graph
    position = int(graph.producer[region.x])
    if position < 0 or graph.nodes[position].op != "sub":
        return False
    vid = graph.nodes[position].inputs[1]
    for _ in range(_STEPS):
        position = int(graph.producer[vid])
        if position < 0 or not graph.nodes[position].inputs:
            return False
        if graph.nodes[position].flags & _IS_REDUCTION:
            return True
        vid = graph.nodes[position].inputs[-1]
    return False


def almost(node: Node, code: str) -> Node:
    """A node as it is, marked as a near miss of softmax."""
    expected, found = NEAR_MISSES[code]
    attrs = (("code", code), ("expected", expected), ("found", found))
    return dataclasses.replace(node, flags=node.flags | OpFlags.IS_NEAR_SOFTMAX, attrs=attrs)


def softmax_attrs(axis: int, form: Form) -> tuple[tuple[str, object], ...]:
    """What the form of (unnormalized) weights says about them.

    ``axis``: a dimension of x.
    ``permutation``: of the result's dimensions, None where they are x's in their order. (vmap inside the library
      functions moves an axis between the maximum and the rest.)
    ``base``: a in ``exp(a x - L_a)``.
    ``guarded``: a row with +inf yields NaN only there, not everywhere.
    ``keep_when``: None, or for a ``where=`` softmax the truth value of the second input where elements take part.
    ``zeroed``: such a softmax is 0, not NaN, where a row has no elements.
    """
    keep_when = form.mask[1] if isinstance(form.mask, tuple) else None
    permutation = None if form.dims == tuple(range(len(form.dims))) else form.dims
    return (
        ("axis", axis),
        ("permutation", permutation),
        ("base", form.slope),
        ("guarded", form.guarded),
        ("keep_when", keep_when),
        ("zeroed", form.zeroed),
    )


def _node(region: LogRegion, position: int, members: list[int], code: str | None) -> Node:
    inputs, covers = region.surroundings(members)
    outputs = region.graph.nodes[position].outputs
    node = Node("softmax", OpFlags.IS_SOFTMAX, (region.x, *inputs), outputs, covers)
    if code is not None:
        return dataclasses.replace(almost(node, code), op="almost_softmax", flags=OpFlags.IS_NEAR_SOFTMAX)
    return dataclasses.replace(node, attrs=softmax_attrs(region.axis, region.forms[outputs[0]]))


RULE = Rule("softmax", 5, _apply, after=("cross_entropy",))
