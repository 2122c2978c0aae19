"""What kind of loss an operation is, for kernels that are made for some kinds and cannot run the user's equations.

Read off the computation graph: what is done to the product, which arrays enter it and how they are laid out, and what
is taken from a row: its logit at an integer label, and sums whose weights are one number at the label and another one
elsewhere (one-hot and smoothed labels, the mean of log-probabilities). What a loss makes of these numbers is not
looked at: it is the user's own equations (`_loss_rows`). All of it is known exactly or the operation is no kind at all:
a string says why.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mcir
from aicf_jax import _compat
from aicf_jax.memo import memo
from aicf_jax.ops._loss_composition import logits_aval, loss_step, region_of, rows_of
from aicf_jax.ops._loss_rows import takes
from aicf_jax.ops._position_band import Unidentified, number
from aicf_jax.ops._row_slices import evaluate_rows
from aicf_jax.ops._semantic import FusedOp
from mcir.graph import View

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Matrix:
    """An operand of the product: the argument it is, how that is laid out, and the axes of its two dimensions."""

    argument: int
    view: View
    dims: tuple[Axes, Axes]


@dataclasses.dataclass(frozen=True)
class Taken:
    """A number of a row that is linear in the logits: they are weighed by `here` at the label, by `elsewhere` beside.

    `vid`: the value in the region that it belongs to, a pick or a sum. `label`: of a sum which argument the label
    is and how that is laid out (None: a pick, or weights without a label).
    """

    vid: int
    here: float
    elsewhere: float
    label: tuple[int, View] | None = None
    is_pick: bool = False


@dataclasses.dataclass(frozen=True)
class Variant:
    """A loss of the rows of ``x = scale X W``, or ``x = softcap tanh(scale X W / softcap)``.

    `rows`: the axes of the numbers of rows, in order; those of X have the order of X. `base`: exponentials are
    ``exp(base (x - m))``. `dtype`: of X and W in their product.
    """

    sizes: tuple[tuple[str, int], ...]
    x: Matrix
    w: Matrix
    trans_w: bool
    rows: Axes
    dtype: str
    scale: float
    softcap: float | None
    base: float
    taken: tuple[Taken, ...]

    def size(self, *axes: str) -> int:
        return math.prod(dict(self.sizes)[a] for a in axes)

    def __str__(self) -> str:
        rows, depth = (self.size(*d) for d in self.x.dims)
        parts = [f"{rows} rows of {self.size(*self.w.dims[1 - self.trans_w])} classes, depth {depth}, in {self.dtype}"]
        return ", ".join([*parts, f"scale {self.scale:.4g}", *([f"softcap {self.softcap:g}"] if self.softcap else [])])

    __repr__ = __str__


@memo()
def variant(op: FusedOp) -> Variant | str:
    """The kind of loss, or why it is none that is known."""
    if region_of(op).key is None or region_of(op).key[1] is not None:  # pyright: ignore[reportOptionalSubscript]
        return "a softmax with a mask of its own"
    slot = loss_step(op).operands[0]
    try:
        graph = mcir.trace(lambda *xs: (evaluate_rows(op, xs, slot),), *map(_compat.plain_aval, op.in_avals))
        return _read(op, graph)
    except mcir.DeriveError as error:
        return error.found
    except Unidentified as error:
        return str(error)


def _read(op: FusedOp, graph: Any) -> Variant:
    ((x, view),) = graph.outputs
    axis = op.blob["axis"] % len(view.dims)
    if len(view.dims[axis]) != 1 or view.place is not None:
        raise Unidentified("classes along several axes, or none")
    found = _Product(graph)
    found.read(x)
    (classes,) = view.dims[axis]
    rows = tuple(a for d, axes in enumerate(view.dims) if d != axis for a in axes)
    depth = tuple(graph.values[found.dot].param("over"))
    left, right = found.operands if classes in graph.values[found.operands[1]].axes else found.operands[::-1]
    x_axes, w_axes = (tuple(a for d in graph.views[i].dims for a in d) for i in (left, right))
    depth = tuple(a for a in w_axes if a in depth)
    if set(w_axes) != {classes, *depth} or set(x_axes) != {*rows, *depth}:
        raise Unidentified("a product with other axes than rows, depth and classes")
    if w_axes not in ((*depth, classes), (classes, *depth)) or not depth:
        raise Unidentified("classes between the axes that are contracted")
    base = region_of(op).key[0]  # pyright: ignore[reportOptionalSubscript]
    if found.factor <= 0 or base <= 0:
        raise Unidentified("a scale that is not positive")
    trans_w = w_axes[0] == classes
    return Variant(
        tuple(graph.axes.items()),
        _matrix(graph, left, (tuple(a for a in x_axes if a in rows), depth)),
        _matrix(graph, right, ((classes,), depth) if trans_w else (depth, (classes,))),
        trans_w,
        rows,
        found.dtype,
        found.factor,
        found.softcap,
        float(base),
        _taken(op),
    )


def _matrix(graph: Any, v: int, dims: tuple[Axes, Axes]) -> Matrix:
    return Matrix(int(graph.values[v].param("argument")), graph.views[v], dims)


def _through_casts(graph: Any, v: int) -> int:
    while graph.values[v].op == "convert_element_type":
        if not jnp.issubdtype(jnp.dtype(graph.values[graph.values[v].args[0]].dtype), jnp.floating):
            break
        (v,) = graph.values[v].args
    return v


class _Product:
    """Logits, read down to the two arguments that are multiplied."""

    def __init__(self, graph: Any):
        self.graph = graph
        self.factor, self.softcap, self.dot = 1.0, None, -1
        self.operands: tuple[int, ...] = ()
        self.dtype = ""

    def read(self, v: int) -> None:
        value = self.graph.values[v := _through_casts(self.graph, v)]
        while value.op != "dot":
            if value.op == "tanh" and self.softcap is None and self.factor > 0:
                # softcap tanh(scale X W / softcap): the factor starts again with what cancels the division.
                self.softcap, inner = self.factor, value.args[0]
            else:
                inner = self._scaled(value)
            value = self.graph.values[v := _through_casts(self.graph, inner)]
        dtypes = {self.graph.values[a].dtype for a in value.args}
        if len(dtypes) > 1:
            raise Unidentified("a product of two types")
        self.dot, (self.dtype,) = v, dtypes
        self.operands = tuple(_through_casts(self.graph, a) for a in value.args)
        for i in self.operands:
            if self.graph.values[i].op != "input":
                raise Unidentified(f"a product of what {self.graph.values[i].op} gives")

    def _scaled(self, value: Any) -> int:
        if value.op not in ("mul", "div"):
            raise Unidentified(f"logits through {value.op}")
        a, b = value.args
        known = number(self.graph, b)
        if known is None and value.op == "mul":
            a, b = b, a
            known = number(self.graph, b)
        if known is None or not math.isfinite(known) or known == 0:
            raise Unidentified(f"logits in a {value.op} with what is no number")
        self.factor = self.factor * known if value.op == "mul" else self.factor / known
        return a


# -- what is taken from a row -------------------------------------------------------------------------------


def _taken(op: FusedOp) -> tuple[Taken, ...]:
    region = region_of(op)
    found = []
    for vid in takes(region):
        if vid in region.picks:
            found.append(Taken(vid, 1.0, 0.0, is_pick=True))
        elif region.log.forms[region.sums[vid].base].mask is not None:
            raise Unidentified("a sum of log-probabilities with a mask")
        else:
            found.append(_weights(op, vid))
    labelled = {_label_key(op, t) for t in found if t.is_pick or t.label is not None}
    if len(labelled) > 1:
        raise Unidentified("several labels of a row")
    return tuple(found)


def _label_key(op: FusedOp, taken: Taken) -> Any:
    pick = region_of(op).picks.get(taken.vid)
    return taken.label if pick is None else (pick.labels, pick.pairs, pick.clipped)


def _weights(op: FusedOp, vid: int) -> Taken:
    """A sum over the classes whose weights are two numbers."""
    x = logits_aval(op)

    def f(*inputs: Any) -> Any:
        return (rows_of(op, inputs).weights_of(vid, jnp.ones(x.shape, jnp.promote_types(x.dtype, jnp.float32))),)

    graph = mcir.trace(f, *map(_compat.plain_aval, op.in_avals))
    ((out, view),) = graph.outputs
    axis = op.blob["axis"] % len(view.dims)
    reader = _TwoNumbers(graph, view.dims[axis])
    here, elsewhere = (float(n) for n in reader.read(out))
    if not (math.isfinite(here) and math.isfinite(elsewhere)):
        raise Unidentified("weights that are not finite")
    if reader.label is None:
        return Taken(vid, here, elsewhere)
    value = graph.values[reader.label]
    if value.op != "input":
        raise Unidentified(f"labels from {value.op}")
    order = [a for d, dims in enumerate(view.dims) if d != axis for a in dims]
    axes = tuple(a for d in graph.views[reader.label].dims for a in d)
    if axes != tuple(a for a in order if graph.axes[a] > 1 or a in axes):
        raise Unidentified("labels whose rows are in another order, or are not one for each row")
    return Taken(vid, here, elsewhere, (int(value.param("argument")), graph.views[reader.label]))


class _TwoNumbers:
    """A value that is one number where the class is the label of its row, and another one elsewhere.

    Both are rounded as written. `label`: the value that the label is, None as long as no class has been compared with
    one.
    """

    def __init__(self, graph: Any, classes: Axes):
        self.graph, self.classes = graph, classes
        self.label: int | None = None

    def read(self, v: int) -> tuple[Any, Any]:
        value = self.graph.values[v]
        if (known := number(self.graph, v)) is not None:
            return known, known
        if value.op in ("eq", "ne"):
            self._compare(value.args)
            return (True, False) if value.op == "eq" else (False, True)
        if value.op == "select_n" and len(value.args) == 3:
            which, *cases = (self.read(a) for a in value.args)
            return tuple(cases[int(w)][k] for k, w in enumerate(which))  # pyright: ignore[reportReturnType]
        if value.op in ("convert_element_type", *_ARITHMETIC):
            operands = [self.read(a) for a in value.args]
            f = _ARITHMETIC.get(value.op, lambda x: x)
            dtype = jnp.dtype(value.dtype)
            return tuple(np.asarray(f(*map(np.float64, pair))).astype(dtype) for pair in zip(*operands, strict=True))  # pyright: ignore[reportReturnType]
        raise Unidentified(f"weights by {value.op}")

    def _compare(self, args: Sequence[int]) -> None:
        """Classes with labels, which are integers."""
        for classes, label in (args, args[::-1]):
            position = self._through_integers(classes)
            if self.graph.values[position].op != "iota" or (self.graph.values[position].param("axis"),) != self.classes:
                continue
            label = self._through_integers(label)
            if self.graph.values[label].axes and set(self.graph.values[label].axes) & set(self.classes):
                break
            if self.label not in (None, label):
                raise Unidentified("weights of several labels")
            self.label = label
            return
        raise Unidentified("a comparison of other things than classes and labels")

    def _through_integers(self, v: int) -> int:
        values = self.graph.values
        while values[v].op == "convert_element_type" and all(
            jnp.issubdtype(jnp.dtype(values[i].dtype), jnp.integer) and jnp.dtype(values[i].dtype).itemsize >= 4
            for i in (v, values[v].args[0])
        ):
            (v,) = values[v].args
        return v


_ARITHMETIC: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
}


# -- arrays of the operation as those of a kernel, and back ----------------------------------------------------


def matrix(v: Variant, m: Matrix, argument: Any) -> Any:
    """An operand of the product as a matrix, from the argument that has it."""
    return along_axes(v, m, argument).reshape([v.size(*d) for d in m.dims])


def along_axes(v: Variant, m: Matrix, argument: Any) -> Any:
    """An operand of the product with a dimension for each axis, in the order of the matrix."""
    axes = tuple(a for d in m.view.dims for a in d)
    wanted = (*m.dims[0], *m.dims[1])
    x = _part(m.view, argument).reshape([v.size(a) for a in axes]).transpose([axes.index(a) for a in wanted])
    return x.astype(v.dtype)


def _part(view: View, argument: Any) -> Any:
    """What a view has of an argument."""
    place = view.place
    if place is None:
        return argument
    ends = [i + s * (n - 1) + 1 for i, s, n in zip(place.starts, place.strides, view.shape, strict=True)]
    return jax.lax.slice(argument, place.starts, ends, place.strides)


def to_rows(v: Variant, numbers: Any) -> Any:
    """Numbers of rows in the order of the kernel's, with a dimension for each axis."""
    x = numbers.reshape([v.size(a) for a in v.rows])
    return x.transpose([v.rows.index(a) for a in v.x.dims[0]])


def from_rows(op: FusedOp, v: Variant, numbers: Any) -> Any:
    """Numbers of rows, from what `to_rows` has, as the operation keeps them."""
    shape = list(logits_aval(op).shape)
    del shape[op.blob["axis"] % len(shape)]
    order = v.x.dims[0]
    return numbers.transpose([order.index(a) for a in v.rows]).reshape(shape)


def labels(op: FusedOp, v: Variant, inputs: Sequence[Any]) -> Any:
    """The label of each row as `to_rows` has them; no class where nothing is taken at a label."""
    shape = list(logits_aval(op).shape)
    axis = op.blob["axis"] % len(shape)
    shape[axis] = 1
    for taken in v.taken:
        if taken.is_pick:
            return to_rows(v, jnp.broadcast_to(rows_of(op, inputs).label_of(taken.vid), shape))
        if taken.label is not None:
            argument, view = taken.label
            return to_rows(v, _part(view, inputs[argument]).reshape(shape))
    return jnp.full([v.size(a) for a in v.x.dims[0]], -1, jnp.int32)


def needs_sum(v: Variant) -> bool:
    return any(t.elsewhere for t in v.taken)


def taken_of(v: Variant, label: Any, at_label: Any, total: Any) -> list[Any]:
    """What `_loss_rows` takes, from the logit at the label (0 where there is no such class) and the sum of logits."""
    classes = v.size(*v.w.dims[1 - v.trans_w])
    found = []
    for t in v.taken:
        value = t.here * at_label if not t.elsewhere else (t.here - t.elsewhere) * at_label + t.elsewhere * total
        found.append(at_label if t.is_pick else value)
        if not t.is_pick:
            is_class = jnp.where((label >= 0) & (label < classes), 1.0, 0.0)
            found.append(t.elsewhere * classes + (t.here - t.elsewhere) * is_class)
    return found


def taken_cotangents(v: Variant, dtaken: Sequence[Any]) -> tuple[Any, Any]:
    """Cotangents of the logit at the label and of the sum of logits."""
    left, at_label, total = list(dtaken), 0.0, 0.0
    for t in v.taken:
        d = left[0]
        left = left[1 if t.is_pick else 2 :]
        at_label, total = at_label + (t.here - t.elsewhere) * d, total + t.elsewhere * d
    return at_label, total
