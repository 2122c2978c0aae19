"""Gathers that read one element of each row: ``x[i, labels[i]]`` in all its spellings."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from aicf_jax.graph import Graph, Node
from aicf_jax.normalize._constants import SAME_VALUE, constant
from aicf_jax.normalize.bias import unit_reshape


@dataclasses.dataclass(frozen=True)
class Pick:
    """One element of each row.

    Attributes:
      operand: the value that is read.
      labels: integers; ``labels[..., 0]`` says which element.
      pairs: ``(dimension of the operand, dimension of the labels)`` that go together.
      axis: the dimension of the operand that the labels count along.
      clipped: labels out of bounds read the nearest element; otherwise they read `fill`.
      fill: None stands for NaN.
      covers: equations between `labels` and the gather's own indices.
    """

    operand: int
    labels: int
    pairs: tuple[tuple[int, int], ...]
    axis: int
    clipped: bool
    fill: Any
    covers: tuple[int, ...] = ()


def pick_of(graph: Graph, node: Node, axis: int) -> Pick | None:
    """The pick that a gather from a value is, along this dimension of it; None for every other gather."""
    params = graph.eqn(node.covers[0]).params
    numbers = params["dimension_numbers"]
    operand, indices = (graph.values[v].aval for v in node.inputs)
    if axis not in numbers.start_index_map or any(n != 1 for n in params["slice_sizes"]):
        return None
    columns, covers = _columns(graph, node.inputs[1], len(numbers.start_index_map))
    if columns is None:
        return None
    pairs = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    labels = node.inputs[1]
    for d, column in zip(numbers.start_index_map, columns, strict=True):
        if d == axis:
            labels = column
            continue
        along, more = _position(graph, column)
        if operand.shape[d] == 1:
            along = None  # in place anywhere, if it is in bounds
            if constant(graph, column)[0] != 0:
                return None
        elif along is None or graph.values[column].aval.shape[along] != operand.shape[d]:
            return None
        covers += more
        if along is not None:
            pairs[d] = along
    rows = {d for d in range(operand.ndim) if d != axis and operand.shape[d] != 1}
    used = [e for d, e in pairs.items() if d in rows]
    shape = indices.shape[:-1]
    if not rows <= pairs.keys() or len(set(used)) < len(used):
        return None
    if any(n != 1 for e, n in enumerate(shape) if e not in used) or tuple(n for n in shape if n != 1) != tuple(
        n for n in graph.values[node.outputs[0]].aval.shape if n != 1
    ):
        return None
    mode = params["mode"].name
    if mode not in ("CLIP", "FILL_OR_DROP", "PROMISE_IN_BOUNDS"):
        return None
    found = tuple(sorted((d, e) for d, e in pairs.items() if d in rows))
    fill = params["fill_value"]
    return Pick(node.inputs[0], labels, found, axis, mode != "FILL_OR_DROP", fill, tuple(covers))


def _columns(graph: Graph, vid: int, count: int) -> tuple[list[int] | None, list[int]]:
    """The integers for each dimension that is indexed, each of shape ``[..., 1]``, and the equations that join them."""
    if count == 1:
        return [vid], []
    position = int(graph.producer[vid])
    node = graph.nodes[position] if position >= 0 else None
    if node is None or node.op != "concatenate" or len(node.inputs) != count:
        return None, []
    shapes = [graph.values[v].aval.shape for v in node.inputs]
    last = graph.values[vid].aval.ndim - 1
    if graph.eqn(node.covers[0]).params["dimension"] != last or any(s[-1] != 1 for s in shapes):
        return None, []
    return list(node.inputs), list(node.covers)


def _position(graph: Graph, vid: int) -> tuple[int | None, list[int]]:
    """The dimension along which a value counts 0, 1, 2, ..., and the equations it comes from; None when it does not."""
    position = int(graph.producer[vid])
    node = graph.nodes[position] if position >= 0 else None
    if node is None or len(node.covers) != 1:
        return None, []
    params, own = graph.eqn(node.covers[0]).params, list(node.covers)
    if node.op == "iota":
        return int(params["dimension"]), own
    if node.op in SAME_VALUE:
        along, covers = _position(graph, node.inputs[0])
        return along, covers + own
    if node.op == "broadcast_in_dim" and len(node.inputs) == 1:
        along, covers = _position(graph, node.inputs[0])
        return (None if along is None else int(params["broadcast_dimensions"][along])), covers + own
    if node.op in ("reshape", "squeeze", "expand_dims"):
        along, covers = _position(graph, node.inputs[0])
        moved = unit_reshape(graph.values[node.inputs[0]].aval.shape, graph.values[vid].aval.shape)
        back = {old: new for new, old in (moved or {}).items()}
        return (None if along is None else back.get(along)), covers + own
    if node.op == "select_n" and len(node.inputs) == 3:
        return _wrapped(graph, node, own)
    return None, []


def _wrapped(graph: Graph, node: Node, own: list[int]) -> tuple[int | None, list[int]]:
    """``where(p < 0, p + n, p)``: negative indices count from the end, and positions are not negative."""
    test, kept, other = node.inputs
    along, covers = _position(graph, kept)
    position = int(graph.producer[test])
    if along is None or position < 0:
        return None, []
    compared = graph.nodes[position]
    if compared.op != "lt" or compared.inputs[0] != kept or constant(graph, compared.inputs[1])[0] != 0:
        return None, []
    producer = int(graph.producer[other])
    more = graph.nodes[producer].covers if producer >= 0 else ()
    inner = constant(graph, compared.inputs[1])[1]
    added: tuple[int, ...] = ()
    for v in graph.nodes[producer].inputs if producer >= 0 else ():
        added += constant(graph, v)[1]
    return along, [*covers, *inner, *added, *compared.covers, *more, *own]


def is_unit_slice(graph: Graph, node: Node) -> bool:
    """Whether an operation that reads part of a value reads all of it: it indexes dimensions of one only, at 0."""
    before, after = (graph.values[v].aval.shape for v in (node.inputs[0], node.outputs[0]))
    if unit_reshape(before, after) is None:
        return False
    if node.op in ("slice", "squeeze", "reshape", "expand_dims"):
        return True
    if node.op == "dynamic_slice":
        return True  # as many elements as before: the start is clamped to 0
    params = graph.eqn(node.covers[0]).params
    numbers = params["dimension_numbers"]
    if any(before[d] != 1 for d in numbers.start_index_map):
        return False
    index = small_constant(graph, node.inputs[1])
    return not numbers.operand_batching_dims and index is not None and not np.any(index)


def small_constant(graph: Graph, vid: int) -> Any:
    """A small array of numbers that rests on literals alone, None for every other value."""
    if graph.values[vid].kind == "literal":
        return np.asarray(graph.literal(vid))
    position = int(graph.producer[vid])
    node = graph.nodes[position] if position >= 0 else None
    aval = graph.values[vid].aval
    if node is None or node.op not in _FOLDED or np.prod(aval.shape) > 8:
        return None
    operands = [small_constant(graph, v) for v in node.inputs]
    if any(x is None for x in operands):
        return None
    found = _FOLDED[node.op](*operands)
    return np.broadcast_to(found, aval.shape).astype(aval.dtype) if np.size(found) == 1 else None


_FOLDED: dict[str, Any] = {
    "add": np.add,
    "lt": np.less,
    "select_n": lambda test, *cases: cases[int(np.all(test))],
    **dict.fromkeys(("broadcast_in_dim", "reshape", "convert_element_type", "squeeze"), lambda x: x),
}
