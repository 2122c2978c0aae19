"""Values of one tile in `mcir.lower_jax`: arrays whose dimensions are their axes in the program's order."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mcir._picks import element, picks
from mcir._site import accumulator
from mcir.ir import Compute, Load, OnlineReduction, Program, Stream, Tile, Type
from mcir.operations import POINTWISE, empty_value, random_bits, shifted_exp

Env = dict[str, Any]
#: Types that a contraction multiplies and sums in, as a product and its sum do.
_FULL = ("float32", "float64")


@dataclasses.dataclass
class Scope:
    """Values on chip and the position of the loops: axis -> index of its block.

    `turned` has values of outside a stream once more, their last two axes exchanged, for products inside of it.
    """

    values: Env
    position: Env
    turned: Env = dataclasses.field(default_factory=dict)


class Tiles:
    """How the values of a nest's tile are computed."""

    def __init__(self, program: Program, nest: Tile):
        self.program, self.nest = program, nest
        self.axes = {a.name: a for a in program.axes}
        self.types: dict[str, Type] = {}
        for s in flat(nest.body):
            if isinstance(s, (Load, Compute)):
                self.types[s.result] = s.type
            elif isinstance(s, OnlineReduction):
                self.types.update(dict.fromkeys(s.results, s.type))
        self.picks = picks(flat(nest.body), self.axes)
        self.products = {s.result: s for s in flat(nest.body) if isinstance(s, Compute) and s.op == "mul"}

    def _extent(self, axis: str, scope: Scope) -> int:
        """Size of a tile along an axis; the stream's axis counts as tiled inside it."""
        return self.axes[axis].block if axis in scope.position else self.axes[axis].size

    def _valid(self, over: Sequence[str], scope: Scope) -> dict[str, Any] | None:
        """For each ragged tiled axis of a reduction: which elements of its block exist. None when all do."""
        out = {}
        for name in over:
            axis = self.axes[name]
            if axis.ragged and name in scope.position:
                out[name] = scope.position[name] * axis.block + jnp.arange(axis.block) < axis.size
        return out or None

    def _masked(self, x: Any, type_: Type, valid: dict[str, Any], monoid: str) -> Any:
        for name, inside in valid.items():
            if name in type_.axes:
                keep = self._aligned(inside, (name,), type_.axes)
                x = jnp.where(keep, x, jnp.asarray(empty_value(monoid, x.dtype)))
        return x

    def _aligned(self, x: Any, axes: Sequence[str], target: Sequence[str]) -> Any:
        """X with a dimension of one for every axis of `target` that it does not vary along."""
        if tuple(axes) == tuple(target) or not axes:
            return x
        return x.reshape([x.shape[axes.index(a)] if a in axes else 1 for a in target])

    def _compute(self, s: Compute, scope: Scope) -> Any:
        target = s.type.axes
        if s.op == "constant":
            return jnp.asarray(s.param("value"), s.type.dtype)
        if s.op == "iota":
            (name,) = target
            return self._indices(name, scope).astype(s.type.dtype)
        if s.op == "bits":
            return self._bits(s, scope)
        types = [self.types[a] for a in s.args]
        args = [scope.values[a] for a in s.args]
        if s.op == "dot" or s.op.startswith("reduce_"):
            return self._contraction(s, args, types, scope)
        args = [self._aligned(x, t.axes, target) for x, t in zip(args, types, strict=True)]
        if s.op == "shifted_exp":
            return shifted_exp(args[0], args[1], s.param("base"))
        return self._pointwise(s, args)

    def _pointwise(self, s: Compute, args: list[Any]) -> Any:
        """Operations of `jax.lax` want equal shapes, but for scalars in some places: all are broadcast."""
        if len(args) > 1:
            args = list(jnp.broadcast_arrays(*args))
        out = POINTWISE[s.op](*args, **dict(s.params))
        return out if str(out.dtype) == s.type.dtype else out.astype(s.type.dtype)

    def _contraction(self, s: Compute, args: list[Any], types: list[Type], scope: Scope) -> Any:
        valid = self._valid(s.param("over"), scope)
        if s.op == "dot" and _is_across(types, s.param("over")):
            for k, name in enumerate(s.args):
                if name in scope.turned:
                    args[k], types[k] = scope.turned[name], _exchanged(types[k])
                    break
        monoid = {"reduce_max": "max", "reduce_min": "min"}.get(s.op, "sum")
        if valid is not None:
            args = [self._masked(x, t, valid, monoid) for x, t in zip(args, types, strict=True)]
        if s.op == "dot":
            return self._dot(args, types, s.type, s.param("precision"))
        short = self._without_a_pass(s, scope) if monoid == "sum" and valid is None else None
        return self._reduce(monoid, args[0], types[0], s.type.axes, s.type.dtype) if short is None else short

    def _without_a_pass(self, s: Compute, scope: Scope) -> Any:
        """A sum of what need not be written first: one element of each row, products of two arrays; None for others.

        Within a loop a sum of products takes jax 0.10 six times as long on a CPU as the contraction that it is.
        """
        picked = self._picked(s.args[0], s.type, scope)
        product = self.products.get(s.args[0])
        if picked is not None or product is None:
            return picked
        types = [self.types[a] for a in product.args]
        if any(t != product.type for t in types) or s.type.dtype != product.type.dtype or s.type.dtype not in _FULL:
            return None
        return self._dot([scope.values[a] for a in product.args], types, s.type, "HIGHEST")

    def _picked(self, summed: str, target: Type, scope: Scope) -> Any:
        """A sum that is one element of each row; None where it is another one."""
        pick, axes = self.picks.get(summed), self.types[summed].axes
        if pick is None or set(axes) - set(target.axes) != {pick.axis} or self.types[pick.x].axes != axes:
            return None
        label = self._aligned(scope.values[pick.label], self.types[pick.label].axes, axes)
        start = self._indices(pick.axis, scope)[0]
        return element(scope.values[pick.x], label, start, axes.index(pick.axis)).astype(target.dtype)

    def _reduce(self, monoid: str, x: Any, type_: Type, target: Sequence[str], dtype: str) -> Any:
        over = tuple(k for k, a in enumerate(type_.axes) if a not in target)
        if monoid == "sum":
            return jnp.sum(x, axis=over, dtype=dtype)
        return (jnp.max if monoid == "max" else jnp.min)(x, axis=over).astype(dtype)

    def _turned(self, body: Sequence[Any], values: Env) -> Env:
        """What products of a stream's body read across, of the values outside of it, with exchanged axes.

        A product whose operands both begin with the axis that is summed goes to a slower library of XLA's.
        """
        found: Env = {}
        for s in body:
            if isinstance(s, Compute) and s.op == "dot":
                types = [self.types[a] for a in s.args]
                name = next((a for a in s.args if a in values), None)
                if name is not None and _is_across(types, s.param("over")):
                    found[name] = jnp.swapaxes(values[name], -1, -2)
        return found

    def _dot(self, args: list[Any], types: list[Type], target: Type, precision: str | None) -> Any:
        letters = {a: chr(ord("a") + k) for k, a in enumerate(self.axes)}
        terms = ["".join(letters[a] for a in t.axes) for t in types]
        sizes = {a: n for x, t in zip(args, types, strict=True) for a, n in zip(t.axes, x.shape, strict=True)}
        turned = _is_turned(types, target, sizes)
        made = (*target.axes[:-2], *target.axes[:-3:-1]) if turned else target.axes
        formula = f"{terms[0]},{terms[1]}->{''.join(letters[a] for a in made)}"
        out = self._product(formula, args, target.dtype, precision)
        return jnp.swapaxes(out, -1, -2) if turned else out

    def _product(self, formula: str, args: list[Any], dtype: str, precision: str | None) -> Any:
        """Narrow operands are multiplied in float32, which is exact, and what a CPU does with most of them in any case.

        Some it multiplies as they are, and XLA decides which before it moves transposes into products, after which it
        may find that it cannot (jax 0.10 to 0.12: "Unsupported element type", when the program runs).
        """
        if all(accumulator(str(x.dtype)) != str(x.dtype) for x in args):
            args = [x.astype(accumulator(str(x.dtype))) for x in args]
            return jnp.einsum(formula, *args, preferred_element_type=accumulator(dtype)).astype(dtype)
        parts = () if precision is None else tuple(map(_precision, precision.split("/")))
        chosen: Any = parts if len(parts) > 1 else parts[0] if parts else None
        return jnp.einsum(formula, *args, precision=chosen, preferred_element_type=dtype)

    def _indices(self, name: str, scope: Scope) -> Any:
        start = scope.position[name] * self.axes[name].block if name in scope.position else 0
        return start + jnp.arange(self._extent(name, scope))

    def _bits(self, s: Compute, scope: Scope) -> Any:
        """Bits of the elements of this tile, by their flat position in the whole array."""
        sizes, axes = s.param("shape"), s.param("axes")
        flat: Any = jnp.zeros((), jnp.uint32)
        for k, name in enumerate(axes):
            stride = math.prod(sizes[k + 1 :])
            index = self._aligned(self._indices(name, scope).astype(jnp.uint32), (name,), s.type.axes)
            flat = flat + index * np.uint32(stride)
        return random_bits(scope.values[s.args[0]], flat)


def _is_across(types: Sequence[Type], over: Sequence[str]) -> bool:
    """Whether a product sums over the last axis but one of both its operands, and has the last ones in its result."""
    if len(over) != 1 or any(t.axes[-2:-1] != tuple(over) for t in types):
        return False
    left, right = types
    return left.axes[-1] not in right.axes and right.axes[-1] not in left.axes


def _exchanged(type_: Type) -> Type:
    return dataclasses.replace(type_, axes=(*type_.axes[:-2], *type_.axes[:-3:-1]))


def _is_turned(types: Sequence[Type], target: Type, sizes: dict[str, int]) -> bool:
    """Whether a product is faster as the transpose of itself.

    Where it is the plain one of rows and columns, ``[a, over] [over, b]``, and b, a are wanted. And where none of its
    operands ends in the axis that is summed: such products go to a library that is the faster the fewer rows the first
    operand has (a quarter, for 64 and 256).
    """
    both = set(types[0].axes) & set(types[1].axes)
    over = both - set(target.axes)
    if len(over) != 1 or len(target.axes) < 2:
        return False
    rows, columns = target.axes[-2:]
    if both & {rows, columns} or any(len(set(t.axes) - both) != 1 for t in types):
        return False
    ending = [{t.axes[-1]} == over for t in types]
    if any(ending):
        left, right = types if ending[0] else types[::-1]
        return right.axes[-2:] == (*over, rows) and left.axes[-2:] == (columns, *over)
    return sizes[rows] > sizes[columns]


def _precision(name: str) -> Any:
    """A precision of one operand, or an algorithm for both, as `jax.nn.dot_product_attention` asks for."""
    members = jax.lax.Precision.__members__
    return members[name] if name in members else jax.lax.DotAlgorithmPreset[name]


def flat(body: Sequence[Any]) -> list[Any]:
    """Every statement, streams before their bodies."""
    out: list[Any] = []
    for s in body:
        out.append(s)
        if isinstance(s, Stream):
            out += flat(s.body)
    return out
