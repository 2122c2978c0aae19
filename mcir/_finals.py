"""Final values of online reductions: their state, with what was taken out of the sum put back."""

from __future__ import annotations

from typing import Any

from mcir._reductions import Kind, Reductions
from mcir._site import accumulator
from mcir.algebra import Exp, Forms, merged
from mcir.errors import DeriveError
from mcir.graph import Value
from mcir.ir import Compute


class Finals(Reductions):
    """What follows a stream."""

    def _finish(self, forms: Forms, r: int, state: str, found: Kind, states: dict[int, str]) -> None:
        """The final value of a reduction: its state, with what was taken out of the sum put back."""
        value, (kind, form, _) = self.graph.values[r], found
        dtype = accumulator(value.dtype)
        if value.op == "reduce_max":
            dtype = accumulator(self.graph.values[value.args[0]].dtype)
        name = state
        if kind == "exp":
            assert isinstance(form, Exp)
            name = self._put_back(forms, r, form, state, states)
            name = self._guarded(form, name, value, accumulator(value.dtype))
        if tiled := self._tiled(r):
            self.outer[r] = self._share_of(r, name, tiled)
            return
        if dtype != value.dtype:
            name = self._cast(self.body, name, value.dtype, value.axes)
        self.outer[r] = name

    def _share_of(self, r: int, state: str, tiled: list[str]) -> str:
        """What one tile adds to a sum over tiles."""
        value = self.graph.values[r]
        name = self.site.names.fresh(f"{self.targets[r]}_part" if r in self.targets else "part")
        over = (("over", self.site.renamed(tiled)),)
        self.body.append(Compute(name, "reduce_sum", (state,), over, self._type(accumulator(value.dtype), value.axes)))
        return name

    def _put_back(self, forms: Forms, r: int, form: Exp, state: str, states: dict[int, str]) -> str:
        value = self.graph.values[r]
        dtype = accumulator(value.dtype)
        exponents, powers = self._outside(forms, form, value.param("over"), states)
        name = state
        for (kind, key), power in powers.items():
            other = self._row_atom(kind, key, states, dtype)
            for _ in range(abs(round(power))):
                op = "div" if power < 0 else "mul"
                out = self.site.names.fresh("o" if value.op == "dot" else "l")
                self.body.append(Compute(out, op, (name, other), (), self._type(dtype, value.axes)))
                name = out
        if exponents:
            name = self._times_exp(exponents, name, dtype, value, states)
        return name

    def _outside(self, forms: Forms, form: Exp, over: tuple[str, ...], states: dict[int, str]) -> Any:
        """What a reduction's state must be multiplied by: coefficients of exponents, and powers of row values."""
        exponents: dict[tuple[str, Any], float] = {("max", (form.x, over)): form.base}
        powers: dict[tuple[str, Any], float] = {}
        todo = [(forms.exponent(q), c) for q, c in form.rows]
        for q, k in form.factors:
            todo.append(({("log", forms.positive(q)): 1.0}, float(k)))
        while todo:
            part, weight = todo.pop()
            for (kind, q), c in part.items():
                c = c * weight
                inner = self._form_of(forms, q) if q in states else None
                if kind == "log" and inner is not None and isinstance(inner[1], Exp):
                    inner_form, inner_over = inner[1], self.graph.values[q].param("over")
                    powers = merged([(powers, 1.0), ({("state", q): c}, 1.0)])
                    exponents = merged(
                        [(exponents, 1.0), ({("max", (inner_form.x, inner_over)): c * inner_form.base}, 1.0)]
                    )
                    todo += [(forms.exponent(p), c * b) for p, b in inner_form.rows]
                    todo += [({("log", forms.positive(p)): 1.0}, c * k) for p, k in inner_form.factors]
                elif kind == "log":
                    powers = merged([(powers, 1.0), ({("row", q): c}, 1.0)])
                else:
                    own = self.graph.values[q]
                    key = (own.args[0], own.param("over")) if own.op == "reduce_max" else None
                    atom = ("max", key) if key in self.maxima else ("row", q)
                    exponents = merged([(exponents, 1.0), ({atom: c}, 1.0)])
        if any(abs(p - round(p)) > 1e-9 for p in powers.values()):
            raise DeriveError("power", "whole powers of a denominator", str(powers))
        return exponents, powers

    def _row_atom(self, kind: str, key: Any, states: dict[int, str], dtype: str) -> str:
        """A number of each row in the element type of a sum: a softmax in float32 may weight values in float64."""
        if kind == "state":
            name, value = states[key], self.graph.values[key]
            made, axes = accumulator(value.dtype), value.axes
        elif kind == "max":
            name, value = self.maxima[key], self.graph.values[key[0]]
            made, axes = accumulator(value.dtype), tuple(a for a in value.axes if a not in key[1])
        else:
            name, value = self._outer_value(key), self.graph.values[key]
            made, axes = value.dtype, value.axes
        return name if made == dtype else self._cast(self.body, name, dtype, axes)

    def _times_exp(self, exponents: dict[Any, float], name: str, dtype: str, value: Value, states: Any) -> str:
        total, axes = "", set()
        for (kind, key), c in exponents.items():
            term = self._row_atom(kind, key, states, dtype)
            own = (
                self.graph.values[key].axes
                if kind == "row"
                else tuple(a for a in self.graph.values[key[0]].axes if a not in key[1])
            )
            axes |= set(own)
            type_ = self._type(dtype, axes)
            if c != 1.0:
                factor = self.site.names.fresh("c")
                self.body.append(Compute(factor, "constant", (), (("value", c),), self._type(dtype, ())))
                scaled = self.site.names.fresh("r")
                self.body.append(Compute(scaled, "mul", (term, factor), (), self._type(dtype, own)))
                term = scaled
            if total:
                out = self.site.names.fresh("r")
                self.body.append(Compute(out, "add", (total, term), (), type_))
                total = out
            else:
                total = term
        power = self.site.names.fresh("c")
        self.body.append(Compute(power, "exp", (total,), (), self._type(dtype, axes)))
        out = self.site.names.fresh("o")
        self.body.append(Compute(out, "mul", (name, power), (), self._type(dtype, value.axes)))
        return out

    def _guarded(self, form: Exp, name: str, value: Value, dtype: str) -> str:
        """A sum with its factors put back, 0 where its guards have chosen nothing."""
        over = value.param("over")
        for predicate, when in form.guards:
            own = self.graph.values[predicate]
            if (predicate, when, over) in self.chosen:
                chosen = self.chosen[predicate, when, over]
            else:
                chosen = self._outer_value(predicate)
            zero = self.site.names.fresh("c")
            self.body.append(Compute(zero, "constant", (), (("value", 0.0),), self._type(dtype, ())))
            cases = (zero, name) if when or (predicate, when, over) in self.chosen else (name, zero)
            axes = {*value.axes, *(a for a in own.axes if a not in over)}
            out = self.site.names.fresh("o")
            self.body.append(Compute(out, "select_n", (chosen, *cases), (), self._type(dtype, axes)))
            name = out
        return name
