"""Canonical activations: regions of pointwise equations that are one of the known functions of a single value.

From an argument or the result of a product, convolution, bias, scale and shift, batch norm, cast, slice or layout
change the region of equations that depend on nothing else (and on scalar constants) is grown; each value in it gets an
expression (`_expressions`); the last ones that equal a known spelling and whose inner values nobody else uses become
canonical nodes.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Iterator
from typing import Any

import jax

from aicf_jax import _compat
from aicf_jax.fingerprint import Keys
from aicf_jax.flags import OpFlags
from aicf_jax.graph import Graph, Node
from aicf_jax.normalize._constants import constant
from aicf_jax.normalize._expressions import Expressions
from aicf_jax.normalize._rule import Rule
from aicf_jax.normalize._spellings import NEAR_MISSES, SPELLINGS, NearMiss, Spelling

#: Regions are grown no further than this; the longest spelling has about half as many equations.
REGION_EQUATIONS = 24

_ROOTS = int(
    OpFlags.IS_GEMM_LIKE
    | OpFlags.IS_CONV
    | OpFlags.IS_BIAS
    | OpFlags.IS_AFFINE
    | OpFlags.IS_CAST
    | OpFlags.IS_LAYOUT
    | OpFlags.IS_SLICE
)
_POINTWISE, _HAS_EFFECT = int(OpFlags.IS_ELEMENTWISE), int(OpFlags.HAS_EFFECT)


@dataclasses.dataclass(frozen=True)
class _Table:
    """Known expressions of one dtype, with exact constants and with any constant."""

    exact: Expressions
    loose: Expressions
    exact_names: dict[int, Spelling | NearMiss]
    loose_names: dict[int, Spelling | NearMiss]


def _apply(graph: Graph) -> dict[int, Node]:
    found: dict[int, Node] = {}
    keys = Keys()
    roots = [*graph.arguments, *(v for n in graph.nodes if n.flags & _ROOTS for v in n.outputs)]
    roots += [n.outputs[0] for n in graph.nodes if n.flags & OpFlags.IS_BATCH_NORM]  # not its statistics
    for root in roots:
        if str(getattr(graph.values[root].aval, "dtype", None)) not in _FLOATS:
            continue
        for position, node in _find(graph, root, keys):
            found.setdefault(position, node)
    return found


_FLOATS = ("float64", "float32", "bfloat16", "float16")


def _find(graph: Graph, root: int, keys: Keys) -> Iterator[tuple[int, Node]]:
    """All activations of a value: the last of each that share equations, exact spellings first."""
    taken: set[int] = set()
    table = _table(str(graph.values[root].aval.dtype), _compat.x64_enabled())
    for expressions, names in ((table.exact, table.exact_names), (table.loose, table.loose_names)):
        region = _Region(graph, root, Expressions(expressions), keys)
        for position in reversed(region.members):
            spelling = names.get(region.number[graph.nodes[position].outputs[0]])
            members = region.closed(position) if spelling is not None and position not in taken else None
            if spelling is not None and members is not None and taken.isdisjoint(members):
                taken.update(members)
                yield position, region.node(position, members, spelling)


class _Region:
    """Pointwise equations that depend on `root` and constants alone, in program order, with their expressions."""

    def __init__(self, graph: Graph, root: int, expressions: Expressions, keys: Keys):
        self.graph, self.root, self.keys, self.expressions = graph, root, keys, expressions
        self.number: dict[int, int] = {root: expressions.variable()}
        self.members: list[int] = []
        self._constants: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        queue = list(graph.users(root))
        heapq.heapify(queue)
        while queue and len(self.members) < REGION_EQUATIONS:
            position = heapq.heappop(queue)
            if self._add(position):
                for c in graph.consumers(position):
                    heapq.heappush(queue, c)
        self.members.sort()

    def _add(self, position: int) -> bool:
        node = self.graph.nodes[position]
        if len(node.covers) != 1 or len(node.outputs) != 1 or node.outputs[0] in self.number:
            return False
        if not node.flags & _POINTWISE or node.flags & _HAS_EFFECT:
            return False
        if node.op != self.graph.eqn(node.covers[0]).primitive.name:
            return False  # canonical already
        operands = [self.number.get(v, self.constant(v)[0]) for v in node.inputs]
        if None in operands:
            return False
        number = self.expressions.apply(self.graph.eqn(node.covers[0]), operands, self.keys)  # pyright: ignore[reportArgumentType]
        if number is None:
            return False
        self.number[node.outputs[0]] = number
        self.members.append(position)
        return True

    def constant(self, vid: int) -> tuple[int | None, tuple[int, ...]]:
        """``(expression, covers)`` of a scalar constant, also broadcast or converted; ``(None, ())`` otherwise."""
        if vid not in self._constants:
            number, covers = constant(self.graph, vid)
            self._constants[vid] = (None if number is None else self.expressions.constant(number), covers)
        return self._constants[vid]

    def closed(self, exit_position: int) -> list[int] | None:
        """Members the exit needs, None when somebody outside uses a value between root and exit."""
        nodes, producer = self.graph.nodes, self.graph.producer
        needed, todo = {exit_position}, [exit_position]
        while todo:
            for v in nodes[todo.pop()].inputs:
                p = int(producer[v])
                if v != self.root and v in self.number and p not in needed:
                    needed.add(p)
                    todo.append(p)
        for p in needed - {exit_position}:
            if any(v in self.graph.escaping for v in nodes[p].outputs) or set(self.graph.consumers(p)) - needed:
                return None
        return sorted(needed)

    def node(self, exit_position: int, members: list[int], spelling: Spelling | NearMiss) -> Node:
        graph = self.graph
        covers = {c for p in members for c in graph.nodes[p].covers}
        scalars = []
        for p in members:
            for v in graph.nodes[p].inputs:
                if v not in self.number:
                    covers.update(self.constant(v)[1])
                    scalars.append(constant(graph, v)[0])
        outputs = graph.nodes[exit_position].outputs
        flags = OpFlags.IS_ELEMENTWISE
        if isinstance(spelling, NearMiss):
            flags |= OpFlags.IS_NEAR_ACTIVATION
            attrs = (("code", spelling.code), ("expected", spelling.expected), ("found", spelling.found))
            return Node("almost_" + spelling.activation, flags, (self.root,), outputs, tuple(sorted(covers)), attrs)
        alpha = next((s for s in scalars if s), 0.0) if spelling.parametric else _ALPHA.get(spelling.activation, 0.0)
        attrs = (("alpha", alpha), ("from_output", spelling.from_output))
        flags |= OpFlags.IS_ACTIVATION
        return Node(spelling.activation, flags, (self.root,), outputs, tuple(sorted(covers)), attrs)


_ALPHA = {"elu": 1.0}


@functools.lru_cache(maxsize=16)
def _table(dtype: str, x64: bool) -> _Table:
    """Expressions of all spellings for one dtype (`x64` only keys the cache: promotion differs with it)."""
    exact, loose, keys = Expressions(), Expressions(any_constant=True), Keys()
    exact_names: dict[int, Spelling | NearMiss] = {}
    loose_names: dict[int, Spelling | NearMiss] = {}
    for spelling in (*SPELLINGS, *NEAR_MISSES):
        if isinstance(spelling, Spelling) and dtype not in spelling.dtypes:
            continue
        parametric = isinstance(spelling, Spelling) and spelling.parametric
        table, names = (loose, loose_names) if parametric else (exact, exact_names)
        number = _expression_of(spelling, parametric, dtype, table, keys)
        if number is not None:
            names.setdefault(number, spelling)
    return _Table(exact, loose, exact_names, loose_names)


def _expression_of(spelling: Any, parametric: bool, dtype: str, table: Expressions, keys: Keys) -> int | None:
    z = jax.ShapeDtypeStruct((3,), dtype)
    # 0.3125 is exact in every float type and appears in no spelling; it stands for "any constant".
    function = (lambda z: spelling.function(z, 0.3125)) if parametric else spelling.function
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        traced = jax.make_jaxpr(function)(z)
    jaxpr, consts = _compat.open_jaxpr(traced)  # pyright: ignore[reportGeneralTypeIssues]
    return None if consts else table.program(jaxpr, [table.variable()], keys)


RULE = Rule(
    "activation", 20, _apply, after=("gemm", "conv", "norm", "softmax", "cross_entropy", "bias", "channel_affine")
)
