"""`Outline`: a program as a picture needs it. Operations before and after fusing, and which became one.

An outline holds names and types only, so that a report stays a value that can be kept, compared and sent around.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from aicf_jax import _compat
from aicf_jax.engine import Fused, Rewritten
from aicf_jax.graph import Graph, schedule
from aicf_jax.printer import type_text

#: Inner programs that get an outline of their own: the first that hold a fusion.
MAX_INNER = 6


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of an outline.

    Attributes:
      name: canonical name, e.g. ``"gemm"``; of a fused operation its kind, e.g. ``"attention"``.
      result: type of its first result, e.g. ``"f32[4,8]"``.
      inputs: places of the operations whose results it reads, in the same tuple.
      fusion: place in `Report.fusions` of the fusion it belongs to (before) or is (after); None: it runs as written.
      inner: operations of the programs inside it; 0 for a plain operation.
      is_result: one of its results is a result of the program.
    """

    name: str
    result: str
    inputs: tuple[int, ...]
    fusion: int | None = None
    inner: int = 0
    is_result: bool = False


@dataclasses.dataclass(frozen=True)
class Outline:
    """One program: the whole one, or one that is called inside of it.

    Attributes:
      name: ``"program"``, or the operation that calls it and where, e.g. ``"scan at model.py:12 (f)"``.
      before, after: its operations in order of execution; the order respects who reads what.
    """

    name: str
    before: tuple[Operation, ...]
    after: tuple[Operation, ...]


def outlines(done: Rewritten) -> tuple[Outline, ...]:
    """The program, then the first programs inside of it that hold a fusion, each once."""
    places = _places(done.fusions)
    found = [_outline("program", done, places)]
    seen, todo = {id(done)}, list(done.inside)
    while todo and len(found) <= MAX_INNER:
        inner = todo.pop(0)
        if id(inner.program) not in seen:
            seen.add(id(inner.program))
            found.append(_outline(f"{inner.caller} at {inner.site}", inner.program, places))
            todo = [*inner.program.inside, *todo]
    return tuple(found)


def _outline(name: str, done: Rewritten, places: Mapping[int, int]) -> Outline:
    groups = _groups(done.normal, done.graph, places)
    after = {i: places.get(id(n.payload)) for i, n in enumerate(done.graph.nodes) if n.payload is not None}
    return Outline(name, _operations(done.normal, groups, places), _operations(done.graph, after, places))


def _groups(before: Graph, after: Graph, places: Mapping[int, int]) -> dict[int, int | None]:
    """Position -> fusion, for the nodes of the canonical program that a fused operation stands for.

    A node that is gone without being matched was absorbed: it belongs to the operation that reads it.
    """
    owner: dict[int, int | None] = {}
    for node in after.nodes:
        if node.payload is not None:
            owner.update(dict.fromkeys(node.covers, places.get(id(node.payload))))
    groups: dict[int, int | None] = {}
    for i in reversed(schedule(before)):
        node = before.nodes[i]
        if fused := [owner[c] for c in node.covers if c in owner]:
            groups[i] = fused[-1]
        elif not after.nodes[i].outputs:
            readers = [groups[j] for j in before.consumers(i) if j in groups]
            if readers:
                groups[i] = readers[0]
    return groups


def _operations(graph: Graph, groups: Mapping[int, int | None], places: Mapping[int, int]) -> tuple[Operation, ...]:
    order = schedule(graph)
    place = {position: k for k, position in enumerate(order)}
    producer = graph.producer.tolist()
    found = []
    for i in order:
        node = graph.nodes[i]
        reads = dict.fromkeys(place[p] for v in node.inputs if (p := producer[v]) in place)
        name, given, inner = node.op, groups.get(i), 0
        if node.payload is None and (op := _already_fused(graph, i)) is not None:
            name, given = op.semantic.name, places.get(id(op))
        elif node.payload is None:
            inner = _inner_size(graph, i)
        result = type_text(graph.values[node.outputs[0]].aval) if node.outputs else ""
        escapes = not graph.escaping.isdisjoint(node.outputs)
        found.append(Operation(name, result, tuple(reads), given, inner, escapes))
    return tuple(found)


def _already_fused(graph: Graph, position: int) -> Any:
    """The operation a node is that an inner `fuse` has made, None for any other node."""
    node = graph.nodes[position]
    return graph.eqn(node.covers[0]).params["op"] if node.op == "fused" else None


def _inner_size(graph: Graph, position: int) -> int:
    """Equations of the programs in an operation's parameters."""
    covers = graph.nodes[position].covers
    return sum(_equations(v) for v in graph.eqn(covers[0]).params.values()) if len(covers) == 1 else 0


def _equations(value: Any) -> int:
    if isinstance(value, (tuple, list)):
        return sum(map(_equations, value))
    opened = _compat.open_jaxpr(value)
    return len(opened[0].eqns) if opened is not None else 0


def _places(fusions: Sequence[Fused]) -> dict[int, int]:
    """Identity of a fused operation -> its first place in a list of fusions."""
    places: dict[int, int] = {}
    for k, fused in enumerate(fusions):
        places.setdefault(id(fused.op), k)
    return places
