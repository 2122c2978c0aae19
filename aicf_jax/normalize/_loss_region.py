"""Everything between logits x and a value that there is one of for each row, with what each equation does to them.

Around the log-sum-exp of the logits every value is log-affine (`_log_region`). Beside that a loss takes from x single
elements (picks) and sums with weights that do not depend on x; what follows is arithmetic on one number a row::

    loss = g(L_a, x_label, sum_j w_j (a x_j - L_a), ...),   L_a = log sum_j exp(a x_j)

A value of these kinds is a *member*; any other user of a member is *foreign*.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Hashable
from typing import Any

from aicf_jax.flags import OpFlags
from aicf_jax.graph import Node
from aicf_jax.normalize._constants import SAME_VALUE, constant, is_float
from aicf_jax.normalize._log_forms import EXP, LOG, ONE, Form
from aicf_jax.normalize._log_region import LogRegion
from aicf_jax.normalize._picks import Pick, is_unit_slice, pick_of
from mcir.operations import POINTWISE

#: Losses are no longer than this: a smoothed one with masks and z-loss has some 60 equations.
MEMBERS = 160

_ROW_LAYOUT = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", *SAME_VALUE)
_SLICES = ("gather", "slice", "dynamic_slice")
_HAS_EFFECT = int(OpFlags.HAS_EFFECT)


@dataclasses.dataclass(frozen=True)
class Sum:
    """A sum over the vocabulary of ``W(base)``: W multiplies by, and chooses with, what does not depend on x.

    `operand` is W(base); `other` the second operand where the sum is a product of both that is contracted.
    """

    base: int
    operand: int
    other: int | None = None


class LossRegion:
    """Grown from x in program order, to the first value that everything flows through, or as far as it goes (`whole`).

    Attributes:
      members: positions of the nodes between x and the loss.
      picks, sums: values that are one number a row, by VID.
      linear: values ``W(base)`` that vary along the vocabulary -> base.
      left_out: those of them that are 0 where a mask hides the base.
      rows: values that are computed from numbers of rows.
      inexact: logarithms of exponentials, which underflow where the log-softmax they stand for does not.
      foreign: ``(position, VID)``: nodes that are no part of a loss, and the value of ours that they read.
      exit: position of the first node that everything flows through, None where there is none.
      key: ``(a, mask)`` of the log-sum-exp.
      deepest: what spoils the region, as a code of `cross_entropy.NEAR_MISSES`; None for nothing.
      ignored: positions of users that are passed over, to see what there would be without them.
    """

    def __init__(self, log: LogRegion, whole: bool = False, ignored: frozenset[int] = frozenset()):
        self.graph, self.log, self.x, self.axis = log.graph, log, log.x, log.axis
        self.members: list[int] = []
        self.picks: dict[int, Pick] = {}
        self.sums: dict[int, Sum] = {}
        self.linear: dict[int, int] = {}
        self.left_out: set[int] = set()
        self.rows: set[int] = set()
        self.inexact: set[int] = set()
        self.foreign: list[tuple[int, int]] = []
        self.exit: int | None = None
        self.key: tuple[float, Hashable] | None = None
        self.deepest: str | None = None
        self.ignored = ignored
        self.depends: set[int] = {self.x}
        self._log_members = set(log.members)
        self._grow(whole)

    # -- growing ----------------------------------------------------------------------------------------
    def _grow(self, whole: bool) -> None:
        queue = list(self.graph.users(self.x))
        heapq.heapify(queue)
        seen: set[int] = set()
        while queue and len(self.members) < MEMBERS:
            position = heapq.heappop(queue)
            if position in seen or position in self.ignored:
                continue
            seen.add(position)
            node = self.graph.nodes[position]
            if not self._is_used(position):
                continue
            if not self._add(position, node):
                self.foreign += [(position, v) for v in dict.fromkeys(node.inputs) if v in self.depends]
                continue
            for c in self.graph.consumers(position):
                heapq.heappush(queue, c)
            if not whole and self._is_exit(node.outputs[0], set(queue) - seen - self.ignored):
                self.exit = position
                return

    def _is_used(self, position: int) -> bool:
        graph = self.graph
        escapes = not graph.escaping.isdisjoint(graph.nodes[position].outputs)
        return bool(graph.consumers(position)) or escapes or bool(graph.nodes[position].flags & _HAS_EFFECT)

    def _is_exit(self, vid: int, waiting: set[int]) -> bool:
        """Whether all that is still to come reads nothing of ours but this value, and it is a loss."""
        if not self.is_row(vid) or self.key is None or not (self.picks or self.sums):
            return False
        nodes = self.graph.nodes
        return all(v == vid or v not in self.depends for p in waiting if self._is_used(p) for v in nodes[p].inputs)

    def _add(self, position: int, node: Node) -> bool:
        if len(node.covers) != 1 or len(node.outputs) != 1 or node.flags & _HAS_EFFECT:
            return False
        out = node.outputs[0]
        if position in self._log_members:
            self._note_inexact(node)
        elif not self._classify(node, out):
            return False
        self.members.append(position)
        self.depends.add(out)
        return True

    def _note_inexact(self, node: Node) -> None:
        form = self.log.forms.get(node.inputs[0])
        if (node.op == "log" and form is not None and form.domain == EXP and form.slope) or any(
            v in self.inexact for v in node.inputs
        ):
            self.inexact.add(node.outputs[0])

    # -- kinds ------------------------------------------------------------------------------------------
    def is_row(self, vid: int) -> bool:
        """Whether there is one number of a value for each row, known from those of the region."""
        form = self.log.forms.get(vid)
        return vid in self.rows or (form is not None and not form.slope and self._may_leave(form))

    def is_wide(self, vid: int) -> bool:
        return vid in self.linear or (vid in self.log.forms and bool(self.log.forms[vid].slope))

    def _may_leave(self, form: Form, note: bool = False) -> bool:
        """Whether a form can be told from the log-sum-exp and x: nothing of the maximum alone is left in it."""
        terms: list[Any] = [term for term in form.terms if term != ONE]
        for term in terms:
            kind = term[0]
            if kind == "value" and term[1] not in self.depends and not self.graph.values[term[1]].aval.ndim:
                continue
            code = "depends_on_max" if kind == "max" else "several_softmaxes" if kind == "log_sum" else None
            if kind == "log_sum" and self.key in (None, term[1:]):
                self.key = term[1:]
                continue
            if note:
                self.deepest = self.deepest or code
            return False
        return True

    def _classify(self, node: Node, out: int) -> bool:
        mine = [v for v in dict.fromkeys(node.inputs) if v in self.depends]
        if all(self.is_row(v) for v in mine):
            return self._row(node, out)
        if len(mine) != 1 or not self.is_wide(mine[0]):
            for v in mine:
                if v in self.log.forms and not self.log.forms[v].slope:
                    self._may_leave(self.log.forms[v], note=True)
            return False
        (vid,) = mine
        base = self.linear.get(vid, vid)
        form = self.log.forms[base]
        if not self._may_leave(form, note=True):
            return False
        axis = form.dims.index(self.axis)
        if node.op == "gather":
            return self._pick(node, out, vid, form, axis)
        if form.domain != LOG:
            return False
        if node.op == "reduce_sum":
            if tuple(self.graph.eqn(node.covers[0]).params["axes"]) != (axis,):
                self.deepest = "rows_summed"
                return False
            return self._sum(out, Sum(base, vid))
        if node.op == "dot_general":
            return self._contraction(node, out, vid, base, axis)
        if self._is_linear(node, vid):
            self.linear[out] = base
            if vid in self.left_out or self._leaves_out(node, vid, form):
                self.left_out.add(out)
            return True
        return False

    def _row(self, node: Node, out: int) -> bool:
        if node.op in _SLICES:
            if node.inputs[0] not in self.depends or not is_unit_slice(self.graph, node):
                return False
        elif node.op not in POINTWISE and node.op not in _ROW_LAYOUT:
            return False
        self.rows.add(out)
        return True

    def _pick(self, node: Node, out: int, vid: int, form: Form, axis: int) -> bool:
        pick = pick_of(self.graph, node, axis)
        if pick is None or vid in self.linear or form.mask is not None or node.inputs[1] in self.depends:
            return False
        if vid in self.inexact and (abs(form.slope) != 1 or len(form.terms) != 1):
            self.deepest = "log_of_softmax"
            return False
        self.picks[out] = pick
        self.rows.add(out)
        return True

    def _sum(self, out: int, found: Sum) -> bool:
        if found.base in self.inexact:
            self.deepest = "log_of_softmax"
            return False
        form = self.log.forms[found.base]
        if form.mask is not None and (form.loose or found.operand not in self.left_out):
            return False  # 0 times the -inf of what is hidden
        self.sums[out] = found
        self.rows.add(out)
        return True

    def _is_linear(self, node: Node, vid: int) -> bool:
        graph = self.graph
        if graph.values[node.outputs[0]].aval.shape != graph.values[vid].aval.shape:
            return False
        if node.op == "stop_gradient":
            return False
        if node.op in ("mul", "neg", *SAME_VALUE):
            return node.inputs.count(vid) == 1 and is_float(graph, node.outputs[0])
        if node.op == "div":
            return node.inputs[0] == vid and node.inputs[1] != vid
        if node.op == "select_n" and len(node.inputs) == 3 and node.inputs[0] != vid:
            other = node.inputs[2 if node.inputs[1] == vid else 1]
            return constant(graph, other)[0] == 0
        return False

    def _leaves_out(self, node: Node, vid: int, form: Form) -> bool:
        """Whether a node is ``where(mask, value, 0)`` with the mask of the value's base."""
        if node.op != "select_n" or form.mask is None:
            return False
        pred, first, _ = node.inputs
        return (self.log.mask(pred), first != vid, form.dims) == form.mask

    def _contraction(self, node: Node, out: int, vid: int, base: int, axis: int) -> bool:
        """A product of rows with rows, as ``einsum("bv,bv->b", labels, log_probs)``."""
        if node.inputs.count(vid) != 1:
            return False
        (contract, batch) = self.graph.eqn(node.covers[0]).params["dimension_numbers"]
        for k, v in enumerate(node.inputs):
            ndim = self.graph.values[v].aval.ndim
            if len(contract[k]) != 1 or len(batch[k]) != ndim - 1 or (v == vid and tuple(contract[k]) != (axis,)):
                return False
        k = node.inputs.index(vid)
        return self._sum(out, Sum(base, vid, node.inputs[1 - k]))
