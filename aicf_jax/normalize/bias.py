"""Canonical bias: adding to a matrix product, or a convolution, something that is constant along its rows or positions.

The addend is followed back through broadcasts and reshapes to the vector it was. Which dimensions it varies along
decides: features only is a bias; everything is a residual (no bias); rows but not everything is the wrong dimension,
which is named as such so that the refusal can say so.
"""

from __future__ import annotations

from aicf_jax.flags import OpFlags
from aicf_jax.graph import Graph, Node
from aicf_jax.normalize._roles import roles_of
from aicf_jax.normalize._rule import Rule


def broadcast_source(graph: Graph, vid: int) -> tuple[int, set[int], tuple[int, ...]]:
    """What a value was broadcast from.

    Returns ``(source, varying, covers)``: the VID at the origin, the dimensions of `vid` along which the value can
    differ, and the equations in between (each may be recomputed: they move no data of their own).
    """
    shape = graph.values[vid].aval.shape
    where = {d: d for d in range(len(shape))}  # dimension of `vid` -> dimension of the current value
    covers: list[int] = []
    while True:
        position = int(graph.producer[vid])
        node = graph.nodes[position] if position >= 0 else None
        if node is None or len(node.covers) != 1 or not node.inputs:
            break
        eqn, operand = graph.eqn(node.covers[0]), graph.values[node.inputs[0]].aval
        if node.op == "broadcast_in_dim" and len(node.inputs) == 1:
            origin = {d: i for i, d in enumerate(eqn.params["broadcast_dimensions"])}
            size = graph.values[vid].aval.shape
            back = {d: i for d, i in origin.items() if operand.shape[i] == size[d]}
        elif node.op in ("reshape", "squeeze", "expand_dims"):
            back = unit_reshape(operand.shape, graph.values[vid].aval.shape)
            if back is None:
                break
        else:
            break
        where = {d: back[i] for d, i in where.items() if i in back}
        covers.append(node.covers[0])
        vid = node.inputs[0]
    varying = {d for d in where if shape[d] != 1}
    return vid, varying, tuple(sorted(covers))


def unit_reshape(before: tuple[int, ...], after: tuple[int, ...]) -> dict[int, int] | None:
    """Dimension map of a reshape that only adds or drops dimensions of one, None for any other."""
    old = [i for i, n in enumerate(before) if n != 1]
    new = [i for i, n in enumerate(after) if n != 1]
    if [before[i] for i in old] != [after[i] for i in new]:
        return None
    return dict(zip(new, old, strict=True))


def _apply(graph: Graph) -> dict[int, Node]:
    found = {}
    for i, node in enumerate(graph.nodes):
        if node.op != "add" or len(node.inputs) != 2:
            continue
        for main, other in (node.inputs, node.inputs[::-1]):
            canonical = _as_bias(graph, node, main, other)
            if canonical is not None:
                found[i] = canonical
                break
    return found


def _as_bias(graph: Graph, node: Node, main: int, other: int) -> Node | None:
    out = graph.values[node.outputs[0]].aval
    addend = graph.values[other].aval
    if graph.values[main].aval.shape != out.shape or addend.ndim != out.ndim or graph.literal(other) is not None:
        return None
    roles = roles_of(graph, main)
    if roles is None:
        return None
    source, varying, covers = broadcast_source(graph, other)
    if source == main or graph.values[source].kind == "literal" or graph.values[source].aval.ndim == 0:
        return None
    wide = {d for d, n in enumerate(out.shape) if n != 1}
    if _along(roles, varying, "ms") and varying == wide:
        return None  # a whole matrix: a residual connection
    # Features are the free dimensions of the right operand. A product that was transposed since has them first and the
    # left operand's last: `(w.T @ x.T).T` is `x @ w`, so there a bias may run along those.
    along = "n" if not _along(roles, varying, "ms") else "m"
    axis = "features" if along == "n" or (roles[-1] == "m" and not _along(roles, varying, "n")) else "rows"
    along_roles = "n" if along == "n" else "ms"
    if _along(roles, wide, along_roles) and not _along(roles, varying, along_roles):
        return None  # constant along the features as well: an offset, not a bias
    flags = OpFlags.IS_ELEMENTWISE | OpFlags.IS_BIAS | OpFlags.HAS_PARAM
    attrs = (("axis", axis), ("along", along))
    return Node("bias_add", flags, (main, source), node.outputs, (*covers, *node.covers), attrs)


def _along(roles: str, dimensions: set[int], which: str) -> set[int]:
    return {d for d in dimensions if roles[d] in which}


RULE = Rule("bias", 10, _apply, after=("gemm", "conv"))
