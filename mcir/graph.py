"""The computation graph: what is computed, with named axes and no layout.

`from_jaxpr` reads a jaxpr and finds out which dimensions are the same loop (`mcir._axes`). Transposes, broadcasts and
reshapes disappear: they only say how axes are laid out. What is left are pointwise operations, contractions,
reductions, constants, positions (`iota`) and random bits of positions.

An array that is used in two roles (``x`` as queries and as keys) has two *views* with axes of their own; so has
everything that is computed from inputs without a contraction or reduction, such as a mask from one ``iota``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from mcir._axes import Dim, fresh, regroup, resolve, size_of, unite
from mcir.errors import DeriveError
from mcir.operations import PARAMETERS, POINTWISE

#: More values than this are refused: views of views multiplied.
MAX_VALUES = 4096

_CALLS = {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call"}
_IDENTITY = {"stop_gradient", "copy", "copy_p", "optimization_barrier"}
_RENAMED = {"add_any": "add"}
_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min")
_RESHAPES = {"reshape", "squeeze", "expand_dims"}


@dataclasses.dataclass(frozen=True)
class Value:
    """One computed array: `op` of earlier values. `axes` are those it varies along, in the graph's order."""

    op: str
    args: tuple[int, ...]
    params: tuple[tuple[str, Any], ...]
    axes: tuple[str, ...]
    dtype: str

    def param(self, name: str, default: Any = None) -> Any:
        return dict(self.params).get(name, default)


@dataclasses.dataclass(frozen=True)
class View:
    """How an array of the outside is laid out: the axes of each of its dimensions, major first."""

    shape: tuple[int, ...]
    dims: tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class ComputationGraph:
    """Values in order of computation.

    Attributes:
      axes: name -> size.
      values: each refers to earlier ones by position. An ``input`` has params ``argument`` (which argument of the
        function it views).
      views: value position of an ``input`` -> its `View`.
      outputs: ``(value position, View)`` of each result.
      dtypes: of the results.
    """

    axes: dict[str, int]
    values: tuple[Value, ...]
    views: dict[int, View]
    outputs: tuple[tuple[int, View], ...]


def trace(function: Callable[..., Any], *avals: Any) -> ComputationGraph:
    """The computation graph of a function of these types. Raises DeriveError for what has none."""
    closed = jax.make_jaxpr(lambda *xs: function(*xs))(*avals)
    return from_jaxpr(closed.jaxpr, closed.consts)


def from_jaxpr(jaxpr: Any, consts: Sequence[Any] = ()) -> ComputationGraph:
    """The computation graph of a jaxpr. `consts`, if any, must be scalars.

    Raises:
      DeriveError: naming a primitive that is no loop over elements, a reshape that cuts axes unevenly, an axis that a
        value would have twice, or a closed-over array.
    """
    reader = _Reader()
    env: dict[Any, _Use] = {}
    for var, value in zip(jaxpr.constvars, consts, strict=True):
        if np.ndim(value):
            raise DeriveError("constant", "arrays as arguments", f"a closed-over array of shape {np.shape(value)}")
        env[var] = reader.constant(value)
    for i, var in enumerate(jaxpr.invars):
        env[var] = reader.input(i, var.aval)
    reader.run(jaxpr, env)
    outputs = [reader.read(env, v)() for v in jaxpr.outvars]
    return reader.finish(outputs, [v.aval for v in jaxpr.outvars])


@dataclasses.dataclass(eq=False)
class _Node:
    """A value whose axes are still being found out."""

    op: str
    args: tuple[_Node, ...]
    params: tuple[tuple[str, Any], ...]
    varies: tuple[Dim, ...]
    dtype: str
    over: tuple[Dim, ...] = ()
    layout: tuple[Dim, ...] = ()


#: A node with the axes of each dimension of the array it is here.
_Instance = tuple[_Node, list[Dim]]
#: Called at each use. What does not depend on a contraction or reduction is made anew, so that it can have other axes.
_Use = Callable[[], _Instance]


class _Reader:
    def __init__(self) -> None:
        self.made = 0

    def node(self, *args: Any, **kwargs: Any) -> _Node:
        self.made += 1
        if self.made > MAX_VALUES:
            raise DeriveError("size", f"at most {MAX_VALUES} values", "more")
        return _Node(*args, **kwargs)

    # -- leaves -----------------------------------------------------------------------------------------
    def constant(self, value: Any) -> _Use:
        array = np.asarray(value)
        node = self.node("constant", (), (("value", array.item()),), (), str(array.dtype))
        return lambda: (node, [])

    def input(self, index: int, aval: Any) -> _Use:
        def use() -> _Instance:
            dims = [fresh(n) for n in aval.shape]
            varies = tuple(d for d in dims if d)
            params = (("argument", index),)
            return self.node("input", (), params, varies, str(aval.dtype), layout=tuple(dims)), dims

        return use

    def read(self, env: dict[Any, _Use], atom: Any) -> _Use:
        return self.constant(atom.val) if isinstance(atom, jex.Literal) else env[atom]

    # -- programs ---------------------------------------------------------------------------------------
    def run(self, jaxpr: Any, env: dict[Any, _Use]) -> None:
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            uses = [self.read(env, v) for v in eqn.invars]
            if name in _CALLS or name.startswith("custom_vjp_call"):
                self._call(eqn, uses, env)
                continue
            if name in _IDENTITY and len(uses) == 1:
                env[eqn.outvars[0]] = uses[0]
                continue
            if len(eqn.outvars) != 1:
                raise DeriveError("primitive", "operations with one result", name)
            env[eqn.outvars[0]] = self._equation(eqn, uses)

    def _call(self, eqn: Any, uses: Sequence[_Use], env: dict[Any, _Use]) -> None:
        body = next(v for v in eqn.params.values() if isinstance(v, (jex.Jaxpr, jex.ClosedJaxpr)))
        consts = body.consts if isinstance(body, jex.ClosedJaxpr) else ()
        jaxpr = body.jaxpr if isinstance(body, jex.ClosedJaxpr) else body
        inner: dict[Any, _Use] = dict(zip(jaxpr.invars, uses, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            if np.ndim(value):
                raise DeriveError("constant", "arrays as arguments", "a closed-over array in an inner program")
            inner[var] = self.constant(value)
        self.run(jaxpr, inner)
        env.update({v: self.read(inner, w) for v, w in zip(eqn.outvars, jaxpr.outvars, strict=True)})

    def _equation(self, eqn: Any, uses: Sequence[_Use]) -> _Use:
        name = _RENAMED.get(eqn.primitive.name, eqn.primitive.name)
        anchor = name == "dot_general" or name in _REDUCTIONS
        make = self._maker(name, eqn)

        def use() -> _Instance:
            return make([u() for u in uses])

        if anchor or any(getattr(u, "anchored", False) for u in uses):
            instance = use()

            def fixed() -> _Instance:
                return instance[0], list(instance[1])

            fixed.anchored = True  # pyright: ignore[reportFunctionMemberAccess]
            return fixed
        return use

    def _maker(self, name: str, eqn: Any) -> Callable[[list[_Instance]], _Instance]:
        if name in POINTWISE:
            return lambda xs: self._pointwise(name, eqn, xs)
        if name in _REDUCTIONS:
            return lambda xs: self._reduction(name, eqn, *xs[0])
        if name in _RESHAPES:
            return lambda xs: (xs[0][0], regroup(xs[0][1], eqn.outvars[0].aval.shape))
        if name == "transpose":
            return lambda xs: (xs[0][0], [xs[0][1][p] for p in eqn.params["permutation"]])
        if name == "broadcast_in_dim" and len(eqn.invars) == 1:
            return lambda xs: self._broadcast(eqn, *xs[0])
        if name == "dot_general":
            return lambda xs: self._dot(eqn, *xs)
        if name == "iota":
            return lambda xs: self._iota(eqn)
        if streams_bits(eqn):
            return lambda xs: self._bits(eqn, xs[0][0])
        raise DeriveError("primitive", "pointwise operations, contractions, reductions and changes of layout", name)

    # -- one maker per kind -----------------------------------------------------------------------------
    def _pointwise(self, name: str, eqn: Any, xs: list[_Instance]) -> _Instance:
        out = eqn.outvars[0].aval
        kept = PARAMETERS.get(name, ())
        if eqn.params.get("accuracy") is not None:
            raise DeriveError("parameter", f"{name} at the default accuracy", str(eqn.params["accuracy"]))
        params = tuple((k, _plain(eqn.params[k])) for k in sorted(kept))
        if name == "convert_element_type":
            if xs[0][0].dtype == str(out.dtype):
                return xs[0]
            if xs[0][0].op == "constant":
                return self.constant(np.asarray(dict(xs[0][0].params)["value"]).astype(out.dtype))()[0], xs[0][1]
        dims = [d for _, d in xs if len(d) == out.ndim] if out.ndim else []
        merged = list(dims[0]) if dims else []
        for other in dims[1:]:
            merged = [_beside(a, b) for a, b in zip(merged, other, strict=True)]
        varies = tuple(d for node, _ in xs for d in node.varies)
        return self.node(name, tuple(n for n, _ in xs), params, varies, str(out.dtype)), merged

    def _reduction(self, op: str, eqn: Any, x: _Node, dims: list[Dim]) -> _Instance:
        axes = {a % len(dims) for a in map(int, eqn.params["axes"])}
        over = tuple(d for i, d in enumerate(dims) if i in axes)
        out = self.node(op, (x,), (), _without(x.varies, over), str(eqn.outvars[0].aval.dtype), over=over)
        return out, [d for i, d in enumerate(dims) if i not in axes]

    def _broadcast(self, eqn: Any, x: _Node, dims: list[Dim]) -> _Instance:
        shape = eqn.outvars[0].aval.shape
        origin = {int(d): i for i, d in enumerate(eqn.params["broadcast_dimensions"])}
        before = eqn.invars[0].aval.shape
        new = [
            dims[origin[d]] if d in origin and before[origin[d]] == n else fresh(n) for d, n in enumerate(shape)
        ]
        return x, new

    def _dot(self, eqn: Any, lhs: _Instance, rhs: _Instance) -> _Instance:
        (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
        (a, ad), (b, bd) = lhs, rhs
        over = tuple(unite(ad[i], bd[j]) for i, j in zip(lc, rc, strict=True))
        batch = [unite(ad[i], bd[j]) for i, j in zip(lb, rb, strict=True)]
        free = [ad[i] for i in range(len(ad)) if i not in (*lc, *lb)]
        free += [bd[j] for j in range(len(bd)) if j not in (*rc, *rb)]
        precision = eqn.params["precision"]
        params = () if precision is None else (("precision", "/".join(p.name for p in _pair(precision))),)
        varies = _without((*a.varies, *b.varies), over)
        out = self.node("dot", (a, b), params, varies, str(eqn.outvars[0].aval.dtype), over=over)
        return out, [*batch, *free]

    def _iota(self, eqn: Any) -> _Instance:
        dims = [fresh(n) for n in eqn.params["shape"]]
        along = dims[eqn.params["dimension"]]
        dtype = str(np.dtype(eqn.params["dtype"]))
        if not along:
            return self.constant(np.zeros((), dtype))()[0], dims
        return self.node("iota", (), (), (along,), dtype, layout=(along,)), dims

    def _bits(self, eqn: Any, key: _Node) -> _Instance:
        shape = tuple(eqn.params["shape"])
        if math.prod(shape) >= 2**32 or key.varies:
            raise DeriveError("random", "random bits of less than 2^32 elements from one key", f"{shape}")
        dims = [fresh(n) for n in shape]
        varies = tuple(d for d in dims if d)
        return self.node("bits", (key,), (), varies, "uint32", layout=tuple(dims)), dims

    # -- names ------------------------------------------------------------------------------------------
    def finish(self, outputs: Sequence[_Instance], avals: Sequence[Any]) -> ComputationGraph:
        return _Finisher().finish(outputs, avals)


class _Finisher:
    """Gives axes their names, shares equal values, drops what no output needs."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.axes: dict[str, int] = {}
        self.values: list[Value] = []
        self.views: dict[int, View] = {}
        self.known: dict[Any, int] = {}
        self.done: dict[int, int] = {}
        self._alive: list[Any] = []

    def finish(self, outputs: Sequence[_Instance], avals: Sequence[Any]) -> ComputationGraph:
        found = []
        for (node, dims), aval in zip(outputs, avals, strict=True):
            position = self.value(node)
            axes = self.axes_of(dims)
            if len(set(axes)) < len(axes):
                raise DeriveError("axis_twice", "each axis once in a result", f"axes {axes}")
            found.append((position, View(tuple(aval.shape), tuple(self.axes_of([d]) for d in dims))))
        return _one_view(ComputationGraph(self.axes, tuple(self.values), self.views, tuple(found)))

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

    def value(self, root: _Node) -> int:
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

    def _add(self, node: _Node) -> int:
        args = tuple(self.done[id(a)] for a in node.args)
        params = node.params
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
                params = (*params, ("layout", View(sizes, layout)))
        elif node.op == "iota":
            params = (("axis", self.axes_of(node.layout)[0]),)
        if node.op == "dot" or node.op in _REDUCTIONS:
            return self._reduce(node, args, axes)
        return self._intern(node.op, args, params, axes, node.dtype)

    def _reduce(self, node: _Node, args: tuple[int, ...], axes: set[str]) -> int:
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
            out = self._intern(node.op, args, (("over", real), *node.params), axes - set(over), node.dtype)
        if repeated != 1 and node.op in ("dot", "reduce_sum"):
            size = self._intern("constant", (), (("value", repeated),), set(), "int32")
            size = self._intern("convert_element_type", (size,), (("new_dtype", node.dtype),), set(), node.dtype)
            out = self._intern("mul", (out, size), (), set(self.values[out].axes), node.dtype)
        return out

    def _no_diagonal(self, args: tuple[int, ...], over: tuple[str, ...]) -> None:
        if len(set(over)) < len(over):
            raise DeriveError("axis_twice", "each axis contracted once", f"{over}")

    def _intern(self, op: str, args: tuple[int, ...], params: Any, axes: set[str], dtype: str) -> int:
        if op in ("add", "mul", "max", "min", "and", "or") and len(args) == 2:
            args = tuple(sorted(args))  # pyright: ignore[reportAssignmentType]
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


def _one_view(graph: ComputationGraph) -> ComputationGraph:
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
        return View(v.shape, tuple(tuple(map(one, d)) for d in v.dims))

    axes = {a: n for a, n in graph.axes.items() if a != drop}
    finisher = _Finisher()
    finisher.axes = axes
    place: list[int] = []
    for i, value in enumerate(graph.values):
        params = tuple((k, tuple(map(one, p)) if k in ("over", "axes") else p) for k, p in value.params)
        params = tuple((k, one(p) if k == "axis" else p) for k, p in params)
        if value.op == "input":
            params = (*params, ("layout", view(graph.views[i])))
        args = tuple(place[a] for a in value.args)
        place.append(finisher._intern(value.op, args, params, {one(a) for a in value.axes}, value.dtype))
    outputs = tuple((place[v], view(w)) for v, w in graph.outputs)
    return ComputationGraph(axes, tuple(finisher.values), finisher.views, outputs)


def _without(dims: Sequence[Dim], over: Sequence[Dim]) -> tuple[Dim, ...]:
    gone = {id(a) for d in over for a in resolve(d)}
    return tuple((a,) for d in dims for a in resolve(d) if id(a) not in gone)


def _beside(a: Dim, b: Dim) -> Dim:
    """Two dimensions of operands of one operation: jax lets a dimension of one stand beside any other."""
    return (a or b) if size_of(a) == 1 or size_of(b) == 1 else unite(a, b)


def streams_bits(eqn: Any) -> bool:
    """Whether an equation makes random bits that are a function of key and position: 32 bits of partitionable threefry."""
    if eqn.primitive.name != "random_bits" or eqn.params["bit_width"] != 32:
        return False
    aval = eqn.invars[0].aval
    partitionable = bool(getattr(jax.config, "jax_threefry_partitionable"))  # noqa: B009 - a flag pyright does not know
    return str(aval.dtype) == "key<fry>" and partitionable and aval.ndim == 0 and math.prod(eqn.params["shape"]) < 2**32


def _pair(precision: Any) -> tuple[Any, ...]:
    return tuple(precision) if isinstance(precision, tuple) else (precision,)


def _plain(value: Any) -> Any:
    """A parameter as text can hold it."""
    if isinstance(value, (bool, int, float, str)):
        return value
    return str(np.dtype(value)) if not isinstance(value, np.generic) else value.item()
