"""Online reductions of a nest: state, updates relative to a running maximum, and the final value."""

from __future__ import annotations

from typing import Any

from mcir._site import accumulator
from mcir._values import Values
from mcir.algebra import Exp, Form, Forms, Squared, merged
from mcir.errors import DeriveError
from mcir.graph import Value
from mcir.ir import Compute, OnlineReduction, Update

_MONOID = {"reduce_sum": "sum", "dot": "sum", "reduce_max": "max", "reduce_min": "min"}

#: How a reduction is streamed: ``plain``, ``exp`` or ``moments``; its operand's form; which operand that is.
Kind = tuple[str, Form | None, int]


class Reductions(Values):
    """State of the phase being written.

    Attributes:
      declared: the `OnlineReduction`s before its stream.
      maxima: ``(x, axes)`` -> the running maximum of x over these axes.
      states: what a corrected sum adds up -> its state; spellings of one sum share it.
      chosen: a guard and the axes reduced over -> whether it has chosen anything.
    """

    declared: list[Any]
    maxima: dict[tuple[int, tuple[str, ...]], str]
    states: dict[Any, str]
    chosen: dict[Any, str]

    def _form_of(self, forms: Forms, r: int) -> Kind | None:
        """``(kind, form, operand it is of)``: kind ``plain``, ``exp`` or ``moments``; None when none fits."""
        value = self.graph.values[r]
        bad = [k for k, a in enumerate(value.args) if forms.depends(a)]
        if not bad:
            return "plain", None, 0
        if len(bad) > 1 or len(set(value.args)) < len(value.args) or value.op not in ("reduce_sum", "dot"):
            return None
        form = forms.of(value.args[bad[0]])
        if isinstance(form, Exp):
            over = value.param("over")
            rows = [q for q, _ in (*form.rows, *form.factors)]
            if any(set(self.graph.values[q].axes) & set(over) for q in rows):
                return None
            return "exp", form, bad[0]
        if (
            isinstance(form, Squared)
            and value.op == "reduce_sum"
            and forms.is_mean(form.row, form.x, value.param("over"))
        ):
            return "moments", form, bad[0]
        return None

    def _update(self, r: int, found: Kind) -> str:
        """Declares and updates the state of one reduction; returns the name of its state."""
        value, (kind, form, k) = self.graph.values[r], found
        over = value.param("over")
        if value.op == "reduce_max" and kind == "plain":
            return self._maximum(value.args[0], over)
        if kind == "moments":
            assert isinstance(form, Squared)
            return self._moments(form.x, over, value)
        corrected, base = None, 1.0
        args = [self._inner_value(a) if i != k or kind == "plain" else "" for i, a in enumerate(value.args)]
        dtypes = [self.graph.values[a].dtype for a in value.args]
        if kind == "exp":
            assert isinstance(form, Exp)
            # Spellings of one sum differ in what is taken out of it (shifts by m, by max(-inf, m)), not in this.
            others = tuple(a for i, a in enumerate(value.args) if i != k)
            same = (value.op, form.x, form.base, form.linear, form.guards, over, others, value.params)
            if same in self.states:
                return self.states[same]
            corrected, base = self._maximum(form.x, over), form.base
            args[k], dtypes[k] = self._representation(form, corrected, over)
            for guard in form.guards:
                self._any_chosen(guard, over)
            for i, a in enumerate(value.args):
                if i != k and dtypes[i] != dtypes[k]:
                    args[i] = self._cast(self.inside, args[i], dtypes[k], self.graph.values[a].axes)
        wanted = "l" if kind == "exp" and value.op == "reduce_sum" else "acc" if value.op == "dot" else value.op[-3:]
        name = self.site.names.fresh(wanted)
        if kind == "exp":
            self.states[same] = name
        dtype = accumulator(value.dtype)
        self.declared.append(
            OnlineReduction(
                (name,), _MONOID[value.op], self.site.renamed(over), self._type(dtype, value.axes), corrected, base
            )
        )
        self.inside.append(Update((name,), tuple(args)))
        return name

    def _maximum(self, x: int, over: tuple[str, ...]) -> str:
        """The running maximum of x, declared and updated once."""
        key = (x, over)
        if key not in self.maxima:
            source = self._wide(x)
            name = self.site.names.fresh("m")
            value = self.graph.values[x]
            axes = [a for a in value.axes if a not in over]
            dtype = accumulator(value.dtype)
            self.declared.append(OnlineReduction((name,), "max", self.site.renamed(over), self._type(dtype, axes)))
            self.inside.append(Update((name,), (source,)))
            self.maxima[key] = name
        return self.maxima[key]

    def _wide(self, x: int) -> str:
        """X in the stream, in its accumulator's type."""
        value, name = self.graph.values[x], self._inner_value(x)
        dtype = accumulator(value.dtype)
        return name if dtype == value.dtype else self._cast(self.inside, name, dtype, value.axes)

    def _representation(self, form: Exp, m: str, over: tuple[str, ...]) -> tuple[str, str]:
        """``W exp(base (x - m))`` of the tile, with the running m: the name and dtype of what stands for the value."""
        value = self.graph.values[form.x]
        dtype = accumulator(value.dtype)
        key = ("p", form.x, m, form.base)
        if key not in self.inner:
            name = self.site.names.fresh("p")
            type_ = self._type(dtype, value.axes)
            self.inside.append(Compute(name, "shifted_exp", (self._wide(form.x), m), (("base", form.base),), type_))
            self.inner[key] = name  # pyright: ignore[reportArgumentType]
        name, axes = self.inner[key], set(value.axes)  # pyright: ignore[reportArgumentType]
        for position, k in form.linear:
            name, dtype, axes = self._linear(position, k, name, dtype, axes, key)
        return name, dtype

    def _any_chosen(self, guard: tuple[int, bool], over: tuple[str, ...]) -> None:
        """Declares and updates, once, whether a guard has chosen anything yet."""
        predicate, when = guard
        key = (*guard, over)
        if key in self.chosen or not self._varies(predicate):
            return
        value, name = self.graph.values[predicate], self._inner_value(predicate)
        if not when:
            out = self.site.names.fresh("x")
            self.inside.append(Compute(out, "not", (name,), (), self._type("bool", value.axes)))
            name = out
        along = tuple(a for a in over if a in value.axes)
        left = [a for a in value.axes if a not in along]
        state = self.chosen[key] = self.site.names.fresh("any")
        self.declared.append(OnlineReduction((state,), "max", self.site.renamed(along), self._type("bool", left)))
        self.inside.append(Update((state,), (name,)))

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

    def _linear(
        self, position: int, k: int, name: str, dtype: str, axes: set[str], key: Any
    ) -> tuple[str, str, set[str]]:
        """One linear operation of the graph applied to the representation `name` as its argument k."""
        step = self.graph.values[position]
        axes = axes | set(step.axes)
        if step.op == "convert_element_type":
            target = step.dtype
        else:
            target = dtype
        done = (key, position)
        if done in self.inner:
            return self.inner[done], target, axes  # pyright: ignore[reportArgumentType]
        if step.op == "convert_element_type":
            out = name if target == dtype else self._cast(self.inside, name, target, axes)
        else:
            args = []
            for i, a in enumerate(step.args):
                if i == k:
                    args.append(name)
                    continue
                other = self._inner_value(a)
                before = self.graph.values[a].dtype
                wrong = before != dtype and before != "bool"
                args.append(self._cast(self.inside, other, dtype, self.graph.values[a].axes) if wrong else other)
            out = self.site.names.fresh("w")
            self.inside.append(Compute(out, step.op, tuple(args), step.params, self._type(dtype, axes)))
        self.inner[done] = out  # pyright: ignore[reportArgumentType]
        return out, target, axes

    def _moments(self, x: int, over: tuple[str, ...], value: Value) -> str:
        source = self._wide(x)
        names = tuple(self.site.names.fresh(n) for n in ("count", "mean", "m2"))
        type_ = self._type(accumulator(value.dtype), value.axes)
        self.declared.append(OnlineReduction(names, "moments", self.site.renamed(over), type_))
        self.inside.append(Update(names, (source,)))
        return names[2]

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
        if dtype != value.dtype:
            name = self._cast(self.body, name, value.dtype, value.axes)
        self.outer[r] = name

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
        if kind == "state":
            return states[key]
        if kind == "max":
            return self.maxima[key]
        name, value = self._outer_value(key), self.graph.values[key]
        return name if value.dtype == dtype else self._cast(self.body, name, dtype, value.axes)

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
