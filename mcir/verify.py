"""The rules of the language.

`verify` checks, besides names and types, what makes a program mean the same for every choice of tile sizes: a value
varies only along loops around it and axes that are whole; a sum over a loop's axis within a tile is *partial* and may
only, through linear operations, be added up in memory (``+=``); running state is declared outside the streams that
update it, and read only after the update; what depends on a maximum that still changes goes only into reductions that
it corrects.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NoReturn

from mcir._signature import dtype_problem, pointwise, result_axes, signature_problem, type_problem
from mcir.errors import VerifyError
from mcir.ir import Compute, Load, OnlineReduction, Program, Skip, Store, Stream, Tile, Type, Update
from mcir.text import print_statement

#: Pointwise operations that a partial sum may go through: the position of the one argument that may be partial, or
#: "any" one, or "all" of them.
LINEAR = {"mul": "any", "div": 0, "neg": 0, "convert_element_type": 0, "add": "all", "sub": "all"}


def verify(program: Program) -> Program:
    """Checks every rule of the language; returns the program.

    Raises VerifyError with the number of the statement (its place in `Program.statements()`), the statement and the
    rule it breaks.
    """
    _check_declarations(program)
    checker = _Checker(program)
    for nest in program.nests:
        checker.nest(nest)
    for buffer in program.role("output"):
        if buffer.name not in checker.stored:
            raise VerifyError(f"output {buffer.name}: an output is stored by one statement; nothing stores it")
    return program


def _check_declarations(program: Program) -> None:
    for what, names in (("axis", [a.name for a in program.axes]), ("buffer", [b.name for b in program.buffers])):
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise VerifyError(f"{what} {twice[0]}: a name is declared once")
    order = [a.name for a in program.axes]
    for buffer in program.buffers:
        problem = type_problem(buffer.type, order)
        if problem:
            raise VerifyError(f"{buffer.role} {buffer.name}: {problem}")


@dataclasses.dataclass(frozen=True)
class _Value:
    """What the checker knows of a name.

    It is a sum over a part of the axes `partial`, depends on the `running` values of these states, is computed from
    `positions` alone, is from a `load`.
    """

    type: Type
    partial: frozenset[str] = frozenset()
    running: frozenset[str] = frozenset()
    positions: bool = False
    load: bool = False


@dataclasses.dataclass
class _State:
    declaration: OnlineReduction
    loops: tuple[str, ...]
    updated: int | None = None  # the stream, by id


class _Checker:
    def __init__(self, program: Program):
        self.program = program
        self.order = [a.name for a in program.axes]
        self.buffers = {b.name: b for b in program.buffers}
        self.stored: dict[str, int] = {}
        self.nests = self.number = 0
        self.line = ""

    def fail(self, rule: str) -> NoReturn:
        raise VerifyError(f"statement {self.number}, `{self.line}`: {rule}")

    def require(self, holds: bool, rule: str) -> None:
        if not holds:
            self.fail(rule)

    def refuse(self, problem: str | None) -> None:
        if problem is not None:
            self.fail(problem)

    def nest(self, nest: Tile) -> None:
        self.names: set[str] = set()
        self.states: dict[str, _State] = {}
        self.line = f"tile {', '.join(nest.axes)}"
        self._loops(nest.axes)
        self.body(nest.body, nest.axes, {}, ())
        for name, state in self.states.items():
            if state.updated is None:
                raise VerifyError(f"reduction {name}: state is updated exactly once, in one stream; nothing updates it")
        self.nests += 1

    def _loops(self, axes: tuple[str, ...]) -> None:
        self.require(len(set(axes)) == len(axes), "each axis is looped over once")
        for axis in axes:
            self.require(axis in self.order, f"axis {axis} is not declared")

    def body(self, body: Iterable[Any], loops: tuple[str, ...], scope: dict[str, _Value], streams: tuple[Stream, ...]):
        """Checks the statements; names become readable in `scope` from where they are defined on."""
        for statement in body:
            monoids = {name: state.declaration.monoid for name, state in self.states.items()}
            self.line = print_statement(statement, monoids)
            match statement:
                case Load():
                    self.load(statement, loops, scope)
                case Compute():
                    self.compute(statement, loops, scope)
                case OnlineReduction():
                    self.reduction(statement, loops)
                case Update():
                    self.update(statement, loops, scope, streams)
                case Store():
                    self.store(statement, loops, scope, streams)
                case Stream():
                    self.stream(statement, loops, scope, streams)
                case _:
                    self.fail("not a statement")
            self.number += 1 - isinstance(statement, Stream)

    def define(self, name: str, type: Type, loops: tuple[str, ...]) -> None:
        self.require(name not in self.buffers, f"{name} is a buffer; values and buffers have names of their own")
        self.require(name not in self.names, f"{name} is assigned twice in a nest")
        self.refuse(type_problem(type, self.order))
        for axis in type.axes:
            a = self.program.axis(axis)
            whole = axis in loops or a.block >= a.size
            self.require(whole, f"axis {axis} is cut in blocks ({a.block} of {a.size}), so it needs a loop around this")
        self.names.add(name)

    def read(self, name: str, scope: dict[str, _Value]) -> _Value:
        if name not in scope:
            state = " (state is read after its update)" if name in self.states else ""
            self.fail(f"{name} is not defined before it is read here{state}")
        return scope[name]

    def load(self, s: Load, loops: tuple[str, ...], scope: dict[str, _Value]) -> None:
        buffer = self.buffers.get(s.buffer)
        if buffer is None:
            self.fail(f"{s.buffer} is not a buffer")
        self.define(s.result, s.type, loops)
        self.require(s.type == buffer.type, f"a load has the type of its buffer, {buffer.type}")
        self.available(s.buffer)
        scope[s.result] = _Value(s.type, load=True)

    def available(self, buffer: str) -> None:
        earlier = self.buffers[buffer].role == "input" or self.stored.get(buffer, self.nests) < self.nests
        self.require(earlier, f"{buffer} is not an input, and no earlier nest stores it")

    # -- computing ---------------------------------------------------------------------------------------------

    def compute(self, s: Compute, loops: tuple[str, ...], scope: dict[str, _Value]) -> None:
        self.define(s.result, s.type, loops)
        args = [self.read(name, scope) for name in s.args]
        self.refuse(signature_problem(s))
        union, over = {axis for a in args for axis in a.type.axes}, set(s.param("over", ()))
        self.require(over <= union, f"`over` names axes of the arguments; {self.ordered(over - union)} is not one")
        axes = result_axes(s, [a.type.axes for a in args])
        self.require(set(s.type.axes) == axes, f"the result of {s.op} has the axes {self.ordered(axes)}")
        self.refuse(dtype_problem(s, [a.type.dtype for a in args]))
        partial = self.partial(s, args, loops)
        overlap = partial & set(s.type.axes)
        self.require(not overlap, f"a sum over a part of {self.ordered(overlap)} cannot vary along it")
        positions = s.op in ("constant", "iota") or (pointwise(s) and all(a.positions for a in args))
        running = frozenset(name for a in args for name in a.running)
        scope[s.result] = _Value(s.type, partial, running, positions)

    def partial(self, s: Compute, args: list[_Value], loops: tuple[str, ...]) -> frozenset[str]:
        """The loop axes that the result is only a part of the sum over."""
        over = frozenset(s.param("over", ())) & set(loops)
        if over and s.op in ("reduce_max", "reduce_min"):
            self.fail(f"a {s.op} over {self.ordered(over)}, which is looped over, needs a reduction")
        parts = [i for i, a in enumerate(args) if a.partial]
        if not parts:
            return over
        rule = {"dot": "any", "reduce_sum": "any"}.get(s.op, LINEAR.get(s.op))
        linear = {"any": len(parts) == 1, "all": len({a.partial for a in args}) == 1}.get(str(rule), parts == [rule])
        what = f"{s.args[parts[0]]} is the sum over a part of {self.ordered(args[parts[0]].partial)}"
        self.require(rule is not None and linear, f"{what}: only linear operations may take it, on the way to a `+=`")
        return over | args[parts[0]].partial

    # -- reductions --------------------------------------------------------------------------------------------

    def reduction(self, s: OnlineReduction, loops: tuple[str, ...]) -> None:
        count = 3 if s.monoid == "moments" else 1
        self.require(len(s.results) == count, f"{s.monoid} has {count} state name(s)")
        for name in s.results:
            self.define(name, s.type, loops)
            self.states[name] = _State(s, loops)
        self.require(bool(s.over) and set(s.over) <= set(self.order), "`over` names one declared axis or more")
        self.require(not set(s.over) & set(s.type.axes), "state does not vary along the axes it reduces")
        for axis in s.over:
            self.require(axis not in loops, f"a reduction over {axis} is declared outside of the loop over {axis}")
        if s.corrected_by is None:
            return
        m = self.states.get(s.corrected_by)
        self.require(m is not None and m.declaration.monoid == "max", f"{s.corrected_by} is not a max reduction")
        assert m is not None
        fits = s.monoid == "sum" and m.declaration.over == s.over and set(m.declaration.type.axes) <= set(s.type.axes)
        self.require(fits, f"a corrected reduction is a sum over what {s.corrected_by} is over, with its axes or more")

    def update(self, s: Update, loops: tuple[str, ...], scope: dict[str, _Value], streams: tuple[Stream, ...]) -> None:
        state = self.states.get(s.results[0] if s.results else "")
        if state is None or state.declaration.results != s.results:
            self.fail("an update names the state of one reduction, declared before")
        d = state.declaration
        self.require(state.updated is None, f"{s.results[0]} is updated by more than one statement")
        between = loops[len(state.loops) :]
        self.require(bool(between), f"{s.results[0]} is declared outside of the stream that updates it")
        for axis in between:
            self.require(axis in d.over, f"the stream over {axis} is not one that {s.results[0]} reduces over")
        for axis in set(d.over) - set(between):
            a = self.program.axis(axis)
            self.require(a.block >= a.size, f"axis {axis} is cut in blocks and no stream walks over it")
        args = [self.read(name, scope) for name in s.args]
        self.require(len(args) == 1 or (len(args) == 2 and d.monoid == "sum"), f"too few or many arguments: {d.monoid}")
        partial = frozenset().union(*(a.partial for a in args))
        plain = d.monoid == "sum" and d.corrected_by is None and len(args) == 1
        self.require(not partial or plain, "only a plain sum takes in parts of sums, on the way to a `+=`")
        union = {axis for a in args for axis in a.type.axes}
        expected = {*d.type.axes, *d.over}
        self.require(union == expected, f"the arguments together have the axes {self.ordered(expected)}")
        running = {name for a in args for name in a.running} - {d.corrected_by}
        self.require(not running, f"depends on the running {min(running, default='')} but is not corrected by it")
        if d.corrected_by is not None:
            m = self.states[d.corrected_by]
            earlier = m.updated is not None and m.updated == id(streams[-1]) and m.loops == state.loops
            self.require(earlier, f"{d.corrected_by}, which corrects it, is updated before it in the same stream")
        for name in s.results:
            self.states[name].updated = id(streams[-1])
            scope[name] = _Value(d.type, partial, running=frozenset((name,)))

    # -- memory and loops --------------------------------------------------------------------------------------

    def store(self, s: Store, loops: tuple[str, ...], scope: dict[str, _Value], streams: tuple[Stream, ...]) -> None:
        buffer = self.buffers.get(s.buffer)
        if buffer is None:
            self.fail(f"{s.buffer} is not a buffer")
        self.require(buffer.role != "input", f"{s.buffer} is an input, which nothing stores")
        self.require(s.buffer not in self.stored, f"{s.buffer} is stored by more than one statement")
        value = self.read(s.value, scope)
        self.require(not value.running, f"depends on {min(value.running, default='')}, which still changes")
        self.require(value.type == buffer.type, f"a stored value has the type of the buffer, {buffer.type}")
        missing = {axis for axis in loops if axis not in buffer.type.axes}
        if not s.accumulate:
            self.require(not missing, f"`=` in the loop over {self.ordered(missing)} stores again and again; use `+=`")
            skipped = any(stream.skip is not None for stream in streams)
            self.require(not skipped, "`=` in a stream with skipped blocks leaves holes; use `+=`")
        what = f"this is part of a sum over {self.ordered(value.partial)}"
        self.require(value.partial == missing, f"`+=` adds parts of a sum over {self.ordered(missing)}; {what}")
        self.stored[s.buffer] = self.nests

    def stream(self, s: Stream, loops: tuple[str, ...], scope: dict[str, _Value], streams: tuple[Stream, ...]) -> None:
        self._loops((*loops, s.axis))
        head, line = self.number, self.line
        if s.skip is not None and s.skip.rows in scope:
            self.require(scope[s.skip.rows].load, f"{s.skip.rows} is neither a buffer, a loaded value nor max state")
        self.number += 1
        inner = dict(scope)
        self.body(s.body, (*loops, s.axis), inner, (*streams, s))
        after, self.number, self.line = self.number, head, line
        if s.skip is not None:
            self.skip(s.skip, s, scope, inner)
        self.number = after
        for name in [n for n in inner if n in self.states and len(self.states[n].loops) <= len(loops)]:
            running = set(self.states[name].declaration.over) & set(loops)
            scope[name] = dataclasses.replace(inner[name], running=frozenset((name,)) if running else frozenset())

    def skip(self, skip: Skip, stream: Stream, scope: dict[str, _Value], inner: dict[str, _Value]) -> None:
        predicate = inner.get(skip.predicate)
        self.require(predicate is not None, f"the predicate {skip.predicate} is not a value of the stream")
        assert predicate is not None
        self.require(predicate.type.dtype == "bool", f"the predicate {skip.predicate} is not boolean")
        if skip.rows is None or skip.rows in scope:
            return
        if skip.rows in self.buffers:
            self.available(skip.rows)
            return
        state = self.states.get(skip.rows)
        fits = state is not None and state.declaration.monoid == "max" and state.updated == id(stream)
        self.require(fits, f"{skip.rows} is neither a buffer, a loaded value nor max state that this stream updates")

    def ordered(self, axes: Iterable[str]) -> str:
        found = set(axes)
        return ", ".join([*(a for a in self.order if a in found), *sorted(found - set(self.order))]) or "nothing"
