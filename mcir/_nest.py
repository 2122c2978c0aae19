"""Emits one nest of loops: tiles of the independent axes around streams of one axis.

The passes of `mcir.derive` decide which loops there are and which values belong here; this file writes the statements.
Per phase there is one stream. What it reduces is final after it; what needs a final value that no algebra can take out
of the sum waits for the next phase, where the stream starts over and recomputes (a Rematerialization) what it needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mcir.algebra import Exp, Form, Forms, Squared, merged
from mcir.errors import DeriveError
from mcir.graph import ComputationGraph, Value
from mcir.ir import Compute, Load, OnlineReduction, Rematerialization, Skip, Store, Stream, Tile, Type, Update
from mcir.visibility import find_skip

_MONOID = {"reduce_sum": "sum", "dot": "sum", "reduce_max": "max", "reduce_min": "min"}
_NAMES = {"select_n": "x", "convert_element_type": "c", "exp": "p", "iota": "at", "broadcast": "x", "bits": "bits"}
_LOW = ("bfloat16", "float16")


def accumulator(dtype: str) -> str:
    """What sums of this type are kept in: float32 for narrower floats, the type itself otherwise."""
    return "float32" if dtype in _LOW else dtype


class Names:
    """Fresh names for values; shared by all nests of a program."""

    def __init__(self, taken: Sequence[str]):
        self.taken = set(taken)

    def fresh(self, wanted: str) -> str:
        name, k = wanted, 1
        while name in self.taken:
            k += 1
            name = f"{wanted}{k}"
        self.taken.add(name)
        return name


@dataclasses.dataclass
class Site:
    """What a nest is made from.

    Attributes:
      graph: all values.
      known: value -> buffer, for what earlier nests or the caller provide.
      buffer_types: of those buffers.
      names: the program's names.
      axis_name: of the graph -> of the program; its order is that of the program.
      computed: values that an earlier stream or nest computed; doing so again is a rematerialization.
    """

    graph: ComputationGraph
    known: dict[int, str]
    buffer_types: dict[str, Type]
    names: Names
    axis_name: dict[str, str]
    computed: set[int]

    def type_of(self, dtype: str, axes: Any) -> Type:
        return Type(dtype, tuple(new for old, new in self.axis_name.items() if old in axes))

    def renamed(self, axes: Any) -> tuple[str, ...]:
        return tuple(new for old, new in self.axis_name.items() if old in axes)


class Nest:
    """One nest. `loops` are its tiled axes, `stream` the streamed one (None: nothing is streamed).

    `targets`: value -> buffer it is stored to. Values reduced over a tiled axis are accumulated there.
    """

    def __init__(self, site: Site, loops: tuple[str, ...], stream: str | None, targets: dict[int, str]):
        self.site, self.graph = site, site.graph
        self.loops, self.stream, self.targets = loops, stream, targets
        self.prologue: list[Any] = []
        self.body: list[Any] = []  # after the prologue: reductions, streams, epilogues
        self.inside: list[Any] = []  # the stream being written
        self.outer: dict[int, str] = {}
        self.inner: dict[int, str] = {}
        self.computed_before = set(site.computed)
        self.maxima: dict[tuple[int, tuple[str, ...]], str] = {}
        self.states: dict[Any, str] = {}
        self.depends_on_stream = self._after_stream()

    # -- structure ----------------------------------------------------------------------------------------
    def emit(self) -> Tile:
        pending = self._stream_reductions()
        stored: set[int] = set()
        phase = 0
        waiting = {v for v in self.targets if self._varies(v) and not self._is_streamed(v)}
        while pending or waiting - stored:
            forms = Forms(self.graph, self.stream or "", pending)
            now = self._solvable(forms, pending)
            ready = [v for v in self.targets if v in waiting - stored and not forms.depends(v)]
            self._phase(forms, now, ready, phase)
            pending = pending - set(now)
            stored.update(ready)
            phase += 1
        for v, buffer in self.targets.items():
            if v not in waiting:
                self.body.append(Store(buffer, self._outer_value(v), self._accumulates(v)))
        return Tile(self.site.renamed(self.loops), (*self.prologue, *self.body))

    def _varies(self, v: int) -> bool:
        return self.stream is not None and self.stream in self.graph.values[v].axes

    def _is_streamed(self, v: int) -> bool:
        return self.stream is not None and self.stream in self.graph.values[v].param("over", ())

    def _accumulates(self, v: int) -> bool:
        return bool(set(self.graph.values[v].param("over", ())) & set(self.loops))

    def _live(self) -> set[int]:
        seen: set[int] = set()
        todo = list(self.targets)
        while todo:
            v = todo.pop()
            if v not in seen:
                seen.add(v)
                if v not in self.site.known:
                    todo.extend(self.graph.values[v].args)
        return seen

    def _stream_reductions(self) -> set[int]:
        return {v for v in self._live() if self._is_streamed(v) and v not in self.site.known}

    def _after_stream(self) -> set[int]:
        """Values that do not vary along the stream and depend on a reduction over it."""
        reductions = self._stream_reductions()
        out: set[int] = set()
        for i, value in enumerate(self.graph.values):
            if i not in self.site.known and (i in reductions or any(a in out for a in value.args)):
                out.add(i)
        return out

    def _solvable(self, forms: Forms, pending: set[int]) -> list[int]:
        """Reductions that can be done in this phase: each operand plain or of a form that fits, and so for its rows."""
        good = {r for r in pending if self._form_of(forms, r) is not None}
        while True:
            bad = {r for r in good if any(q not in good for q in self._needed_rows(forms, r, pending))}
            if not bad:
                break
            good -= bad
        if not good and pending:
            raise DeriveError("cascade", "a reduction that can be streamed", "reductions that wait for each other")
        return sorted(good)

    def _form_of(self, forms: Forms, r: int) -> tuple[str, Form | None, int] | None:
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
        if isinstance(form, Squared) and value.op == "reduce_sum" and forms.is_mean(form.row, form.x, value.param("over")):
            return "moments", form, bad[0]
        return None

    def _needed_rows(self, forms: Forms, r: int, pending: set[int]) -> set[int]:
        found = self._form_of(forms, r)
        assert found is not None
        form = found[1]
        rows = [q for q, _ in (*form.rows, *form.factors)] if isinstance(form, Exp) else []
        seen: set[int] = set()
        todo = list(rows)
        while todo:
            v = todo.pop()
            if v in seen:
                continue
            seen.add(v)
            todo.extend(() if v in pending else self.graph.values[v].args)
        return seen & pending

    # -- one phase ----------------------------------------------------------------------------------------
    def _phase(self, forms: Forms, reductions: list[int], ready: list[int], phase: int) -> None:
        self.inside, self.inner, self.maxima, self.states = [], {}, {}, {}
        declared: list[Any] = []
        self.declared = declared
        finals: list[tuple[int, str, tuple[str, Form | None, int]]] = []
        order = sorted(reductions, key=lambda r: (self.graph.values[r].op != "reduce_max", r))
        updated: list[tuple[int, Any]] = []
        for r in order:
            found = self._form_of(forms, r)
            assert found is not None
            state = self._update(r, found)
            finals.append((r, state, found))
            updated.append((r, found))
        for v in ready:
            self.inside.append(Store(self.targets[v], self._partial(v), self._accumulates(v)))
        skip = self._skip(updated, ready) if phase == 0 else None
        stream = Stream(self.site.axis_name[self.stream or ""], tuple(self.inside), skip)
        self.body += [*declared, stream]
        states = {r: state for r, state, _ in finals}
        for r, state, found in finals:
            self._finish(forms, r, state, found, states)
        self.site.computed.update(self.inner)

    def _skip(self, updated: list[tuple[int, Any]], ready: list[int]) -> Skip | None:
        found = find_skip(self.graph, self.stream or "", self.loops, [r for r, _ in updated], ready, self.site.known)
        if found is None or found.predicate not in self.inner:
            return None
        rows = None
        if found.rows is not None:
            row = found.rows
            own = self.graph.values[row]
            if row in self.site.known:
                rows = self.site.known[row]
            elif own.op == "reduce_max" and self._is_streamed(row):
                rows = self.maxima.get((own.args[0], own.param("over")))
            if rows is None:
                return None
            if found.fill == float("-inf") and row not in self.site.known:
                rows = None
        return Skip(self.inner[found.predicate], found.visible, found.fill, rows, found.base)

    def _update(self, r: int, found: tuple[str, Form | None, int]) -> str:
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
            # Spellings of one sum differ in what is taken out of it (one shifts by m, one by max(-inf, m)), not in this.
            others = tuple(a for i, a in enumerate(value.args) if i != k)
            same = (value.op, form.x, form.base, form.linear, over, others, value.params)
            if same in self.states:
                return self.states[same]
            corrected, base = self._maximum(form.x, over), form.base
            args[k], dtypes[k] = self._representation(form, corrected, over)
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
            self.declared.append(
                OnlineReduction((name,), "max", self.site.renamed(over), self._type(dtype, axes))
            )
            self.inside.append(Update((name,), (source,)))
            self.maxima[key] = name
        return self.maxima[key]

    def _wide(self, x: int) -> str:
        """x in the stream, in its accumulator's type."""
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

    def _finish(
        self, forms: Forms, r: int, state: str, found: tuple[str, Form | None, int], states: dict[int, str]
    ) -> None:
        """The final value of a reduction: its state, with what was taken out of the sum put back."""
        value, (kind, form, _) = self.graph.values[r], found
        dtype = accumulator(value.dtype)
        if value.op == "reduce_max":
            dtype = accumulator(self.graph.values[value.args[0]].dtype)
        name = state
        if kind == "exp":
            assert isinstance(form, Exp)
            name = self._put_back(forms, r, form, state, states)
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
            own = self.graph.values[key].axes if kind == "row" else tuple(
                a for a in self.graph.values[key[0]].axes if a not in key[1]
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

    # -- values -------------------------------------------------------------------------------------------
    def _type(self, dtype: str, axes: Any) -> Type:
        return self.site.type_of(dtype, axes)

    def _cast(self, where: list[Any], name: str, dtype: str, axes: Any) -> str:
        out = self.site.names.fresh(f"{name.rstrip('0123456789')}_{_SHORT.get(dtype, dtype)}")
        where.append(Compute(out, "convert_element_type", (name,), (("new_dtype", dtype),), self._type(dtype, axes)))
        return out

    def _outer_value(self, v: int) -> str:
        """A value that does not vary along the stream, at tile scope."""
        if v not in self.outer:
            after = v in self.depends_on_stream
            self.outer[v] = self._value(v, self.body if after else self.prologue, self._outer_value)
            self.site.computed.add(v)
        return self.outer[v]

    def _inner_value(self, v: int) -> str:
        """A plain value, in the stream if it varies along it."""
        if not self._varies(v):
            return self._outer_value(v)
        if v not in self.inner:
            self.inner[v] = self._value(v, self.inside, self._inner_value)
        return self.inner[v]

    def _value(self, v: int, where: list[Any], argument: Any) -> str:
        value = self.graph.values[v]
        if v in self.site.known:
            return self._load(v, where)
        if value.op == "input":
            raise DeriveError("input", "an input that somebody provides", f"argument {value.param('argument')}")
        args = tuple(argument(a) for a in value.args)
        if self._accumulates(v):
            return self._partial_of(v, args, where)
        name = self.site.names.fresh(self._wanted(value))
        params = tuple((k, self.site.renamed(p) if k == "over" else p) for k, p in value.params)
        if value.op == "iota":
            params = (("axis", self.site.axis_name[value.param("axis")]),)
        elif value.op == "bits":
            params = tuple((k, tuple(self.site.axis_name[a] for a in p) if k == "axes" else p) for k, p in params)
        cheap = value.op in ("constant", "iota")
        kind = Rematerialization if v in self.computed_before and not cheap else Compute
        where.append(kind(name, value.op, args, params, self._type(value.dtype, value.axes)))
        return name

    def _partial(self, v: int) -> str:
        return self._inner_value(v)

    def _partial_of(self, v: int, args: tuple[str, ...], where: list[Any]) -> str:
        """A tile's share of a reduction over a tiled axis, in the accumulator's type."""
        value = self.graph.values[v]
        name = self.site.names.fresh("part")
        params = tuple((k, self.site.renamed(p) if k == "over" else p) for k, p in value.params)
        where.append(Compute(name, value.op, args, params, self._type(accumulator(value.dtype), value.axes)))
        return name

    def _load(self, v: int, where: list[Any]) -> str:
        value, buffer = self.graph.values[v], self.site.known[v]
        type_ = self.site.buffer_types[buffer]
        name = self.site.names.fresh(f"{buffer}_")
        where.append(Load(name, buffer, type_))
        same = type_.dtype == value.dtype or "key" in value.dtype
        return name if same else self._cast(where, name, value.dtype, value.axes)

    def _wanted(self, value: Value) -> str:
        if value.op == "dot":
            return "s"
        if value.op.startswith("reduce_"):
            return value.op[-3:]
        return _NAMES.get(value.op, "x" if len(value.axes) > 1 else "r")


_SHORT = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}
