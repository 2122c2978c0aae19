"""Stage 5: a legal match becomes one more abstract node.

The fused node takes its anchor's place and the chain's result keeps its VID, so everything around it stays connected;
nodes nobody needs any more become NOP. No kernel is chosen here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

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

    Where the backward is derived as a whole (`Composite`), an array that enters several products (x as queries, keys
    and values) is an input for each of them: its gradients have different rows, and jax adds them up.
    """
    graph, nodes = match.graph, match.all_nodes
    inside = {v for n in nodes for v in n.outputs}
    apart = match.pattern.rewrite.composite is not None
    inputs: list[int] = []
    slots: dict[int, int] = {}
    operands_of: list[tuple[tuple[int, ...], list[int]]] = []
    for n in nodes:
        operands = tuple(v for v in n.inputs if graph.values[v].kind != "literal")
        found = []
        for v in operands:
            if v in inside:
                found.append(-1)
            elif v in slots and not (apart and n.flags & OpFlags.IS_GEMM_LIKE):
                found.append(slots[v])
            else:
                slots[v] = len(inputs)
                found.append(len(inputs))
                inputs.append(v)
        operands_of.append((operands, found))
    steps = []
    for n, (operands, found) in zip(nodes, operands_of, strict=True):
        places = tuple(slots[v] if s < 0 else s for v, s in zip(operands, found, strict=True))
        steps.append(Step(_role(n), n.op, _body(graph, n, operands), places, n.attr("from_output", False)))
        slots[n.outputs[0]] = len(inputs) + len(steps) - 1
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
    """The chain's result first, then inner values that are used outside (only shared tests let them through)."""
    graph, last = match.graph, match.nodes[-1].outputs[0]
    inside = {*match.positions, *match.absorbed}
    extra = [
        v
        for n in match.nodes[:-1]
        for v in n.outputs
        if v in graph.escaping or any(u not in inside for u in graph.users(v))
    ]
    return (last, *extra)


def _role(node: Node) -> str:
    if node.flags & OpFlags.IS_GEMM_LIKE:
        return "bilinear"
    if node.flags & OpFlags.IS_ACTIVATION:
        return "pointwise"
    if node.flags & OpFlags.IS_SOFTMAX:
        return "softmax"
    if node.flags & OpFlags.IS_NORMALIZE:
        return "normalize"
    if node.flags & OpFlags.IS_CROSS_ENTROPY:
        return "loss"
    return "gradient" if node.flags & OpFlags.IS_ACTIVATION_GRAD else "linear"


def _body(graph: Graph, node: Node, operands: Sequence[int]) -> Any:
    """A jaxpr from the operands to the node's result. Each operand is its own parameter, also when two are the same."""
    if len(set(operands)) < len(operands):
        eqn = graph.eqn(node.covers[0])
        fresh = [v if isinstance(v, _compat.Literal) else _compat.new_var(v.aval) for v in eqn.invars]
        parameters = [v for v in fresh if not isinstance(v, _compat.Literal)]
        return _compat.make_jaxpr_object(parameters, eqn.outvars, [eqn.replace(invars=fresh)], _compat.no_effects)
    eqns = [graph.eqn(c) for c in node.covers]
    parameters = [graph.values[v].atom for v in operands]
    return _compat.make_jaxpr_object(parameters, [graph.values[node.outputs[0]].atom], eqns, _compat.no_effects)


def step_key(steps: Sequence[Step]) -> tuple[Any, ...]:
    """The structural key of an operation's steps."""
    keys = Keys()
    return tuple((s.role, s.name, s.operands, s.from_output, keys.program(s.body)) for s in steps)
