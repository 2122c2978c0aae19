"""Stage 5: a legal match becomes one more abstract node.

The fused node takes its anchor's place and the chain's result keeps its VID, so everything around it stays connected;
nodes nobody needs any more become NOP. No kernel is chosen here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding

from aicf_jax import _compat
from aicf_jax.fingerprint import Keys
from aicf_jax.flags import OpFlags
from aicf_jax.graph import NOP, Graph, Node
from aicf_jax.ops import FusedOp, Step
from aicf_jax.pattern import Match


@dataclasses.dataclass(frozen=True)
class Region:
    """A match as an operation: the VIDs it reads and computes, and the `FusedOp` itself."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    op: FusedOp


def region(match: Match, context: Any) -> Region:
    """The operation a match stands for: its inputs in order of first use, one `Step` for each canonical node.

    Where the backward is derived as a whole and says so (`Composite.apart`), an array that enters several products, or
    what was absorbed in front of them, is an input for each: its gradients have different rows, and jax adds them up.
    """
    graph, nodes = match.graph, match.all_nodes
    inside = {v for n in nodes for v in n.outputs}
    composite = match.pattern.rewrite.composite
    apart = _in_front_of_products(match) if composite is not None and composite.apart else frozenset()
    inputs: list[int] = []
    slots: dict[int, int] = {}
    operands_of: list[tuple[tuple[int, ...], list[int]]] = []
    for n in nodes:
        operands = tuple(v for v in n.inputs if graph.values[v].kind != "literal")
        found = []
        for v in operands:
            if v in inside:
                found.append(-1)
            elif v in slots and apart.isdisjoint(n.outputs):
                found.append(slots[v])
            else:
                slots[v] = len(inputs)
                found.append(len(inputs))
                inputs.append(v)
        operands_of.append((operands, found))
    steps: list[Step] = []
    free = len(inputs)
    for n, (operands, found) in zip(nodes, operands_of, strict=True):
        places = tuple(slots[v] if s < 0 else s for v, s in zip(operands, found, strict=True))
        steps.append(Step(_role(graph, n), n.op, _body(graph, n, operands), places, n.attr("from_output", False)))
        slots.update(zip(n.outputs, range(free, free + len(n.outputs)), strict=True))
        free += len(n.outputs)
    outputs = _outputs(match)
    semantic = match.pattern.rewrite
    op = FusedOp(
        semantic=semantic,
        blob=semantic.schema.pack(semantic.attributes(match)),
        steps=tuple(steps),
        results=tuple(slots[v] for v in outputs),
        in_avals=tuple(graph.values[v].aval for v in inputs),
        key=step_key(steps),
        context=context,
        site=match.site,
        pattern=match.pattern.name,
    )
    return Region(tuple(inputs), outputs, op)


def _in_front_of_products(match: Match) -> frozenset[int]:
    """Results of products, and of absorbed nodes that nothing in the operation uses but those."""
    graph = match.graph
    found = {v for n in match.nodes if n.flags & OpFlags.IS_GEMM_LIKE for v in n.outputs}
    inside = {*match.positions, *match.absorbed}
    for position in reversed([i for i in graph.order if i in match.absorbed]):
        outputs = graph.nodes[position].outputs
        users = {u for v in outputs for u in graph.users(v) if u in inside}
        if all(not found.isdisjoint(graph.nodes[u].outputs) for u in users):
            found.update(outputs)
    return frozenset(found)


def rewrite(graph: Graph, rewrites: Sequence[tuple[Match, Region, FusedOp]]) -> Graph:
    """The graph with each operation at its anchor's place. The matches share no node; the caller verifies."""
    new: dict[int, Node] = {}
    for match, found, op in rewrites:
        anchor, *rest = match.positions
        covers = tuple(sorted({c for n in match.nodes for c in n.covers}))
        new[anchor] = Node(op.semantic.name, OpFlags.IS_FUSED, found.inputs, found.outputs, covers, payload=op)
        new.update(dict.fromkeys(rest, NOP))
    return graph.replace(new)


def _outputs(match: Match) -> tuple[int, ...]:
    """The chain's result first, then inner values that are used outside (only shared tests let them through).

    Further results of the last node, as the statistics of a batch norm, are inner values too.
    """
    graph, last = match.graph, match.nodes[-1].outputs[0]
    inside = {*match.positions, *match.absorbed}
    extra = [
        v
        for n in match.nodes
        for v in n.outputs
        if v != last and (v in graph.escaping or any(u not in inside for u in graph.users(v)))
    ]
    return (last, *extra)


#: Primitives that are linear in their one operand, whatever their parameters.
_LINEAR = frozenset(
    ("broadcast_in_dim", "convert_element_type", "copy", "copy_p", "expand_dims", "neg", "reduce_sum")
    + ("reshape", "slice", "split", "squeeze", "transpose")
)


def _role(graph: Graph, node: Node) -> str:
    if node.flags & (OpFlags.IS_GEMM_LIKE | OpFlags.IS_CONV):
        return "bilinear"
    if node.flags & OpFlags.IS_ACTIVATION:
        return "pointwise"
    if node.flags & OpFlags.IS_SOFTMAX:
        return "softmax"
    if node.flags & OpFlags.IS_NORMALIZE:
        return "normalize"
    if node.flags & (OpFlags.IS_NORMALIZATION | OpFlags.IS_BATCH_NORM):
        return "norm"
    if node.flags & OpFlags.IS_CROSS_ENTROPY:
        return "loss"
    if node.flags & OpFlags.IS_AFFINE:
        return "joint"
    if node.flags & OpFlags.IS_ACTIVATION_GRAD:
        return "gradient"
    if _is_linear(graph, node):
        return "linear"
    # A function of one operand has the derivative of its equations, element by element or not.
    return "pointwise" if sum(graph.values[v].kind != "literal" for v in node.inputs) == 1 else "general"


def _is_linear(graph: Graph, node: Node) -> bool:
    """Whether a node is linear in all its operands together: a constant that is added makes it affine, which is not."""
    if node.flags & OpFlags.IS_BIAS:
        return True
    if len(node.covers) != 1:
        return False
    eqn = graph.eqn(node.covers[0])
    fixed = [isinstance(v, _compat.Literal) for v in eqn.invars]
    match eqn.primitive.name:
        case "add" | "add_any" | "sub":
            return not any(fixed)
        case "mul":
            return fixed.count(False) == 1
        case "div":
            return fixed == [False, True]
        case name:
            return name in _LINEAR


def _body(graph: Graph, node: Node, operands: Sequence[int]) -> Any:
    """A jaxpr from operands to results of a node. Each operand is its own parameter, also when two are the same."""
    if len(set(operands)) < len(operands):
        eqn = graph.eqn(node.covers[0])
        fresh = [v if isinstance(v, _compat.Literal) else _compat.new_var(v.aval) for v in eqn.invars]
        parameters = [v for v in fresh if not isinstance(v, _compat.Literal)]
        return _compat.make_jaxpr_object(parameters, eqn.outvars, [eqn.replace(invars=fresh)], _compat.no_effects)
    eqns = [_without_mesh(graph.eqn(c)) for c in node.covers]
    parameters = [graph.values[v].atom for v in operands]
    return _compat.make_jaxpr_object(parameters, [graph.values[v].atom for v in node.outputs], eqns, _compat.no_effects)


def _without_mesh(eqn: Any) -> Any:
    """An equation without a sharding of its result that leaves all to XLA, as jax writes where arguments have a mesh.

    Elsewhere such a result is one of another mesh than its neighbours.
    """
    found = eqn.params.get("sharding")
    if not isinstance(found, NamedSharding) or any(p is not None for p in found.spec):
        return eqn
    if found.mesh.manual_axes or found.mesh.explicit_axes:
        return eqn
    return eqn.replace(params={**eqn.params, "sharding": None})


def step_key(steps: Sequence[Step]) -> tuple[Any, ...]:
    """The structural key of an operation's steps."""
    keys = Keys()
    return tuple((s.role, s.name, s.operands, s.from_output, keys.program(s.body)) for s in steps)
