"""Last step of reading a graph: axes get names, equal values become one, views of one array are made one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from mcir._axes import Dim, resolve, size_of
from mcir._node import REDUCTIONS, Instance, Node
from mcir._simplify import in_one_form, negated, simplified
from mcir.errors import DeriveError
from mcir.graph import ComputationGraph, Value, View


class Finisher:
    """Gives axes their names, shares equal values, drops what no output needs."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.axes: dict[str, int] = {}
        self.values: list[Value] = []
        self.views: dict[int, View] = {}
        self.known: dict[Any, int] = {}
        self.done: dict[int, int] = {}
        self._alive: list[Any] = []

    def finish(self, outputs: Sequence[Instance], avals: Sequence[Any]) -> ComputationGraph:
        found = []
        for (node, dims), aval in zip(outputs, avals, strict=True):
            shape, place = tuple(aval.shape), None
            if node.op == "pad" and tuple(map(resolve, dims)) == tuple(map(resolve, node.over)):
                place = dict(node.params)["place"]
                (node,), dims = node.args, node.layout
                shape = tuple(map(size_of, dims))
            position = self.value(node)
            axes = self.axes_of(dims)
            if len(set(axes)) < len(axes):
                raise DeriveError("axis_twice", "each axis once in a result", f"axes {axes}")
            found.append((position, View(shape, tuple(self.axes_of([d]) for d in dims), place)))
        return one_view(ComputationGraph(self.axes, tuple(self.values), self.views, tuple(found)))

    def axes_of(self, dims: Sequence[Dim]) -> tuple[str, ...]:
        out = []
        for dim in dims:
            for atom in resolve(dim):
                if id(atom) not in self.names:
                    self._alive.append(atom)
                    name = self.names[id(atom)] = f"a{len(self.names)}"
                    self.axes[name] = atom.size
                out.append(self.names[id(atom)])
        return tuple(out)

    def value(self, root: Node) -> int:
        """The position of a node's value; its arguments come first."""
        stack = [root]
        while stack:
            node = stack[-1]
            if id(node) in self.done:
                stack.pop()
                continue
            missing = [a for a in node.args if id(a) not in self.done]
            if missing:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            self._alive.append(node)
            self.done[id(node)] = self._add(node)
        return self.done[id(root)]

    def _add(self, node: Node) -> int:
        args = tuple(self.done[id(a)] for a in node.args)
        params = node.params
        if node.op == "pad":
            raise DeriveError("primitive", "zeros around a result only", "a padded value that is used")
        axes = set(self.axes_of(node.varies))
        if node.op in ("input", "bits"):
            layout = tuple(self.axes_of([d]) for d in node.layout)
            flat = [a for d in layout for a in d]
            if len(set(flat)) < len(flat):
                raise DeriveError("axis_twice", "each axis once in an array", f"axes {flat}")
            sizes = tuple(math.prod(self.axes[a] for a in d) for d in layout)
            if node.op == "bits":
                params = (("axes", tuple(flat)), ("shape", tuple(self.axes[a] for a in flat)))
            else:
                place = dict(params).get("place")
                params = (("argument", dict(params)["argument"]), ("layout", View(sizes, layout, place)))
        elif node.op == "iota":
            params = (("axis", self.axes_of(node.layout)[0]),)
        if node.op == "dot" or node.op in REDUCTIONS:
            return self._reduce(node, args, axes)
        return self.intern(node.op, args, params, axes, node.dtype)

    def _reduce(self, node: Node, args: tuple[int, ...], axes: set[str]) -> int:
        over = self.axes_of(node.over)
        if node.op == "dot":
            self._no_diagonal(args, over)
        inside = {a for p in args for a in self.values[p].axes}
        repeated = math.prod(self.axes[a] for a in over if a not in inside)
        real = tuple(sorted(a for a in set(over) if a in inside))
        if not real and node.op != "dot":
            out = args[0]
            if self.values[out].dtype != node.dtype:
                raise DeriveError("dtype", "a reduction in its operand's type", node.dtype)
        else:
            out = self.intern(node.op, args, (("over", real), *node.params), axes - set(over), node.dtype)
        if repeated != 1 and node.op in ("dot", "reduce_sum"):
            size = self.intern("constant", (), (("value", repeated),), set(), "int32")
            size = self.intern("convert_element_type", (size,), (("new_dtype", node.dtype),), set(), node.dtype)
            out = self.intern("mul", (out, size), (), set(self.values[out].axes), node.dtype)
        return out

    def _no_diagonal(self, args: tuple[int, ...], over: tuple[str, ...]) -> None:
        if len(set(over)) < len(over):
            raise DeriveError("axis_twice", "each axis contracted once", f"{over}")

    def _hiding(self, args: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
        """The opposite of a mask's condition where it says what is hidden: masks are to say what is visible."""
        constant = [self.values[a].op == "constant" for a in args]
        return negated(args[0], self.values) if constant == [False, False, True] else None

    def intern(self, op: str, args: tuple[int, ...], params: Any, axes: set[str], dtype: str) -> int:
        if not (op == "dot" and "/" in dict(params).get("precision", "")):
            op, args = in_one_form(op, args, self.values)
        if op == "select_n" and (test := self._hiding(args)) is not None:
            args = (self.intern(*test, (), set(self.values[args[0]].axes), "bool"), args[2], args[1])
        known = simplified(op, args, [self.values[a] for a in args], axes, dtype)
        if isinstance(known, int):
            return known
        if known is not None:
            op, args, params = "constant", (), (("value", known.item()),)
        ordered = tuple(a for a in self.axes if a in axes)
        key = (op, args, repr(params), ordered, dtype)
        if key not in self.known:
            self.known[key] = len(self.values)
            view = None
            if op == "input":
                view = dict(params)["layout"]
                params = tuple(p for p in params if p[0] != "layout")
                self.views[len(self.values)] = view
            self.values.append(Value(op, args, params, ordered, dtype))
        return self.known[key]


def one_view(graph: ComputationGraph) -> ComputationGraph:
    """The graph with axes made one that are the same dimension of one argument in two views, where nothing has both.

    ``q[i, d]`` contracted over d for the scores and ``q[i, e]`` with e kept for the gradient of k are one array that is
    read once.
    """
    while (pair := _mergeable(graph)) is not None:
        graph = _renamed(graph, *pair)
    return graph


def _mergeable(graph: ComputationGraph) -> tuple[str, str] | None:
    first: dict[Any, View] = {}
    for i, view in graph.views.items():
        known = first.setdefault(graph.values[i].param("argument"), view)
        for a, b in zip((x for d in known.dims for x in d), (x for d in view.dims for x in d), strict=False):
            if a != b and graph.axes[a] == graph.axes[b] and not _together(graph, a, b):
                return a, b
    return None


def _together(graph: ComputationGraph, a: str, b: str) -> bool:
    """Whether one operation would have both axes in one role or another."""
    for value in graph.values:
        own = {*value.axes, *value.param("over", ()), *(x for p in value.args for x in graph.values[p].axes)}
        if a in own and b in own:
            return True
    return any({a, b} <= {x for d in view.dims for x in d} for _, view in graph.outputs)


def _renamed(graph: ComputationGraph, keep: str, drop: str) -> ComputationGraph:
    def one(name: str) -> str:
        return keep if name == drop else name

    def view(v: View) -> View:
        return dataclasses.replace(v, dims=tuple(tuple(map(one, d)) for d in v.dims))

    axes = {a: n for a, n in graph.axes.items() if a != drop}
    finisher = Finisher()
    finisher.axes = axes
    place: list[int] = []
    for i, value in enumerate(graph.values):
        params: Any = tuple((k, tuple(map(one, p)) if k in ("over", "axes") else p) for k, p in value.params)
        params = tuple((k, one(p) if k == "axis" else p) for k, p in params)
        if value.op == "input":
            params = (*params, ("layout", view(graph.views[i])))
        args = tuple(place[a] for a in value.args)
        place.append(finisher.intern(value.op, args, params, {one(a) for a in value.axes}, value.dtype))
    outputs = tuple((place[v], view(w)) for v, w in graph.outputs)
    return ComputationGraph(axes, tuple(finisher.values), finisher.views, outputs)
