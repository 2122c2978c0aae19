"""Stage 1, second half: the computation graph.

A `Graph` holds mathematical meaning only: operations, their attributes (reduction axes, transposes, masks), and who
uses what. No tile, warp or memory space appears here. Values are numbered (VIDs); node-to-consumer adjacency is CSR
(`row_ptr`, `col_indices`, int32); each node has a 64-bit fingerprint in `flags`. Graphs are immutable: passes return
new ones that share equations and values, so VIDs stay valid from the first stage to the last.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from aicf_jax import _compat, flags
from aicf_jax.errors import GraphError
from aicf_jax.flags import PRIMITIVE_FLAGS, OpFlags
from aicf_jax.trace import FlatEquation, flatten


@dataclasses.dataclass(frozen=True)
class Value:
    """One VID. `kind` is ``"argument"``, ``"literal"`` or ``"result"``; `atom` is the jaxpr variable or literal."""

    aval: Any
    kind: str
    atom: Any


@dataclasses.dataclass(frozen=True)
class Node:
    """One operation.

    Attributes:
      op: its name in prints and reports.
      flags: static bits, kept as a plain integer.
      inputs, outputs: VIDs; ``inputs[0]`` is the value a chain of operations runs through.
      covers: positions in `Graph.equations` of the equations this node stands for, in program order. What is not fused
        runs exactly these, bit for bit.
      attrs: semantic attributes, hashable.
      payload: the fused operation after a rewrite, None before.
    """

    op: str
    flags: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    covers: tuple[int, ...]
    attrs: tuple[tuple[str, Hashable], ...] = ()
    payload: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "flags", int(self.flags))

    def attr(self, name: str, default: Any = None) -> Any:
        return dict(self.attrs).get(name, default)


# Plain integers: testing an enum's bits costs more than ten times as much.
_IS_NOP, _HAS_EFFECT, _IS_TRANSPOSE = (int(f) for f in (OpFlags.IS_NOP, OpFlags.HAS_EFFECT, OpFlags.IS_TRANSPOSE))
_SAFE, _ESCAPES, _CONTIGUOUS = (int(f) for f in (OpFlags.SAFE_NODE, OpFlags.ESCAPES, OpFlags.LAYOUT_CONTIG))

NOP = Node("nop", OpFlags.IS_NOP, (), (), ())


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """See the module's docstring. Build one with `build`, change one with `replace`."""

    equations: tuple[FlatEquation, ...]
    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    program: Any

    def replace(self, new: dict[int, Node]) -> Graph:
        """A graph with the nodes at these positions exchanged; nodes nobody needs any more become NOP."""
        nodes = [new.get(i, node) for i, node in enumerate(self.nodes)]
        order = _order(nodes)
        graph = dataclasses.replace(self, nodes=tuple(_drop_dead(nodes, order, self.results)))
        graph.__dict__["order"] = order  # a NOP has no inputs or outputs: the order stays one
        return graph

    @functools.cached_property
    def order(self) -> list[int]:
        """Positions in execution order, see `_order`."""
        return _order(self.nodes)

    # -- adjacency and fingerprints ---------------------------------------------------------------------
    @functools.cached_property
    def producer(self) -> np.ndarray:
        """int32[values]: the node that computes a value, -1 for arguments and literals."""
        out = np.full(len(self.values), -1, np.int32)
        for i, node in enumerate(self.nodes):
            for v in node.outputs:
                out[v] = i
        return out

    @functools.cached_property
    def _csr(self) -> tuple[np.ndarray, np.ndarray]:
        consumers: list[list[int]] = [[] for _ in self.nodes]
        producer = self.producer.tolist()
        for i, node in enumerate(self.nodes):
            for p in dict.fromkeys(producer[v] for v in node.inputs):
                if p >= 0:
                    consumers[p].append(i)
        row_ptr = np.zeros(len(self.nodes) + 1, np.int32)
        np.cumsum([len(c) for c in consumers], out=row_ptr[1:])
        return row_ptr, np.fromiter((j for c in consumers for j in c), np.int32, int(row_ptr[-1]))

    @property
    def row_ptr(self) -> np.ndarray:
        return self._csr[0]

    @property
    def col_indices(self) -> np.ndarray:
        return self._csr[1]

    @functools.cached_property
    def _consumers(self) -> list[list[int]]:
        rows, cols = self.row_ptr.tolist(), self.col_indices.tolist()
        return [cols[a:b] for a, b in itertools.pairwise(rows)]

    def consumers(self, node: int) -> list[int]:
        """Positions of the nodes that use a node's outputs, ascending."""
        return self._consumers[node]

    @functools.cached_property
    def _argument_users(self) -> dict[int, list[int]]:
        users: dict[int, list[int]] = {v: [] for v in self.arguments}
        for i, node in enumerate(self.nodes):
            for v in dict.fromkeys(node.inputs):
                if v in users:
                    users[v].append(i)
        return users

    def users(self, vid: int) -> list[int]:
        """Positions of the nodes that use a value, ascending."""
        producer = int(self.producer[vid])
        if producer < 0:
            return self._argument_users.get(vid, [])
        if len(self.nodes[producer].outputs) == 1:
            return self._consumers[producer]
        return [c for c in self._consumers[producer] if vid in self.nodes[c].inputs]

    @functools.cached_property
    def escaping(self) -> frozenset[int]:
        """VIDs that are results of the program."""
        return frozenset(self.results)

    @functools.cached_property
    def flags(self) -> np.ndarray:
        """uint64[nodes]: static bits of the operation, derived bits of its place in the graph."""
        return np.array([n.flags | self._derived(i, n) for i, n in enumerate(self.nodes)], np.uint64)

    @functools.cached_property
    def flag_list(self) -> list[int]:
        """`flags` as Python integers, for the matcher's inner loop."""
        return self.flags.tolist()

    def passing(self, alternatives: tuple[tuple[int, int], ...]) -> list[int]:
        """Positions of the nodes that pass one of these ``(require, forbid)`` tests."""
        known = self._passing.get(alternatives)
        if known is None:
            flags = {f for f in set(self.flag_list) if any(f & r == r and not f & n for r, n in alternatives)}
            known = self._passing[alternatives] = [i for i, f in enumerate(self.flag_list) if f in flags]
        return known

    @functools.cached_property
    def _passing(self) -> dict[tuple[tuple[int, int], ...], list[int]]:
        return {}

    @functools.cached_property
    def viable(self) -> dict[Hashable, Any]:
        """What the matcher has found out about where a sequence can start, see `pattern.chains`."""
        return {}

    def _derived(self, i: int, node: Node) -> int:
        escapes = not self.escaping.isdisjoint(node.outputs)
        bits = _ESCAPES if escapes else 0
        if not escapes and len(self._consumers[i]) == 1:
            bits |= _SAFE
        if node.outputs:
            aval = self.values[node.outputs[0]].aval
            bits |= flags.dtype_flags(getattr(aval, "dtype", None))
            if not node.flags & _IS_TRANSPOSE:
                bits |= _CONTIGUOUS
        return bits

    # -- views ----------------------------------------------------------------------------------------
    def eqn(self, position: int) -> Any:
        return self.equations[position].eqn

    def site(self, node: Node) -> str:
        """The user's source line of the first equation a node covers."""
        return _compat.site_of(self.eqn(node.covers[0])) if node.covers else "unknown"

    def literal(self, vid: int) -> Any:
        """The value of a literal VID, None for every other VID."""
        value = self.values[vid]
        return value.atom.val if value.kind == "literal" else None

    def verify(self) -> Graph:
        """Checks every invariant; returns self.

        Raises:
          GraphError: naming the node and the invariant: one producer per value, no use before definition in an order
            that exists, results still computed, adjacency equal to the nodes', NOPs empty.
        """
        _verify(self)
        return self

    def __str__(self) -> str:
        from aicf_jax.printer import graph_text

        return graph_text(self)


def build(jaxpr: Any) -> Graph:
    """The graph of a constant-free jaxpr: one node per equation, transparent calls seen through."""
    vids: dict[Any, int] = {}
    values: list[Value] = []

    def define(atom: Any, kind: str) -> int:
        values.append(Value(atom.aval, kind, atom))
        if kind != "literal":
            vids[atom] = len(values) - 1
        return len(values) - 1

    def use(atom: Any) -> int:
        return define(atom, "literal") if isinstance(atom, _compat.Literal) else vids[atom]

    arguments = tuple(define(v, "argument") for v in jaxpr.invars)
    equations, nodes = tuple(flatten(jaxpr.eqns)), []
    for i, flat in enumerate(equations):
        inputs = tuple(use(v) for v in flat.eqn.invars)
        outputs = tuple(define(v, "result") for v in flat.eqn.outvars)
        nodes.append(Node(flat.eqn.primitive.name, _static_flags(flat.eqn), inputs, outputs, (i,)))
    results = tuple(use(v) for v in jaxpr.outvars)
    return Graph(equations, tuple(values), tuple(nodes), arguments, results, jaxpr)


def _static_flags(eqn: Any) -> OpFlags:
    name = eqn.primitive.name
    found = PRIMITIVE_FLAGS.get(name, OpFlags.NONE)
    if eqn.effects:
        found |= OpFlags.HAS_EFFECT
    scalars = [v for v in eqn.invars if _is_scalar(v)] if name in ("mul", "div") else []
    if len(scalars) == 1 and eqn.outvars[0].aval.ndim and not _is_one(scalars[0]):
        found = (found | OpFlags.IS_SCALE) & ~OpFlags.IS_JOIN
    if name == "dot_general":
        (lhs_contract, rhs_contract), (lhs_batch, _) = eqn.params["dimension_numbers"]
        lhs, rhs = (v.aval.ndim for v in eqn.invars)
        if lhs_batch:
            found |= OpFlags.IS_BATCHED
        if rhs == len(rhs_contract) + len(lhs_batch) or not lhs_contract:
            # Nothing left of the right operand (dot product, matrix-vector) or nothing contracted: no GEMM.
            found &= ~OpFlags.IS_GEMM_LIKE
        elif lhs == 0:
            found &= ~OpFlags.IS_GEMM_LIKE
    return found


def _is_scalar(atom: Any) -> bool:
    return isinstance(atom, _compat.Literal) or atom.aval.ndim == 0


def _is_one(atom: Any) -> bool:
    """Multiplying by 1.0 changes nothing: a default ``scale=1.0`` is no scale."""
    return isinstance(atom, _compat.Literal) and bool(np.asarray(atom.val == 1))


def _drop_dead(nodes: Sequence[Node], order: Sequence[int], results: Iterable[int]) -> list[Node]:
    """NOP for every node without an effect whose outputs nobody uses, found from the end."""
    needed, kept = set(results), list(nodes)
    for i in reversed(order):
        node = kept[i]
        if node.flags & _HAS_EFFECT or not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
        else:
            kept[i] = NOP
    return kept


def _order(nodes: Sequence[Node]) -> list[int]:
    """Positions in execution order: program order, a node held back only until its inputs exist.

    A fused node sits at its anchor's place, which may come before the equations of its other inputs. Nothing is ever
    moved forward, so operations with effects keep their order.
    """
    missing = {v for node in nodes for v in node.outputs}
    held: dict[int, list[int]] = {}
    order: list[int] = []
    for start, first in enumerate(nodes):
        if missing.isdisjoint(first.inputs) and held.keys().isdisjoint(first.outputs):
            order.append(start)
            missing.difference_update(first.outputs)
            continue
        ready = [start]
        while ready:
            i = ready.pop(0)
            waiting = next((v for v in nodes[i].inputs if v in missing), None)
            if waiting is not None:
                held.setdefault(waiting, []).append(i)
                continue
            order.append(i)
            for v in nodes[i].outputs:
                missing.discard(v)
                ready.extend(held.pop(v, ()))
    if held:
        first = min(i for waiting in held.values() for i in waiting)
        raise GraphError(f"node {first} ({nodes[first].op}): its inputs depend on its own outputs")
    return order


def schedule(graph: Graph) -> list[int]:
    """Positions of the active nodes in execution order."""
    return [i for i in graph.order if not graph.nodes[i].flags & _IS_NOP]


def _verify(graph: Graph) -> None:
    seen: dict[int, int] = {}
    available = {v for v, value in enumerate(graph.values) if value.kind != "result"}
    for i, node in enumerate(graph.nodes):
        if node.flags & _IS_NOP and (node.inputs or node.outputs):
            raise GraphError(f"node {i}: a NOP has no inputs or outputs, found {node}")
        for v in node.outputs:
            if v in seen or v in available:
                raise GraphError(f"node {i} ({node.op}): value %{v} already has a producer (node {seen.get(v)})")
            seen[v] = i
    for i in graph.order:
        missing = [v for v in graph.nodes[i].inputs if v not in available]
        if missing:
            raise GraphError(f"node {i} ({graph.nodes[i].op}): uses %{missing[0]}, which nothing computes")
        available.update(graph.nodes[i].outputs)
    lost = [v for v in graph.results if v not in available]
    if lost:
        raise GraphError(f"result %{lost[0]} is not computed by any node")
    if len(graph.row_ptr) != len(graph.nodes) + 1 or int(graph.row_ptr[-1]) != len(graph.col_indices):
        raise GraphError("adjacency: row_ptr and col_indices do not fit the nodes")
    for i, node in enumerate(graph.nodes):
        for c in graph.consumers(i):
            if set(node.outputs).isdisjoint(graph.nodes[c].inputs):
                raise GraphError(f"adjacency: edge {i} -> {c} has no value")
