"""Online reductions of a nest: state, updates relative to a running maximum, and the final value."""

from __future__ import annotations

from typing import Any

from mcir._site import accumulator
from mcir._values import Values
from mcir.algebra import Exp, Form, Forms, Squared
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
      represented: what stands for an exponential, with linear operations applied to it or without.
      states: what a corrected sum adds up -> its state; spellings of one sum share it.
      chosen: a guard and the axes reduced over -> whether it has chosen anything.
    """

    declared: list[Any]
    maxima: dict[tuple[int, tuple[str, ...]], str]
    states: dict[Any, str]
    represented: dict[Any, str]
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
        corrected, base, same = None, 1.0, None
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
        name = self.site.names.fresh(self._state_name(r, kind))
        if kind == "exp":
            self.states[same] = name
        # Over axes of tiles too: the state keeps those, and what a tile adds up over them in the end is a share.
        type_ = self._type(accumulator(value.dtype), (*value.axes, *self._tiled(r)))
        streamed = self.site.renamed([a for a in over if a not in self.loops])
        self.declared.append(OnlineReduction((name,), _MONOID[value.op], streamed, type_, corrected, base))
        self.inside.append(Update((name,), tuple(args)))
        return name

    def _tiled(self, r: int) -> list[str]:
        """Axes of the surrounding tiles that a reduction is over besides the stream's."""
        return [a for a in self.graph.values[r].param("over") if a in self.loops]

    def _state_name(self, r: int, kind: str) -> str:
        """``dk_acc`` where it ends up in a buffer as it is; else as in the papers: m, l, acc."""
        dot = self.graph.values[r].op == "dot"
        if r in self.targets and not self._tiled(r) and not (dot and kind == "exp"):
            return f"{self.targets[r]}_acc"
        if dot:
            return "acc"
        return "l" if kind == "exp" else {"reduce_min": "least"}.get(self.graph.values[r].op, "total")

    def _is_maximum(self, v: int, x: int, over: tuple[str, ...]) -> bool:
        value = self.graph.values[v]
        return value.op == "reduce_max" and value.args == (x,) and value.param("over") == over

    def _maximum(self, x: int, over: tuple[str, ...]) -> str:
        """The running maximum of x, declared and updated once."""
        key = (x, over)
        if key not in self.maxima:
            source = self._wide(x)
            stored = [b for v, b in self.targets.items() if self._is_maximum(v, x, over)]
            name = self.site.names.fresh(f"{stored[0]}_acc" if stored else "m")
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
        key = (form.x, m, form.base)
        if key not in self.represented:
            name = self.site.names.fresh("p")
            type_ = self._type(dtype, value.axes)
            self.inside.append(Compute(name, "shifted_exp", (self._wide(form.x), m), (("base", form.base),), type_))
            self.represented[key] = name
        name, axes = self.represented[key], set(value.axes)
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

    def _linear(
        self, position: int, k: int, name: str, dtype: str, axes: set[str], key: Any
    ) -> tuple[str, str, set[str]]:
        """One linear operation of the graph applied to the representation `name` as its argument k."""
        step = self.graph.values[position]
        axes = axes | set(step.axes)
        converts = step.op == "convert_element_type"
        target = step.dtype if converts else dtype
        done = (key, position)
        if done in self.represented:
            return self.represented[done], target, axes
        if converts:
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
        self.represented[done] = out
        return out, target, axes

    def _moments(self, x: int, over: tuple[str, ...], value: Value) -> str:
        source = self._wide(x)
        names = tuple(self.site.names.fresh(n) for n in ("count", "mean", "m2"))
        type_ = self._type(accumulator(value.dtype), value.axes)
        self.declared.append(OnlineReduction(names, "moments", self.site.renamed(over), type_))
        self.inside.append(Update(names, (source,)))
        return names[2]
