"""Canonical scale and shift per channel: ``(x - mean) * rsqrt(var + eps) * scale + bias`` on a convolution's result.

From each convolution the values are followed that are affine in it with coefficients that vary along the channels only:
sums, differences, products and quotients with numbers and with vectors along the channels, casts in between. The last
one that a vector entered becomes one node; the vectors stay inputs, however they were computed (a batch norm with given
statistics, one folded by hand, a learned scale). A coefficient that depends on the convolution itself (the statistics
of this batch), or varies along something else, makes a near miss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from aicf_jax.flags import OpFlags
from aicf_jax.graph import Graph, Node
from aicf_jax.normalize._constants import is_float
from aicf_jax.normalize._roles import roles_of
from aicf_jax.normalize._rule import Rule
from aicf_jax.normalize.bias import broadcast_source

_IS_CONV, _IS_CAST, _IS_LAYOUT, _IS_BIAS = (
    int(f) for f in (OpFlags.IS_CONV, OpFlags.IS_CAST, OpFlags.IS_LAYOUT, OpFlags.IS_BIAS)
)
_HAS_EFFECT = int(OpFlags.HAS_EFFECT)
#: Primitives in which an operand may be a coefficient -> the operands that may.
_COEFFICIENTS = {"add": (0, 1), "sub": (0, 1), "mul": (0, 1), "div": (1,)}
#: Values that pass from one device to another.
_COLLECTIVES = ("psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "all_to_all")

#: code -> (expected, found)
NEAR_MISSES = {
    "batch_statistics": (
        "a scale and shift that do not depend on the convolution",
        "statistics of the convolution's own result, as in training",
    ),
    "synchronized_statistics": (
        "a scale and shift that do not depend on the convolution",
        "statistics of the convolution's own result, averaged over devices",
    ),
    "normalization_axes": (
        "a scale and shift per channel",
        "statistics of the convolution's own result that are not per channel",
    ),
    "scale_axis": ("a scale per channel", "a scale that varies along the batch or the positions"),
    "shift_axis": ("a shift per channel", "a shift that varies along the batch or the positions"),
}


@dataclasses.dataclass(frozen=True)
class _Affine:
    """A value that is affine in `root`: the nodes from there, the vectors they read, equations of broadcasts.

    `by_vector`: the last node is one that a vector enters.
    """

    root: int
    positions: tuple[int, ...] = ()
    vectors: tuple[int, ...] = ()
    covers: tuple[int, ...] = ()
    by_vector: bool = False


def _apply(graph: Graph) -> dict[int, Node]:
    found: dict[int, Node] = {}
    for convolution, root in _roots(graph):
        exit_, near = _follow(graph, convolution, root)
        if exit_ is not None:
            position = exit_.positions[-1]
            outputs = graph.nodes[position].outputs
            covers = {c for p in exit_.positions for c in graph.nodes[p].covers} | set(exit_.covers)
            flags = OpFlags.IS_ELEMENTWISE | OpFlags.IS_AFFINE | OpFlags.HAS_PARAM
            inputs = (root, *dict.fromkeys(exit_.vectors))
            found[position] = Node("channel_affine", flags, inputs, outputs, tuple(sorted(covers)))
        if near is not None:
            position, code = near
            found[position] = _almost(graph.nodes[position], code)
    return found


def _almost(node: Node, code: str) -> Node:
    """The node as it is, marked as a near miss."""
    expected, said = NEAR_MISSES[code]
    attrs = (("code", code), ("expected", expected), ("found", said))
    return dataclasses.replace(node, flags=node.flags | OpFlags.IS_NEAR_AFFINE, attrs=attrs)


def _roots(graph: Graph) -> Iterator[tuple[int, int]]:
    """``(position, value)``: convolutions, and their results seen through casts, layout changes and a bias."""
    for position, node in enumerate(graph.nodes):
        if not node.flags & _IS_CONV or node.op != "conv" or not is_float(graph, node.outputs[0]):
            continue
        todo = [node.outputs[0]]
        while todo:
            vid = todo.pop()
            onward = [graph.nodes[u] for u in graph.users(vid) if _is_seen_through(graph.nodes[u], vid)]
            todo += [n.outputs[0] for n in onward]
            if len(onward) < len(graph.users(vid)):
                yield position, vid


def _is_seen_through(node: Node, vid: int) -> bool:
    if node.inputs[0] != vid or len(node.outputs) != 1:
        return False
    is_bias = node.flags & _IS_BIAS and node.attr("axis") == "features"
    return bool(node.flags & (_IS_CAST | _IS_LAYOUT) or is_bias)


def _follow(graph: Graph, convolution: int, root: int) -> tuple[_Affine | None, tuple[int, str] | None]:
    """``(the longest closed affine value, near miss)``; a near miss is ``(position, code)``.

    It ends where a vector entered: what is scaled by numbers after that belongs to the activation.
    """
    roles = roles_of(graph, root)
    if roles is None or not is_float(graph, root):
        return None, None
    longest: _Affine | None = None
    here, vid = _Affine(root), root
    while True:
        steps = [_step(graph, here, vid, u, roles, convolution) for u in graph.users(vid)]
        near = next((s for s in steps if isinstance(s, tuple)), None)
        if near is not None or len(steps) != 1 or not isinstance(steps[0], _Affine) or vid in graph.escaping:
            return longest, near
        here = steps[0]
        longest = here if here.by_vector else longest
        vid = graph.nodes[here.positions[-1]].outputs[0]


def _step(
    graph: Graph, here: _Affine, vid: int, position: int, roles: str, convolution: int
) -> _Affine | tuple[int, str] | None:
    """The affine value that a user of one computes, a near miss, or None for anything else."""
    node = graph.nodes[position]
    if len(node.covers) != 1 or len(node.outputs) != 1 or node.flags & _HAS_EFFECT:
        return None
    if not is_float(graph, node.outputs[0]) or graph.values[node.outputs[0]].aval.shape != graph.values[vid].aval.shape:
        return None
    positions = (*here.positions, position)
    if node.flags & _IS_CAST or node.op == "neg":
        return dataclasses.replace(here, positions=positions, by_vector=False)
    places = [k for k in _COEFFICIENTS.get(node.op, ()) if node.inputs[k] != vid]
    if len(places) != 1:
        return None
    other = node.inputs[places[0]]
    source, varying, covers = broadcast_source(graph, other)
    if graph.values[source].kind == "literal" or graph.values[other].kind == "literal":
        return dataclasses.replace(here, positions=positions, covers=(*here.covers, *covers), by_vector=False)
    shape = graph.values[vid].aval.shape
    depends = _dependence(graph, source, convolution)
    if any(roles[d] != "n" for d in varying):
        if depends is not None and len(varying) < sum(n != 1 for n in shape):
            return position, "normalization_axes"
        is_broadcast = bool(covers) or any(a != b for a, b in zip(graph.values[other].aval.shape, shape, strict=False))
        if depends is not None or len(varying) == sum(n != 1 for n in shape) or not is_broadcast:
            return None  # data of full size: a residual, a gate
        return position, "scale_axis" if node.op in ("mul", "div") else "shift_axis"
    if depends is not None:
        return position, depends
    is_vector = graph.values[source].aval.ndim > 0
    return _Affine(here.root, positions, (*here.vectors, source), (*here.covers, *covers), is_vector)


def _dependence(graph: Graph, vid: int, convolution: int) -> str | None:
    """How a value depends on a convolution: the code of the near miss, None where it does not."""
    todo, seen, depends, synchronized = [vid], {vid}, False, False
    while todo:
        position = int(graph.producer[todo.pop()])
        if position == convolution:
            depends = True
        elif position > convolution:
            synchronized = synchronized or graph.nodes[position].op in _COLLECTIVES
            new = [v for v in graph.nodes[position].inputs if v not in seen]
            seen.update(new)
            todo += new
    if not depends:
        return None
    return "synchronized_statistics" if synchronized else "batch_statistics"


RULE = Rule("channel_affine", 12, _apply, after=("conv", "bias"))
