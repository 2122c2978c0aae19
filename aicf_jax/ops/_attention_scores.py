"""The scores of attention read off the computation graph, from the softmax down to Q and K."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from aicf_jax.ops._position_band import Unidentified, number


@dataclasses.dataclass(frozen=True)
class Fill:
    """What stands in for a hidden score.

    Attributes:
      value: the number the softmax sees.
      added: whether the score was added to it.
    """

    value: float
    added: bool


def through_casts(graph: Any, v: int, stop: int = -1) -> int:
    """What a value is but for casts between floating-point types."""
    while v != stop and graph.values[v].op == "convert_element_type":
        if not jnp.issubdtype(jnp.dtype(graph.values[graph.values[v].args[0]].dtype), jnp.floating):
            break
        v = graph.values[v].args[0]
    return v


class Scores:
    """X, read from the softmax down to Q and K.

    `masks`: predicates, and whether a key is seen where they are true. `fills`: what stands in for the scores that each
    of them hides. `biases`: values that are added, with their factor.
    """

    def __init__(self, graph: Any):
        self.graph = graph
        self.factor = 1.0
        self.softcap: float | None = None
        self.masks: list[tuple[int, bool]] = []
        self.fills: list[Fill] = []
        self.biases: list[tuple[int, float]] = []
        self.q = self.k = self.dot = -1
        self._sums: list[tuple[int, float, float]] = []

    def read(self, v: int) -> None:
        while self.dot < 0:
            v = self._next(through_casts(self.graph, v))
        for select, factor, of_scores in self._sums:
            self._add_mask(select, factor, of_scores)

    def _next(self, v: int) -> int:
        """What a value is computed from."""
        value = self.graph.values[v]
        if value.op == "dot":
            self.dot = v
            self.q, self.k = (self._operand(a) for a in value.args)
            return v
        if value.op in ("mul", "div", "neg"):
            return self._scaled(v)
        if value.op == "select_n" and len(value.args) == 3:
            return self._masked(value)
        if value.op in ("add", "sub"):
            return self._added(value)
        if value.op == "tanh" and self.softcap is None:
            if self.factor <= 0:
                raise Unidentified("a softcap that is not positive")
            # softcap tanh(scale X / softcap): the factor starts again with what cancels the division.
            self.softcap = self.factor
            return value.args[0]
        raise Unidentified(f"scores through {value.op}")

    def _scaled(self, v: int) -> int:
        value = self.graph.values[v]
        if value.op == "neg":
            self.factor = -self.factor
            return value.args[0]
        a, b = value.args
        known = number(self.graph, b)
        if known is None and value.op == "mul":
            a, b = b, a
            known = number(self.graph, b)
        if known is None or not math.isfinite(known) or known == 0:
            raise Unidentified(f"scores in a {value.op} with what is no number")
        self.factor = self.factor * known if value.op == "mul" else self.factor / known
        return a

    def _operand(self, v: int) -> int:
        """Q or K: an input, perhaps scaled."""
        while self.graph.values[v := through_casts(self.graph, v)].op != "input":
            if self.graph.values[v].op not in ("mul", "div", "neg"):
                raise Unidentified(f"queries or keys from {self.graph.values[v].op}")
            v = self._scaled(v)
        return v

    def _masked(self, value: Any) -> int:
        predicate, *cases = value.args
        for hidden, rest, seen in ((0, 1, True), (1, 0, False)):
            if (fill := number(self.graph, cases[hidden])) is not None:
                if self.softcap is not None:
                    raise Unidentified(f"a mask that fills with {fill:g}")
                self._hides(fill, value.dtype, self.factor, added=False)
                if (self.biases or self._sums) and fill != -math.inf:
                    # A row that sees nothing shows the bias, which may be as low as the fill.
                    raise Unidentified("a bias that is added to a fill")
                self.masks.append((predicate, seen))
                return cases[rest]
        raise Unidentified("a choice between scores")

    def _added(self, value: Any) -> int:
        """A sum of the scores and of what is made without Q and K."""
        a, b = value.args
        is_score = [self._has_product(x) for x in (a, b)]
        if is_score == [False, True] and value.op == "add":
            a, b = b, a
        elif is_score != [True, False]:
            raise Unidentified("a sum of scores")
        if self.softcap is not None:
            raise Unidentified("something added to the scores under their softcap")
        self._terms(b, self.factor if value.op == "add" else -self.factor)
        return a

    def _terms(self, v: int, factor: float) -> None:
        """What is added to the scores: masks, and arrays."""
        v = through_casts(self.graph, v)
        value = self.graph.values[v]
        if number(self.graph, v) == 0:
            return
        if value.op == "add":
            for a in value.args:
                self._terms(a, factor)
        elif value.op == "mul" and (known := number(self.graph, value.args[1])):
            self._terms(value.args[0], factor * known)
        elif value.op == "mul" and (known := number(self.graph, value.args[0])):
            self._terms(value.args[1], factor * known)
        elif self._added_fill(value) is not None:
            self._sums.append((v, factor, self.factor))
        else:
            self.biases.append((v, factor))

    def _added_fill(self, value: Any) -> tuple[float, bool] | None:
        """``(fill, seen)`` of what is 0 where a predicate is `seen` and a number elsewhere; None: it is not."""
        if value.op != "select_n" or len(value.args) != 3:
            return None
        cases = [number(self.graph, a) for a in value.args[1:]]
        if None in cases or 0 not in cases:
            return None
        seen = cases[1] == 0
        fill = cases[0 if seen else 1]
        return None if fill is None else (fill, seen)

    def _add_mask(self, v: int, factor: float, of_scores: float) -> None:
        """What is 0 or very low, as a mask where a hidden score is the fill itself, else as one more bias.

        `of_scores`: the factor of what it was added to. Of a score beside a fill of float16 something is left, and of a
        bias that is as low as the fill.
        """
        value = self.graph.values[v]
        found = self._added_fill(value)
        assert found is not None
        fill, seen = found
        if factor != of_scores:
            raise Unidentified("a mask that is subtracted")
        if fill != -math.inf and (self.biases or value.dtype == "float16"):
            self.biases.append((v, factor))
            return
        self._hides(fill, value.dtype, of_scores, added=True)
        self.masks.append((value.args[0], seen))

    def _has_product(self, v: int) -> bool:
        todo, seen = [v], {v}
        while todo:
            value = self.graph.values[todo.pop()]
            if value.op == "dot":
                return True
            new = [a for a in value.args if a not in seen]
            seen.update(new)
            todo += new
        return False

    def _hides(self, fill: float, dtype: str, factor: float, added: bool) -> None:
        """Scores that are not seen must be so low that their exponential is 0 beside any other."""
        lowest = float(jnp.finfo(jnp.dtype(dtype)).min)
        if not factor * fill <= max(lowest / 2, -1e30):
            raise Unidentified(f"a mask that fills with {fill:g}")
        self.fills.append(Fill(factor * fill, added))
