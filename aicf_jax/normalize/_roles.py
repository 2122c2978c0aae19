"""Which role each dimension of a value plays in the matrix product or convolution it comes from.

``"b"`` batch, ``"m"`` free dimension of the left operand, ``"n"`` free dimension of the right operand (the features);
of a convolution ``"n"`` the channels, ``"s"`` batch and positions. The roles follow the value through casts,
transposes, slices, biases and reshapes that keep the features apart from the rest.
"""

from __future__ import annotations

from typing import Any

from aicf_jax.flags import OpFlags
from aicf_jax.graph import Graph


def gemm_roles(dimension_numbers: Any, lhs_ndim: int, rhs_ndim: int) -> str:
    """Roles of a ``dot_general``'s result: batch, left free, right free, as XLA orders them."""
    (lhs_contract, rhs_contract), (lhs_batch, _) = dimension_numbers
    batch = len(lhs_batch)
    return "b" * batch + "m" * (lhs_ndim - batch - len(lhs_contract)) + "n" * (rhs_ndim - batch - len(rhs_contract))


def roles_of(graph: Graph, vid: int) -> str | None:
    """One letter per dimension, None when the value is no product or convolution seen through layout and bias."""
    through = []
    while True:
        position = int(graph.producer[vid])
        if position < 0:
            return None
        node = graph.nodes[position]
        if node.flags & (OpFlags.IS_GEMM_LIKE | OpFlags.IS_CONV):
            break
        if not node.flags & (OpFlags.IS_CAST | OpFlags.IS_LAYOUT | OpFlags.IS_SLICE | OpFlags.IS_BIAS):
            return None
        through.append(node)
        vid = node.inputs[0]
    roles: str | None = node.attr("roles")
    for step in reversed(through):
        if roles is not None and step.flags & OpFlags.IS_LAYOUT:
            roles = _through_layout(graph, step, roles)
    return roles


def _through_layout(graph: Graph, node: Any, roles: str) -> str | None:
    eqn = graph.eqn(node.covers[-1])
    before, after = (graph.values[v].aval.shape for v in (node.inputs[0], node.outputs[0]))
    if eqn.primitive.name == "transpose":
        return "".join(roles[d] for d in eqn.params["permutation"])
    if eqn.primitive.name == "squeeze":
        dropped = {d % len(before) for d in eqn.params["dimensions"]}
        return "".join(r for d, r in enumerate(roles) if d not in dropped)
    if eqn.primitive.name != "reshape" or eqn.params.get("dimensions") is not None:
        return None
    return _through_reshape(before, after, roles)


def _through_reshape(before: tuple[int, ...], after: tuple[int, ...], roles: str) -> str | None:
    """Groups of dimensions with equal products keep their role when a group has only one; a mixed group loses it."""
    new, i, j = "", 0, 0
    while i < len(before) or j < len(after):
        a, b, start_i, start_j = 1, 1, i, j
        while i == start_i or j == start_j or a != b:
            if (a <= b or j == len(after)) and i < len(before):
                a, i = a * before[i], i + 1
            elif j < len(after):
                b, j = b * after[j], j + 1
            elif a != b:
                return None
            else:
                break
            if 0 in (a, b):
                return None
        group = set(roles[start_i:i])
        if len(group) > 1 and len({r for d, r in zip(before[start_i:i], roles[start_i:i], strict=True) if d > 1}) > 1:
            return None
        wide = {r for d, r in zip(before[start_i:i], roles[start_i:i], strict=True) if d > 1} or group or {"m"}
        # Of several dimensions of one the features': any would do, but it is the same in every process.
        new += ("n" if "n" in wide else min(wide)) * (j - start_j)
    return new if len(new) == len(after) else None
