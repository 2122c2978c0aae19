"""Reads a jaxpr as a computation graph: finds out which dimensions are the same loop (`mcir._axes`).

An array that is used in two roles (``x`` as queries and as keys) has two *views* with axes of their own; so has
everything that is computed from inputs without a contraction or reduction, such as a mask from one ``iota``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from mcir._axes import Dim, fresh, regroup, resolve, size_of, unite
from mcir._finish import Finisher
from mcir._node import REDUCTIONS, Instance, Node, Use
from mcir.errors import DeriveError
from mcir.graph import ComputationGraph, Place
from mcir.operations import PARAMETERS, POINTWISE

#: More values than this are refused: views of views multiplied.
MAX_VALUES = 4096

_CALLS = {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call"}
_IDENTITY = {"stop_gradient", "copy", "copy_p", "optimization_barrier"}
_RENAMED = {"add_any": "add"}
_RESHAPES = {"reshape", "squeeze", "expand_dims"}


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
    env: dict[Any, Use] = {}
    for var, value in zip(jaxpr.constvars, consts, strict=True):
        if np.ndim(value):
            raise DeriveError("constant", "arrays as arguments", f"a closed-over array of shape {np.shape(value)}")
        env[var] = reader.constant(value)
    for i, var in enumerate(jaxpr.invars):
        env[var] = reader.input(i, var.aval)
    reader.run(jaxpr, env)
    outputs = [reader.read(env, v)() for v in jaxpr.outvars]
    return reader.finish(outputs, [v.aval for v in jaxpr.outvars])


class _Reader:
    def __init__(self) -> None:
        self.made = 0
        self.dims: list[list[Dim]] = []

    def node(self, *args: Any, **kwargs: Any) -> Node:
        self.made += 1
        if self.made > MAX_VALUES:
            raise DeriveError("size", f"at most {MAX_VALUES} values", "more")
        return Node(*args, **kwargs)

    # -- leaves -----------------------------------------------------------------------------------------
    def constant(self, value: Any) -> Use:
        array = np.asarray(value)
        node = self.node("constant", (), (("value", _shortest(array)),), (), str(array.dtype))
        return lambda: (node, [])

    def input(self, index: int, aval: Any) -> Use:
        def use() -> Instance:
            dims = [fresh(n) for n in aval.shape]
            varies = tuple(d for d in dims if d)
            params = (("argument", index),)
            return self.node("input", (), params, varies, str(aval.dtype), layout=tuple(dims)), dims

        return use

    def read(self, env: dict[Any, Use], atom: Any) -> Use:
        if isinstance(atom, jex.Literal):
            return self.constant(np.asarray(atom.val, atom.aval.dtype))  # pyright: ignore[reportAttributeAccessIssue]
        return env[atom]

    # -- programs ---------------------------------------------------------------------------------------
    def run(self, jaxpr: Any, env: dict[Any, Use]) -> None:
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

    def _call(self, eqn: Any, uses: Sequence[Use], env: dict[Any, Use]) -> None:
        body = next(v for v in eqn.params.values() if isinstance(v, (jex.Jaxpr, jex.ClosedJaxpr)))
        consts = body.consts if isinstance(body, jex.ClosedJaxpr) else ()
        jaxpr = body.jaxpr if isinstance(body, jex.ClosedJaxpr) else body
        inner: dict[Any, Use] = dict(zip(jaxpr.invars, uses, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            if np.ndim(value):
                raise DeriveError("constant", "arrays as arguments", "a closed-over array in an inner program")
            inner[var] = self.constant(value)
        self.run(jaxpr, inner)
        env.update({v: self.read(inner, w) for v, w in zip(eqn.outvars, jaxpr.outvars, strict=True)})

    def _equation(self, eqn: Any, uses: Sequence[Use]) -> Use:
        name = _RENAMED.get(str(eqn.primitive.name), str(eqn.primitive.name))
        anchor = name == "dot_general" or name in REDUCTIONS
        make = self._maker(name, eqn)

        def use() -> Instance:
            instance = make([u() for u in uses])
            self.dims.append(instance[1])
            return instance

        if anchor or any(getattr(u, "anchored", False) for u in uses):
            instance = use()

            def fixed() -> Instance:
                return instance[0], list(instance[1])

            fixed.anchored = True  # pyright: ignore[reportFunctionMemberAccess]
            return fixed
        return use

    def _maker(self, name: str, eqn: Any) -> Callable[[list[Instance]], Instance]:
        if name in POINTWISE:
            return lambda xs: self._pointwise(name, eqn, xs)
        if name in REDUCTIONS:
            return lambda xs: self._reduction(name, eqn, *xs[0])
        if name in _RESHAPES:
            return lambda xs: (xs[0][0], regroup(xs[0][1], eqn.outvars[0].aval.shape))
        if name == "transpose":
            return lambda xs: (xs[0][0], [xs[0][1][p] for p in eqn.params["permutation"]])
        if name == "broadcast_in_dim" and len(eqn.invars) == 1:
            return lambda xs: self._broadcast(eqn, *xs[0])
        if name == "dot_general":
            return lambda xs: self._dot(eqn, *xs)
        if name == "slice":
            return lambda xs: self._slice(eqn, *xs[0])
        if name == "pad":
            return lambda xs: self._pad(eqn, *xs)
        if name == "iota":
            return lambda xs: self._iota(eqn)
        if streams_bits(eqn):
            return lambda xs: self._bits(eqn, xs[0][0])
        raise DeriveError("primitive", "pointwise operations, contractions, reductions and changes of layout", name)

    # -- one maker per kind -----------------------------------------------------------------------------
    def _pointwise(self, name: str, eqn: Any, xs: list[Instance]) -> Instance:
        out = eqn.outvars[0].aval
        kept = PARAMETERS.get(name, ())
        if eqn.params.get("accuracy") is not None:
            raise DeriveError("parameter", f"{name} at the default accuracy", str(eqn.params["accuracy"]))
        params = tuple((k, _plain(eqn.params[k])) for k in sorted(kept))
        if name == "convert_element_type":
            if xs[0][0].dtype == str(out.dtype):
                return xs[0]
            if xs[0][0].op == "constant":
                value = np.asarray(dict(xs[0][0].params)["value"], jnp.dtype(xs[0][0].dtype))
                return self.constant(value.astype(out.dtype))()[0], xs[0][1]
        dims = [d for _, d in xs if len(d) == out.ndim] if out.ndim else []
        merged = list(dims[0]) if dims else []
        for other in dims[1:]:
            merged = [_beside(a, b) for a, b in zip(merged, other, strict=True)]
        varies = tuple(d for node, _ in xs for d in node.varies)
        return self.node(name, tuple(n for n, _ in xs), params, varies, str(out.dtype)), merged

    def _reduction(self, op: str, eqn: Any, x: Node, dims: list[Dim]) -> Instance:
        axes = {a % len(dims) for a in map(int, eqn.params["axes"])}
        over = tuple(d for i, d in enumerate(dims) if i in axes)
        out = self.node(op, (x,), (), _without(x.varies, over), str(eqn.outvars[0].aval.dtype), over=over)
        return out, [d for i, d in enumerate(dims) if i not in axes]

    def _broadcast(self, eqn: Any, x: Node, dims: list[Dim]) -> Instance:
        shape = eqn.outvars[0].aval.shape
        origin = {int(d): i for i, d in enumerate(eqn.params["broadcast_dimensions"])}
        before = eqn.invars[0].aval.shape
        new = [dims[origin[d]] if d in origin and before[origin[d]] == n else fresh(n) for d, n in enumerate(shape)]
        return x, new

    def _dot(self, eqn: Any, lhs: Instance, rhs: Instance) -> Instance:
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

    def _slice(self, eqn: Any, x: Node, dims: list[Dim]) -> Instance:
        """Part of an argument: an array of its own."""
        if x.op != "input" or "place" in dict(x.params) or list(x.layout) != dims:
            raise DeriveError("slice", "slices of arguments", f"a slice of what {x.op} gives")
        strides = eqn.params["strides"] or (1,) * len(dims)
        place = Place(tuple(eqn.invars[0].aval.shape), tuple(eqn.params["start_indices"]), tuple(strides))
        new = [fresh(n) for n in eqn.outvars[0].aval.shape]
        params = (*x.params, ("place", place))
        varies = tuple(d for d in new if d)
        return self.node("input", (), params, varies, x.dtype, layout=tuple(new)), new

    def _pad(self, eqn: Any, x: Instance, fill: Instance) -> Instance:
        """A result with zeros around and between its elements."""
        config = eqn.params["padding_config"]
        zero = fill[0].op == "constant" and dict(fill[0].params)["value"] == 0
        if not zero or any(low < 0 or high < 0 for low, high, _ in config):
            raise DeriveError("pad", "zeros around a result", "another padding")
        whole = tuple(eqn.outvars[0].aval.shape)
        place = Place(whole, tuple(low for low, _, _ in config), tuple(inner + 1 for _, _, inner in config))
        dims = [fresh(n) for n in whole]
        params = (("place", place),)
        return self.node("pad", (x[0],), params, x[0].varies, x[0].dtype, tuple(dims), tuple(x[1])), dims

    def _iota(self, eqn: Any) -> Instance:
        dims = [fresh(n) for n in eqn.params["shape"]]
        along = dims[eqn.params["dimension"]]
        dtype = str(np.dtype(eqn.params["dtype"]))
        if not along:
            return self.constant(np.zeros((), dtype))()[0], dims
        return self.node("iota", (), (), (along,), dtype, layout=(along,)), dims

    def _bits(self, eqn: Any, key: Node) -> Instance:
        shape = tuple(eqn.params["shape"])
        if math.prod(shape) >= 2**32 or key.varies:
            raise DeriveError("random", "random bits of less than 2^32 elements from one key", f"{shape}")
        dims = [fresh(n) for n in shape]
        varies = tuple(d for d in dims if d)
        return self.node("bits", (key,), (), varies, "uint32", layout=tuple(dims)), dims

    # -- names ------------------------------------------------------------------------------------------
    def finish(self, outputs: Sequence[Instance], avals: Sequence[Any]) -> ComputationGraph:
        for dims in self.dims:
            atoms = [id(a) for d in dims for a in resolve(d)]
            if len(set(atoms)) < len(atoms):
                sizes = [size_of(d) for d in dims]
                raise DeriveError("axis_twice", "each axis once in a value", f"a diagonal of an array of shape {sizes}")
        return Finisher().finish(outputs, avals)


def _without(dims: Sequence[Dim], over: Sequence[Dim]) -> tuple[Dim, ...]:
    gone = {id(a) for d in over for a in resolve(d)}
    return tuple((a,) for d in dims for a in resolve(d) if id(a) not in gone)


def _beside(a: Dim, b: Dim) -> Dim:
    """Two dimensions of operands of one operation: jax lets a dimension of one stand beside any other."""
    return (a or b) if size_of(a) == 1 or size_of(b) == 1 else unite(a, b)


def streams_bits(eqn: Any) -> bool:
    """Whether an equation makes random bits that are a function of key and position (partitionable threefry)."""
    if eqn.primitive.name != "random_bits" or eqn.params["bit_width"] != 32:
        return False
    aval = eqn.invars[0].aval
    partitionable = bool(getattr(jax.config, "jax_threefry_partitionable"))  # noqa: B009 - a flag pyright does not know
    return str(aval.dtype) == "key<fry>" and partitionable and aval.ndim == 0 and math.prod(eqn.params["shape"]) < 2**32


def _pair(precision: Any) -> tuple[Any, ...]:
    return tuple(precision) if isinstance(precision, tuple) else (precision,)


def _shortest(array: Any) -> Any:
    """The number with the fewest digits that is this one in its type: -1e+30, not -1.0000000150474662e+30."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array.item()
    short = float(str(array[()]))
    return short if np.asarray(short, array.dtype) == array else array.item()


def _plain(value: Any) -> Any:
    """A parameter as text can hold it."""
    if isinstance(value, (bool, int, float, str)):
        return value
    return str(np.dtype(value)) if not isinstance(value, np.generic) else value.item()
