"""Logits of which rows are left out: the same rows of what they are computed from.

``(h @ w)[:, :-1]`` is ``h[:, :-1] @ w``: a row of logits depends on its own row only. So a slice on the way to the loss
is moved back to the inputs, and no row that the loss does not read is computed. What it is moved past are products
(along a free or batch dimension), pointwise operations and changes of layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

import mcir
from aicf_jax import _compat
from aicf_jax.memo import memo
from aicf_jax.normalize._constants import SAME_VALUE
from aicf_jax.normalize.bias import unit_reshape
from aicf_jax.ops._attention_composition import evaluate
from aicf_jax.ops._semantic import FusedOp
from mcir.operations import POINTWISE

#: ``(start, limit, stride)`` of a dimension, None for all of it.
Window = tuple[tuple[int, int, int] | None, ...]
_ELEMENTWISE = frozenset((*POINTWISE, *SAME_VALUE))


def evaluate_rows(op: FusedOp, inputs: Sequence[Any], slot: int) -> Any:
    """The value of a slot by the equations, with what is sliced on the way sliced from the inputs.

    Raises DeriveError for a slice that cannot be moved there.
    """
    jaxpr = _sliced_program(op, slot)
    if jaxpr is None:
        return evaluate(op, inputs, slot, {})
    return _Rows(jaxpr, inputs).read(jaxpr.outvars[0], (None,) * jaxpr.outvars[0].aval.ndim)


@memo()
def _sliced_program(op: FusedOp, slot: int) -> Any:
    """The equations of a slot; None where nothing is sliced on the way from the product."""
    if not any(eqn.primitive.name == "slice" for step in op.steps for eqn in step.body.eqns):
        return None
    jaxpr = _compat.trace(lambda *xs: [evaluate(op, xs, slot, {})], *map(_compat.plain_aval, op.in_avals))
    return jaxpr if any(eqn.primitive.name == "slice" for eqn in jaxpr.eqns) else None


class _Rows:
    """Values of a program, computed where they are needed only."""

    def __init__(self, jaxpr: Any, inputs: Sequence[Any]):
        self.inputs = dict(zip(jaxpr.invars, inputs, strict=True))
        self.producer = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self.known: dict[tuple[Any, Window], Any] = {}

    def read(self, atom: Any, window: Window) -> Any:
        """Part of a value."""
        if isinstance(atom, _compat.Literal):
            return jax.numpy.asarray(atom.val, atom.aval.dtype)  # pyright: ignore[reportAttributeAccessIssue]
        if (atom, window) not in self.known:
            self.known[atom, window] = self._read(atom, window)
        return self.known[atom, window]

    def _read(self, atom: Any, window: Window) -> Any:
        if atom in self.inputs:
            cuts = [w or (0, n, 1) for w, n in zip(window, atom.aval.shape, strict=True)]
            x = self.inputs[atom]
            return jax.lax.slice(x, *zip(*cuts, strict=True)) if any(window) else x
        eqn = self.producer[atom]
        name, moved = eqn.primitive.name, None
        if name == "slice":
            return self.read(eqn.invars[0], _composed(eqn, window))
        if not any(window):
            return self._whole(eqn)[eqn.outvars.index(atom)]
        if name in _ELEMENTWISE:
            moved = [window if v.aval.ndim else () for v in eqn.invars]
        elif name in _WINDOWS:
            moved = _WINDOWS[name](eqn, window)
        if moved is None:
            raise mcir.DeriveError("slice", "slices of rows of the logits", f"a slice of what {name} gives")
        operands = [self.read(v, w) for v, w in zip(eqn.invars, moved, strict=True)]
        shape = [n if w is None else len(range(*w)) for w, n in zip(window, atom.aval.shape, strict=True)]
        return _bound(eqn, operands, shape)

    def _whole(self, eqn: Any) -> Sequence[Any]:
        """The results of an equation."""
        reads = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, _compat.Literal)))
        body = _compat.make_jaxpr_object(reads, eqn.outvars, [eqn], _compat.no_effects)
        return _compat.as_function(body)(*[self.read(v, (None,) * v.aval.ndim) for v in reads])


def _bound(eqn: Any, operands: Sequence[Any], shape: Sequence[int]) -> Any:
    """The operation of an equation on parts of its operands."""
    if eqn.primitive.name == "broadcast_in_dim":
        return jax.lax.broadcast_in_dim(operands[0], shape, eqn.params["broadcast_dimensions"])
    if eqn.primitive.name in _RESHAPES:
        return operands[0].reshape(shape)
    return eqn.primitive.bind(*operands, **eqn.params)


def _composed(eqn: Any, window: Window) -> Window:
    """What a part of a slice is of the whole."""
    found: list[tuple[int, int, int] | None] = []
    strides = eqn.params["strides"] or (1,) * len(window)
    cuts = zip(eqn.params["start_indices"], eqn.params["limit_indices"], strides, strict=True)
    for (start, limit, stride), w, n in zip(cuts, window, eqn.invars[0].aval.shape, strict=True):
        if w is not None:
            inner, end, step = w
            start, limit, stride = start + stride * inner, start + stride * (end - 1) + 1, stride * step
        found.append(None if (start, limit, stride) == (0, n, 1) else (start, limit, stride))
    return tuple(found)


# -- which part of its operands a part of a result is computed from -------------------------------------------------


def _of_broadcast(eqn: Any, window: Window) -> list[Window] | None:
    if len(eqn.invars) != 1:
        return None
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    places = eqn.params["broadcast_dimensions"]
    return [tuple(window[d] if before[i] == after[d] else None for i, d in enumerate(places))]


def _of_transpose(eqn: Any, window: Window) -> list[Window]:
    order = eqn.params["permutation"]
    return [tuple(window[order.index(d)] for d in range(len(order)))]


def _of_reshape(eqn: Any, window: Window) -> list[Window] | None:
    """Dimensions of one come and go; no other dimension that is cut may."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    places = unit_reshape(before, after)
    if places is None or (eqn.params.get("dimensions") is not None and eqn.primitive.name == "reshape"):
        return None
    if any(w is not None and d not in places for d, w in enumerate(window)):
        return None
    back = {old: new for new, old in places.items()}
    return [tuple(window[back[i]] if i in back else None for i in range(len(before)))]


def _of_product(eqn: Any, window: Window) -> list[Window]:
    contract, batch = eqn.params["dimension_numbers"]
    ndims = [v.aval.ndim for v in eqn.invars]
    free = [[d for d in range(n) if d not in (*c, *b)] for n, c, b in zip(ndims, contract, batch, strict=True)]
    found: list[Window] = []
    first = len(batch[0])
    for n, b, own in zip(ndims, batch, free, strict=True):
        place = dict(zip((*b, *own), (*range(len(b)), *range(first, first + len(own))), strict=True))
        found.append(tuple(window[place[d]] if d in place else None for d in range(n)))
        first += len(own)
    return found


_RESHAPES = ("reshape", "squeeze", "expand_dims")
_WINDOWS: dict[str, Any] = {
    "broadcast_in_dim": _of_broadcast,
    "transpose": _of_transpose,
    "dot_general": _of_product,
    **dict.fromkeys(_RESHAPES, _of_reshape),
}
