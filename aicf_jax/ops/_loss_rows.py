"""The loss of a row from a few numbers of it, and those numbers from its logits.

With ``m = max_j x_j`` and ``l = sum_j exp(a (x_j - m))`` every value of a loss that is one number a row is known from
m, l and what is *taken* from the logits: elements at the labels, ``t = x_label``, and weighted sums, ``t = sum_j w_j
x_j`` beside ``n = sum_j w_j``. A value ``s x_j + c L + d`` with ``L = a m + log l`` becomes ``s (t - m n) + c log l n +
d n`` where m cancels, so that large logits cost no precision. Everything is in float32 or wider up to there; the
arithmetic on rows that follows is the program's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from aicf_jax.graph import Graph, Node
from aicf_jax.normalize._constants import SAME_VALUE
from aicf_jax.normalize._log_forms import EXP, ONE, Form
from aicf_jax.normalize._loss_region import LossRegion, Sum
from aicf_jax.normalize._picks import Pick
from aicf_jax.ops._log_domain import capped, finite, wide


class Rows:
    """Values of one loss region.

    Args:
      region: grown from the first argument of its graph, the logits.
      others: the graph's other arguments.
    """

    def __init__(self, region: LossRegion, others: Sequence[Any]):
        self.region, self.graph = region, region.graph
        self.known: dict[int, Any] = dict(zip(self.graph.arguments[1:], others, strict=True))
        self.m: Any = None
        self.l: Any = None
        self.taken: dict[int, tuple[Any, Any, Any]] = {}

    # -- from the logits ----------------------------------------------------------------------------------
    def _masked(self, x: Any) -> Any:
        assert self.region.key is not None
        return wide(x, self._kept(self.region.key[1]))

    def _kept(self, mask: Any) -> Any:
        """Which elements of x take part, beside x; None for all."""
        if mask is None:
            return None
        name, keeps, dims = mask
        vid = next(v for v, found in self.region.log.masks.items() if found[0] == name)
        keep = self.value(vid).transpose([dims.index(d) for d in range(len(dims))])
        return keep if keeps else ~keep

    def maximum(self, x: Any) -> Any:
        """M. The loss does not depend on it, so it has no derivative."""
        return jax.lax.stop_gradient(jnp.max(self._masked(x), axis=self.region.axis))

    def total(self, x: Any, m: Any, again: bool = False) -> Any:
        """l, with m held. `again`: x is computed a second time, and may be rounded otherwise than for m."""
        assert self.region.key is not None
        m, x = jnp.expand_dims(m, self.region.axis), self._masked(x)
        difference = (capped(x, jnp.where(jnp.isinf(m), jnp.inf, m)) if again else x) - finite(m)
        base = self.region.key[0]
        if base != 1.0:
            difference = difference * jnp.asarray(base, difference.dtype)
        return jnp.sum(jnp.exp(difference), axis=self.region.axis)

    def taken_from(self, x: Any) -> list[Any]:
        """Every t and n, in the order of `takes`, and whether a row has elements where a mask may leave out all."""
        found = []
        for vid in takes(self.region):
            if vid in self.region.picks:
                found.append(self._picked(self.region.picks[vid], wide(x, None)))
            else:
                found += self._summed(self.region.sums[vid], x)
        return found

    def _picked(self, pick: Pick, x: Any) -> Any:
        dims = self.region.log.forms[pick.operand].dims
        n = x.shape[self.region.axis]
        label = self._labels(pick, dims)
        if pick.clipped:
            label = jnp.clip(label, 0, n - 1)
        here = jax.lax.broadcasted_iota(label.dtype, x.shape, self.region.axis) == label
        return jnp.sum(jnp.where(here, x, 0), axis=self.region.axis)

    def _labels(self, pick: Pick, dims: Sequence[int | None]) -> Any:
        """The labels beside x, with a dimension of one for the vocabulary."""
        label = self.value(pick.labels)
        label = label.astype(jnp.promote_types(label.dtype, jnp.int32))
        order = sorted(pick.pairs, key=lambda pair: pair[1])
        places: list[Any] = [dims[d] for d, _ in order]
        label = label.reshape([label.shape[e] for _, e in order])
        ascending = sorted(places)
        label = label.transpose([places.index(p) for p in ascending])
        return label.reshape([label.shape[ascending.index(d)] if d in places else 1 for d in range(len(dims))])

    def label_of(self, vid: int) -> Any:
        """What a pick takes from each row: integers beside x, with a dimension of one for the vocabulary."""
        pick = self.region.picks[vid]
        label = self._labels(pick, self.region.log.forms[pick.operand].dims)
        n = self.graph.values[self.region.x].aval.shape[self.region.axis]
        return jnp.clip(label, 0, n - 1) if pick.clipped else label

    def weights_of(self, vid: int, x: Any) -> Any:
        """Of a sum what the elements of x are multiplied by: beside x, of its shape and type."""
        found = self.region.sums[vid]
        order = [d for d in self.region.log.forms[found.base].dims if d is not None]
        w = self._linear(found.operand, found.base, jnp.ones_like(x).transpose(order))
        if found.other is not None:
            w = w * self._beside(found, len(order)).astype(w.dtype)
        return w.transpose([order.index(d) for d in range(len(order))])

    def _summed(self, found: Sum, x: Any) -> list[Any]:
        form = self.region.log.forms[found.base]
        keep = self._kept(form.mask)
        order = [d for d in form.dims if d is not None]
        x = wide(x, keep).transpose(order)
        k = order.index(self.region.axis)
        weight = None if found.other is None else self._beside(found, len(order))
        left = [d for d in order if d != self.region.axis]
        out = []
        # Ones beside x: a sum over an axis of its own would be a pass of its own.
        beside = jax.lax.broadcasted_iota("int32", x.shape, k) >= 0
        ones = jnp.where(beside, jnp.ones((), x.dtype), jax.lax.stop_gradient(x))
        for base in (x, ones):
            w = self._linear(found.operand, found.base, base)
            w = w if weight is None else w * weight.astype(w.dtype)
            out.append(jnp.sum(w, axis=k).transpose([left.index(d) for d in sorted(left)]))
        if keep is not None:
            kept = jnp.where(jnp.broadcast_to(keep.transpose(order), x.shape), ones, 0)
            out.append(jnp.sum(kept, axis=k).transpose([left.index(d) for d in sorted(left)]))
        return out

    def _beside(self, found: Sum, ndim: int) -> Any:
        """The second operand of a product of rows with rows, its dimensions where the first has them."""
        node = next(n for n in self.graph.nodes if found.other in n.inputs and n.op == "dot_general")
        (contract, batch) = self.graph.eqn(node.covers[0]).params["dimension_numbers"]
        k = node.inputs.index(found.operand)
        place = dict(zip((*batch[k], *contract[k]), (*batch[1 - k], *contract[1 - k]), strict=True))
        assert found.other is not None
        return self.value(found.other).transpose([place[d] for d in range(ndim)])

    def _linear(self, vid: int, base: int, x: Any) -> Any:
        """``W(x)`` for the value that is ``W(base)``."""
        if vid == base:
            return x
        node = self.graph.nodes[int(self.graph.producer[vid])]
        linear = self.region.linear
        main = next(v for v in node.inputs if v == base or v in linear)
        inner = self._linear(main, base, x)
        if node.op in SAME_VALUE:
            return inner
        if node.op == "neg":
            return -inner
        if node.op == "select_n":
            zero = jnp.zeros((), inner.dtype)
            cases = [inner if v == main else zero for v in node.inputs[1:]]
            return jnp.where(self.value(node.inputs[0]), cases[1], cases[0])
        other = self.value(next(v for v in node.inputs if v != main)).astype(inner.dtype)
        return inner * other if node.op == "mul" else inner / other

    # -- to the loss ----------------------------------------------------------------------------------------
    def loss(self, m: Any, l: Any, taken: Sequence[Any]) -> Any:
        """The result of the region."""
        self.m, self.l = m, l
        left = list(taken)
        for vid in takes(self.region):
            own = [left.pop(0) for _ in range(_taken_by(self.region, vid))]
            t, n, elements = (*own, None, None)[:3]
            self.taken[vid] = t, n, elements
        return self.value(self.graph.results[0])

    def value(self, vid: int) -> Any:
        """A value that does not depend on x, or is one number a row."""
        if vid not in self.known:
            self.known[vid] = self._value(vid)
        return self.known[vid]

    def _value(self, vid: int) -> Any:
        graph, region, aval = self.graph, self.region, self.graph.values[vid].aval
        if graph.values[vid].kind == "literal":
            return jnp.asarray(graph.literal(vid), aval.dtype)
        form = region.log.forms.get(vid)
        if vid in self.taken:
            return self._at_label(vid, aval) if vid in region.picks else self._sum_value(vid, aval)
        if form is not None:
            return _laid(self._of_form(form, None, None), form.dims, region.axis, aval)
        node = graph.nodes[int(graph.producer[vid])]
        return _result(graph, node, [self.value(v) for v in node.inputs])

    def _at_label(self, vid: int, aval: Any) -> Any:
        pick, (t, _, _) = self.region.picks[vid], self.taken[vid]
        form = self.region.log.forms[pick.operand]
        found = self._of_form(form, t, None)
        if pick.operand in self.region.inexact:
            found = form.slope * jnp.log(jnp.exp(form.slope * found))
        if not pick.clipped:
            label = jnp.squeeze(self._labels(pick, form.dims), self.region.axis)
            n = self.graph.values[self.region.x].aval.shape[self.region.axis]
            fill = jnp.nan if pick.fill is None else pick.fill
            found = jnp.where((label >= 0) & (label < n), found, jnp.asarray(fill, found.dtype))
        order = [form.dims[d] for d, _ in sorted(pick.pairs, key=lambda pair: pair[1])]
        return _laid(found, order, self.region.axis, aval)

    def _sum_value(self, vid: int, aval: Any) -> Any:
        found, (t, n, elements) = self.region.sums[vid], self.taken[vid]
        form = self.region.log.forms[found.base]
        order: list[int | None] = [d for d in form.dims if d != self.region.axis]
        if found.other is not None:
            node = self.graph.nodes[int(self.graph.producer[vid])]
            _, batch = self.graph.eqn(node.covers[0]).params["dimension_numbers"]
            order = [form.dims[d] for d in batch[node.inputs.index(found.operand)]]
        value = self._of_form(form, t, n)
        if elements is not None:
            value = jnp.where(elements > 0, value, 0)  # of nothing the sum is 0, and the log-sum-exp -inf or NaN
        return _laid(value, order, self.region.axis, aval)

    def _of_form(self, form: Form, t: Any, n: Any) -> Any:
        """``s x + c L + d`` at ``x = t``, ``1 = n`` (n None: 1), or the exponential of that."""
        assert self.region.key is not None
        base, times = self.region.key[0], lambda y: y if n is None else y * n
        c = next((c for term, c in form.terms.items() if term[0] == "log_sum"), 0.0)  # pyright: ignore
        shift = form.slope + c * base
        if abs(shift) <= self.region.log.tolerance * max(abs(form.slope), abs(c * base)):
            shift = 0.0
        out: Any = jnp.zeros_like(self.l)
        if c:
            m = finite(self.m)
            # inf - inf: an infinite logit makes its whole row NaN, unless the maximum is guarded.
            # A factor, so that the gradient of its whole row is NaN too.
            total = self.l if form.guarded else self.l * jnp.where(jnp.isinf(self.m), jnp.nan, 1.0)
            out = times(c * jnp.log(total)) + (times(shift * m) if shift else 0)
            out = out if not form.slope else out + form.slope * (t - times(m))
        elif form.slope:
            out = form.slope * t
        for term, coefficient in form.terms.items():
            if term == ONE:
                out = out + times(jnp.asarray(coefficient, out.dtype))
            elif term[0] == "value":  # pyright: ignore[reportIndexIssue]
                value = self.value(term[1]).astype(out.dtype)  # pyright: ignore[reportIndexIssue]
                out = out + times(coefficient * value)
        return jnp.exp(out) if form.domain == EXP else out


def takes(region: LossRegion) -> list[int]:
    """Picks and sums, in order."""
    return sorted((*region.picks, *region.sums))


def count(region: LossRegion) -> int:
    """How many numbers are taken from each row besides m and l."""
    return sum(_taken_by(region, vid) for vid in takes(region))


def _taken_by(region: LossRegion, vid: int) -> int:
    """How many numbers of a row a value takes: t; t and n; these and how many elements a mask leaves."""
    if vid in region.picks:
        return 1
    return 2 if region.log.forms[region.sums[vid].base].mask is None else 3


def _laid(rows: Any, order: Sequence[int | None], axis: int, aval: Any) -> Any:
    """Numbers of rows, whose dimensions are those of x without the vocabulary, as the program has them.

    `order`: for each dimension that is one of x's which one it is, None for one that was added.
    """
    dims = [d if d < axis else d + 1 for d in range(rows.ndim)]
    present = [d for d in order if d is not None]
    rows = rows.reshape([n for d, n in zip(dims, rows.shape, strict=True) if d in present])
    left = [d for d in dims if d in present]
    rows = rows.transpose([left.index(d) for d in present])
    if len(order) == len(aval.shape):
        where = [i for i, d in enumerate(order) if d is not None]
        rows = jax.lax.broadcast_in_dim(rows, aval.shape, where)
    return rows.reshape(aval.shape).astype(aval.dtype)


def _result(graph: Graph, node: Node, operands: Sequence[Any]) -> Any:
    eqn = graph.eqn(node.covers[0])
    if node.op in ("gather", "slice", "dynamic_slice"):
        return operands[0].reshape(eqn.outvars[0].aval.shape)  # reads all of it, see `is_unit_slice`
    return eqn.primitive.bind(*operands, **eqn.params)
