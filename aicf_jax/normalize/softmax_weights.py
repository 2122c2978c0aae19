"""Softmax weights that are normalized after the product with the values: ``(exp(x - max x) @ v) / sum exp(x - max x)``.

The exponentials become the node ``softmax_weights``, the division of the product by their sum the node ``normalize``,
whose second input are the weights. A division counts when every dimension of the divisor is the dimension of the
weights it stands beside, and the product contracts the axis of the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from aicf_jax.flags import OpFlags
from aicf_jax.graph import Graph, Node
from aicf_jax.normalize._log_forms import Dims
from aicf_jax.normalize._log_region import LogRegion
from aicf_jax.normalize._rule import Rule
from aicf_jax.normalize.bias import unit_reshape
from aicf_jax.normalize.softmax import almost, regions, seeds, shift_code, softmax_attrs

#: From the weights to the division, no further than this.
_STEPS = 16
_ELEMENTWISE, _IS_LAYOUT, _IS_CAST = (int(f) for f in (OpFlags.IS_ELEMENTWISE, OpFlags.IS_LAYOUT, OpFlags.IS_CAST))


def _apply(graph: Graph) -> dict[int, Node]:
    found: dict[int, Node] = {}
    for seed, axis in seeds(graph):
        if graph.nodes[seed].flags & OpFlags.IS_NEAR_SOFTMAX:
            continue
        near: dict[int, Node] = {}
        for region in regions(graph, seed, axis):
            hit = _late(region, seed)
            if len(hit) == 2:
                found.update(hit)
                break
            near = near or hit
        else:
            found.update(near)
    return found


def _late(region: LogRegion, seed: int) -> dict[int, Node]:
    """Both nodes; only the marked ``exp`` for a near miss; nothing otherwise."""
    graph = region.graph
    weights = graph.nodes[seed].outputs[0]
    members = region.needed(seed)
    for divisor, division, divided in _divisions(region, seed):
        sums = region.needed(divisor, (weights,))
        starts = [p for p in region.users(seed) if p not in sums]
        if not set(sums).isdisjoint(members) or not any(
            _lines_up(region, weights, start, division, divided, divisor) for start in starts
        ):
            continue
        code = shift_code(region, [seed])
        if not _is_closed(region, members, sums, {seed: starts[:1], divisor: [division]}):
            code = "softmax_parts_reused" if code is None else code
        if code is not None:
            return {seed: almost(graph.nodes[seed], code)}
        return _nodes(region, seed, members, sums, division, divided)
    return {}


def _divisions(region: LogRegion, seed: int) -> Iterator[tuple[int, int, int]]:
    """``(divisor, division, divided)``: the node of a sum of the weights, who divides by it, and which value."""
    graph = region.graph
    weights = region.forms[graph.nodes[seed].outputs[0]]
    if not weights.slope or weights.loose:
        return
    for p in region.members:
        vid = graph.nodes[p].outputs[0]
        form = region.forms.get(vid)
        sign = form.normalizes(weights, region.tolerance) if form is not None else 0
        for user in graph.consumers(p) if sign else ():
            node = graph.nodes[user]
            if user in region.members or len(node.covers) != 1 or node.op != ("div" if sign > 0 else "mul"):
                continue
            others = [v for v in node.inputs if v != vid]
            if len(others) == 1 and (sign < 0 or node.inputs[1] == vid):
                yield p, user, others[0]


def _is_closed(
    region: LogRegion, members: Sequence[int], sums: Sequence[int], allowed: dict[int, Sequence[int]]
) -> bool:
    """Whether the inner values are used inside only, but for what is `allowed` by node."""
    inside, graph = {*members, *sums}, region.graph
    return all(
        set(region.users(p)) - inside <= set(allowed.get(p, ())) and graph.escaping.isdisjoint(graph.nodes[p].outputs)
        for p in inside
    )


def _lines_up(region: LogRegion, weights: int, start: int, division: int, divided: int, divisor: int) -> bool:
    """Whether the weights reach the division through a product over their axis, every dimension in its place."""
    graph = region.graph
    vid, position = weights, start
    dims: Dims | None = region.forms[weights].dims
    products = 0
    for _ in range(_STEPS):
        if position == division:
            break
        node = graph.nodes[position]
        if products and not node.flags & (_IS_CAST | _IS_LAYOUT):
            return False
        products += node.op == "gemm"
        dims = _dims_through(graph, node, vid, dims, region.axis)
        users = graph.consumers(position)
        if dims is None or len(users) != 1 or not graph.escaping.isdisjoint(node.outputs):
            return False
        vid, position = node.outputs[0], users[0]
    if position != division or vid != divided or products != 1:
        return False
    below = region.forms[graph.nodes[divisor].outputs[0]].dims
    shape = graph.values[vid].aval.shape
    # Dimensions of one are in place anywhere.
    return len(below) == len(dims) and all(n == 1 or a == b for a, b, n in zip(dims, below, shape, strict=True))


def _dims_through(graph: Graph, node: Node, vid: int, dims: Dims, axis: int) -> Dims | None:
    """For each dimension of a node's result the dimension of the weights it is, None where it is another's."""
    shape, after = graph.values[vid].aval.shape, graph.values[node.outputs[0]].aval.shape
    params = graph.eqn(node.covers[-1]).params
    if node.op == "gemm":
        return _dims_of_product(node, params["dimension_numbers"], vid, dims, axis, len(after))
    if node.op == "transpose":
        return tuple(dims[d] for d in params["permutation"])
    if node.flags & _IS_LAYOUT:
        origin = unit_reshape(shape, after) if params.get("dimensions") is None or node.op == "squeeze" else None
        if origin is None:
            return None
        return tuple(dims[origin[d]] if d in origin else None for d in range(len(after)))
    return dims if node.flags & _ELEMENTWISE and after == shape else None


def _dims_of_product(node: Node, numbers: object, vid: int, dims: Dims, axis: int, ndim: int) -> Dims | None:
    (contract, batch) = numbers  # pyright: ignore[reportGeneralTypeIssues]
    if node.inputs.count(vid) != 1:
        return None
    side = node.inputs.index(vid)
    if [dims[d] for d in contract[side]] != [axis]:
        return None
    free = [d for d in range(len(dims)) if d not in contract[side] and d not in batch[side]]
    before = len(batch[side])
    after = ndim - before - len(free)
    own, other = tuple(dims[d] for d in free), (None,) * after
    return (*(dims[d] for d in batch[side]), *(own + other if side == 0 else other + own))


def _nodes(
    region: LogRegion, seed: int, members: Sequence[int], sums: Sequence[int], division: int, divided: int
) -> dict[int, Node]:
    graph = region.graph
    weights = graph.nodes[seed].outputs
    inputs, covers = region.surroundings(members)
    attrs = softmax_attrs(region.axis, region.forms[weights[0]])
    flags = OpFlags.IS_SOFTMAX | OpFlags.IS_UNNORMALIZED
    summed = region.forms[weights[0]].dims.index(region.axis)
    more, below = region.surroundings(sums)
    outputs = graph.nodes[division].outputs
    covers_all = tuple(sorted((*below, *graph.nodes[division].covers)))
    return {
        seed: Node("softmax_weights", flags, (region.x, *inputs), weights, covers, attrs),
        division: Node(
            "normalize", OpFlags.IS_NORMALIZE, (divided, *weights, *more), outputs, covers_all, (("axis", summed),)
        ),
    }


RULE = Rule("softmax_weights", 6, _apply, after=("gemm", "cross_entropy", "softmax"))
