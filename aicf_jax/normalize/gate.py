"""Canonical gates: ``act(g) * u`` where g and u are two projections of one value, or the two halves of one projection.

From both operands of a multiplication the way back to a matrix product is followed (`branch`): through casts, layout
changes, slices, one bias and one activation. What the two ways say decides (`_verdict`): a gate, a near miss with its
reason, or nothing of the kind. The node covers the multiplication alone; its first input is the gate's side.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from aicf_jax.fingerprint import Keys, Uncacheable
from aicf_jax.flags import OpFlags
from aicf_jax.graph import Graph, Node
from aicf_jax.normalize._constants import is_float
from aicf_jax.normalize._roles import roles_of
from aicf_jax.normalize._rule import Rule
from aicf_jax.normalize._values import same_value
from aicf_jax.normalize.bias import broadcast_source

#: From the multiplication back to a product, no further than this.
_STEPS = 12
_IS_PRODUCT, _IS_BIAS, _IS_ACTIVATION, _IS_SLICE, _IS_LAYOUT, _IS_BROADCAST = (
    int(f)
    for f in (
        OpFlags.IS_GEMM_LIKE,
        OpFlags.IS_BIAS,
        OpFlags.IS_ACTIVATION,
        OpFlags.IS_SLICE,
        OpFlags.IS_LAYOUT,
        OpFlags.IS_BROADCAST,
    )
)
_PASSED = int(OpFlags.IS_CAST) | _IS_LAYOUT | _IS_BIAS | _IS_ACTIVATION | _IS_SLICE | _IS_BROADCAST

#: code -> (expected, found)
NEAR_MISSES = {
    "not_a_projection": ("the gate multiplies a projection", "the gate multiplies another value"),
    "different_inputs": ("two projections of one value", "projections of different values"),
    "activation_on_both_sides": ("an activation on one side of the product", "an activation on both sides"),
    "gate_used_elsewhere": ("the gate is used by the product only", "the gate is used elsewhere too"),
    "up_used_elsewhere": (
        "the up-projection is used by the product only",
        "the up-projection is used elsewhere too",
    ),
    "projection_used_elsewhere": (
        "the projection is used by its two halves only",
        "the projection is used elsewhere too",
    ),
    "sum_not_product": ("gate and up-projection are multiplied", "gate and up-projection are added"),
    "unequal_parts": ("two halves of one projection", "parts that are no halves"),
    "same_half_twice": ("two projections, or both halves of one", "the same projection, or half of one, twice"),
    "features_not_last": (
        "two projections of one value with the features last",
        "projections with other dimensions last",
    ),
    "different_shapes": ("gate and up-projection of one shape", "one of them repeated to the shape of the other"),
    "different_layouts": ("gate and up-projection laid out alike", "one of them transposed or reshaped"),
    "split_axis": ("a projection split along its features", "a projection split along its rows"),
}


@dataclasses.dataclass(frozen=True)
class Branch:
    """The way from a product to one operand of a multiplication.

    Attributes:
      positions: nodes in order of execution, the product first.
      vid: the operand.
      slices: value that each slice on the way reads -> value it gives.
    """

    positions: tuple[int, ...]
    vid: int
    activation: Node | None
    slices: tuple[tuple[int, int], ...]
    broadcast: bool

    @property
    def product(self) -> int:
        return self.positions[0]


def branch(graph: Graph, vid: int) -> Branch | None:
    """The branch that ends in a value, None where there is none or it has two biases in a row or two activations."""
    positions: list[int] = []
    slices: list[tuple[int, int]] = []
    activation, broadcast, biases, value = None, False, 0, vid
    for _ in range(_STEPS):
        position = int(graph.producer[value])
        if position < 0:
            return None
        node = graph.nodes[position]
        positions.append(position)
        if node.flags & _IS_PRODUCT:
            is_whole = len(node.covers) == 1 and is_float(graph, node.outputs[0])
            return Branch(tuple(reversed(positions)), vid, activation, tuple(slices), broadcast) if is_whole else None
        if not node.flags & _PASSED or (node.flags & _IS_BROADCAST and len(node.inputs) != 1):
            return None
        if node.flags & _IS_ACTIVATION:
            if activation is not None or biases:
                return None
            activation = node
        biases += bool(node.flags & _IS_BIAS)
        if biases > 1 or (node.flags & _IS_BIAS and node.attr("axis") != "features"):
            return None
        if node.flags & _IS_SLICE:
            slices.append((node.inputs[0], value))
        broadcast = broadcast or bool(node.flags & _IS_BROADCAST)
        value = node.inputs[0]
    return None


def branches(graph: Graph, node: Node) -> tuple[Branch | None, Branch | None]:
    """``(gate, up)``: the branch with the activation first; in the order of the operands where neither has one."""
    first, second = (branch(graph, v) for v in node.inputs)
    if second is not None and second.activation is not None and (first is None or first.activation is None):
        return second, first
    return first, second


def _apply(graph: Graph) -> dict[int, Node]:
    found = {}
    keys = Keys()
    for position, node in enumerate(graph.nodes):
        if node.op not in ("mul", "add") or len(node.inputs) != 2 or len(node.covers) != 1:
            continue
        if node.flags & OpFlags.IS_SCALE or not is_float(graph, node.outputs[0]):
            continue
        gate, up = branches(graph, node)
        if gate is None:
            continue
        try:
            code = _verdict(graph, position, gate, up, keys)
        except Uncacheable:
            continue  # a parameter that cannot be compared
        if code == "gate":
            assert up is not None
            flags = OpFlags.IS_ELEMENTWISE | OpFlags.IS_JOIN | OpFlags.IS_GATE
            found[position] = dataclasses.replace(node, op="gate", flags=flags, inputs=(gate.vid, up.vid))
        elif code is not None:
            found[position] = _almost(node, gate, code)
    return found


def _almost(node: Node, gate: Branch, code: str) -> Node:
    """The node as it is, marked as a near miss of a gate."""
    expected, said = NEAR_MISSES[code]
    flags, inputs = node.flags | OpFlags.IS_NEAR_GATE, node.inputs
    if code == "activation_on_both_sides":
        # Reached from one of the two alike branches only, so that it is reported once.
        flags &= ~OpFlags.IS_JOIN
        inputs = (gate.vid, *(v for v in node.inputs if v != gate.vid))
    return dataclasses.replace(
        node, flags=flags, inputs=inputs, attrs=(("code", code), ("expected", expected), ("found", said))
    )


def _verdict(graph: Graph, position: int, gate: Branch, up: Branch | None, keys: Keys) -> str | None:
    """``"gate"``, the code of a near miss, or None for what does not resemble a gate."""
    node = graph.nodes[position]
    if up is None:
        other = next((v for v in node.inputs if v != gate.vid), gate.vid)
        resembles = node.op == "mul" and gate.activation is not None and not gate.broadcast
        return "not_a_projection" if resembles and _is_whole(graph, other, node.outputs[0]) else None
    code = (
        _one_projection(graph, gate, up, keys)
        if gate.product == up.product
        else _two_projections(graph, gate, up, keys)
    )
    if code is None and graph.values[gate.vid].aval.shape != graph.values[up.vid].aval.shape:
        code = "different_shapes"  # a product of arrays repeats dimensions of one
    if code is None and gate.activation is not None and up.activation is not None:
        code = "activation_on_both_sides"
    if node.op == "add":
        return "sum_not_product" if code is None and gate.activation is not None else None
    if code is None:
        code = _used_elsewhere(graph, position, gate, up)
    if code is None:
        return "gate"
    return code if gate.activation is not None else None


def _is_whole(graph: Graph, vid: int, result: int) -> bool:
    """Whether an operand is data of the full shape: no number and nothing that was broadcast."""
    return len(broadcast_source(graph, vid)[1]) == sum(n != 1 for n in graph.values[result].aval.shape) > 0


def _two_projections(graph: Graph, gate: Branch, up: Branch, keys: Keys) -> str | None:
    if gate.slices or up.slices:
        return "unequal_parts"
    if gate.broadcast or up.broadcast:
        return "not_a_projection"
    common = _common_operands(graph, gate, up, keys)
    if common and _layouts(graph, gate, up, keys) != _layouts(graph, up, gate, keys):
        return "different_layouts"
    roles = roles_of(graph, gate.vid if gate.activation is None else gate.activation.inputs[0])
    # The features are the free dimensions of the operand that is not common, and come last.
    if common and roles and any(roles[-1] == "nm"[i] for i in common):
        return None
    turned = any(graph.nodes[p].flags & _IS_LAYOUT for p in gate.positions)
    return "features_not_last" if common and turned else "different_inputs"


def _common_operands(graph: Graph, gate: Branch, up: Branch, keys: Keys) -> list[int]:
    """The operands that are one value in both products and contracted along the same dimensions."""
    first, second = graph.nodes[gate.product], graph.nodes[up.product]
    return [
        i
        for i in (0, 1)
        if _reads(graph, first, i) == _reads(graph, second, i)
        and same_value(graph, first.inputs[i], second.inputs[i], keys)
    ]


def _layouts(graph: Graph, branch: Branch, other: Branch, keys: Keys) -> list[Any]:
    """The layout changes of one branch that the other does not share, in order."""
    found = []
    for p in branch.positions:
        node = graph.nodes[p]
        if node.flags & _IS_LAYOUT and p not in other.positions:
            eqn = graph.eqn(node.covers[0])
            shape = graph.values[node.outputs[0]].aval.shape
            found.append((node.op, keys.params(eqn.primitive.name, eqn.params), shape))
    return found


def _reads(graph: Graph, product: Node, operand: int) -> Any:
    """Which dimensions of an operand a product contracts and which are batch."""
    contract, batch = graph.eqn(product.covers[0]).params["dimension_numbers"]
    return tuple(contract[operand]), tuple(batch[operand])


def _one_projection(graph: Graph, gate: Branch, up: Branch, keys: Keys) -> str | None:
    """Whether two branches from one product are its two halves along its features."""
    if not gate.slices and not up.slices:
        return "same_half_twice"
    if len(gate.slices) != 1 or len(up.slices) != 1 or gate.broadcast or up.broadcast:
        return "unequal_parts"
    ((source, one),), ((other_source, other),) = gate.slices, up.slices
    if source != other_source:
        return "unequal_parts"
    parts = part(graph, one), part(graph, other)
    if parts[0] is None or parts[1] is None:
        return "unequal_parts"
    if parts[0] == parts[1]:
        return "same_half_twice"
    (axis, *_), size = parts[0], graph.values[source].aval.shape[parts[0][0]]
    taken = [set(range(*p[1:])) for p in parts if p is not None and p[0] == axis]
    if len(taken) != 2 or len(taken[0]) != len(taken[1]) or taken[0] | taken[1] != set(range(size)):
        return "unequal_parts"
    roles = roles_of(graph, source)
    if roles is None or not (roles[axis] == "n" or roles[axis] == roles[-1] == "m"):
        return "split_axis"
    return None if _layouts(graph, gate, up, keys) == _layouts(graph, up, gate, keys) else "different_layouts"


def part(graph: Graph, vid: int) -> tuple[int, int, int, int] | None:
    """``(axis, start, limit, stride)`` of what a slice or split takes; None where it cuts no axis, or several."""
    node = graph.nodes[int(graph.producer[vid])]
    params = graph.eqn(node.covers[0]).params
    if node.op == "split":
        start = sum(params["sizes"][: node.outputs.index(vid)])
        return params["axis"], start, start + params["sizes"][node.outputs.index(vid)], 1
    before = graph.values[node.inputs[0]].aval.shape
    strides = params["strides"] or (1,) * len(before)
    cuts = [
        (d, start, limit, stride)
        for d, (n, start, limit, stride) in enumerate(
            zip(before, params["start_indices"], params["limit_indices"], strides, strict=True)
        )
        if (start, limit, stride) != (0, n, 1)
    ]
    return cuts[0] if len(cuts) == 1 else None


def _used_elsewhere(graph: Graph, position: int, gate: Branch, up: Branch) -> str | None:
    """Which of the values in between somebody else needs."""
    shared = set(gate.positions) & set(up.positions)
    inside = {*gate.positions, *up.positions, position}
    for code, members in (
        ("projection_used_elsewhere", shared),
        ("gate_used_elsewhere", set(gate.positions) - shared),
        ("up_used_elsewhere", set(up.positions) - shared),
    ):
        for p in members:
            if not graph.escaping.isdisjoint(graph.nodes[p].outputs) or set(graph.consumers(p)) - inside:
                return code
    return None


RULE = Rule("gate", 90, _apply, after=("gemm", "bias", "activation"))
