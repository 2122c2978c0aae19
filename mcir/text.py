"""Programs as text: `print_program` and `parse`, the inverse of each other for every program.

The grammar is that of `mcir.ir`. Blocks are indented, ``#`` starts a comment. A name that is not a word is written as a
JSON string. Parameters are ``name=value``: a number, ``true``, ``false``, ``none``, a word (text), ``dtype(float32)``
(a numpy dtype) or a tuple of values, ``(a, b)``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mcir._tokens import LITERALS, WORD, Line, read_lines
from mcir.errors import ParseError
from mcir.ir import (
    MONOIDS,
    ROLES,
    Axis,
    Buffer,
    Compute,
    Load,
    OnlineReduction,
    Program,
    Rematerialization,
    Skip,
    Store,
    Stream,
    Tile,
    Type,
    Update,
)

# -- printing ----------------------------------------------------------------------------------------------------------


def print_program(program: Program) -> str:
    """The program in the grammar of `mcir.ir`, one statement a line. `parse` reads it back to an equal program."""
    lines = [f"program {_word(program.name)}"]
    lines += [f"axis {_word(a.name)} = {a.size} block {a.block}" for a in program.axes]
    lines += [f"{b.role} {_word(b.name)}: {_type(b.type)}" for b in program.buffers]
    for nest in program.nests:
        lines.append(f"tile {_names(nest.axes)}:" if nest.axes else "tile:")
        lines += _body(nest.body, "  ", {})
    return "\n".join(lines) + "\n"


def _body(body: tuple[Any, ...], indent: str, monoids: dict[str, str]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, OnlineReduction):
            monoids.update(dict.fromkeys(statement.results, statement.monoid))
        yield indent + print_statement(statement, monoids)
        if isinstance(statement, Stream):
            yield from _body(statement.body, indent + "  ", monoids)


def print_statement(statement: Any, monoids: Mapping[str, str] | None = None) -> str:
    """One line; of a stream, its head. `monoids`: the monoid of each state declared so far, which updates repeat."""
    match statement:
        case Load(result, buffer, type):
            return f"{_word(result)} = load {_word(buffer)}: {_type(type)}"
        case Compute(result, op, args, params, type):
            again = "recompute " if isinstance(statement, Rematerialization) else ""
            written = "".join(f" {_word(name)}={_value(value)}" for name, value in params)
            return f"{again}{_word(result)} = {_word(op)}({_names(args)}){written}: {_type(type)}"
        case OnlineReduction(results, monoid, over, type, corrected_by, base):
            corrected = "" if corrected_by is None else f" corrected by {_word(corrected_by)}"
            loops = f" over {_names(over)}" if over else ""
            return f"reduction {_names(results)} = {monoid}{loops}{corrected}{_base(base)}: {_type(type)}"
        case Update(results, args):
            monoid = (monoids or {}).get(results[0] if results else "", "undeclared")
            return f"{_names(results)} <- {monoid}({_names(args)})"
        case Store(buffer, value, accumulate):
            return f"store {_word(buffer)} {'+=' if accumulate else '='} {_word(value)}"
        case Stream(axis, _, skip):
            return f"stream {_word(axis)}{_skip(skip)}:"
    raise TypeError(f"print_statement: expected a statement, found {statement!r}")


def _skip(skip: Skip | None) -> str:
    if skip is None:
        return ""
    rows = "" if skip.rows is None else f" unless {_word(skip.rows)} low"
    visible, fill = _value(skip.visible), _value(skip.fill)
    return f" while {_word(skip.predicate)} is {visible} else {fill}{rows}{_base(skip.base)}"


def _base(base: float) -> str:
    return "" if type(base) is float and base == 1.0 else f" base {_value(base)}"


def _type(type: Type) -> str:
    return f"{_word(type.dtype)}[{_names(type.axes)}]"


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(map(_word, names))


def _word(name: str) -> str:
    return name if WORD.fullmatch(name) else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, np.dtype):
        return f"dtype({_word(value.name)})"
    if isinstance(value, str):
        return json.dumps(value) if value in LITERALS else _word(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_value, value))})"
    raise TypeError(f"print_program: expected a number, text, dtype, None or tuple as a parameter, found {value!r}")


# -- parsing -----------------------------------------------------------------------------------------------------------


def parse(text: str) -> Program:
    """The program that this text is. Raises ParseError with the line, what was expected and what was found."""
    lines = read_lines(text)
    if not lines:
        raise ParseError("line 1: expected `program`, found nothing")
    head = lines.pop(0)
    head.expect("program")
    name = head.name()
    head.end()
    axes, buffers, nests = [], [], []
    while lines:
        line = lines.pop(0)
        if line.indent != head.indent:
            line.fail("no more indentation than `program` has", f"{line.indent - head.indent} spaces")
        role = line.peek()[1]
        if not buffers and not nests and line.accept("axis"):
            axes.append(_axis(line))
        elif role in ROLES and not nests and line.accept(role):
            buffers.append(Buffer(line.name(), role, _colon_type(line)))
        elif line.accept("tile"):
            loops = line.list(line.name, end=":")
            line.end()
            nests.append(Tile(loops, _statements(lines, line.indent, {})))
        else:
            line.fail("`tile`" if nests else "`axis`, `input`, `output`, `temporary` or `tile`, in this order")
    return Program(name, tuple(axes), tuple(buffers), tuple(nests))


def _axis(line: Line) -> Axis:
    name = line.name()
    line.expect("=")
    size = line.typed(int, "a size")
    line.expect("block")
    block = line.typed(int, "a block size")
    line.end()
    try:
        return Axis(name, size, block)
    except ValueError:
        line.fail(f"1 <= block <= size for axis {name}", f"block {block} of {size}")


def _colon_type(line: Line) -> Type:
    line.expect(":")
    type = line.type()
    line.end()
    return type


def _statements(lines: list[Line], outer: int, monoids: dict[str, str]) -> tuple[Any, ...]:
    """The lines from here on that are indented more than `outer`."""
    body: list[Any] = []
    indent = lines[0].indent if lines else 0
    while lines and lines[0].indent > outer:
        line = lines.pop(0)
        if line.indent != indent:
            line.fail(f"{indent} spaces of indentation", str(line.indent))
        # `store`, `stream`, `reduction` and `recompute` may be names of values too: what follows tells.
        kind, after = line.peek()[1], line.peek(1)
        if after[1] in ("=", ",", "<-") and after[0] == "sign":
            body.append(_assignment(line, monoids))
        elif kind == "reduction" and line.accept(kind):
            body.append(_reduction(line))
            monoids.update(dict.fromkeys(body[-1].results, body[-1].monoid))
        elif kind == "recompute" and line.accept(kind):
            result = line.name()
            line.expect("=")
            body.append(_compute(line, result, Rematerialization))
        elif kind == "store" and line.accept(kind):
            buffer, accumulate = line.name(), line.accept("+=")
            if not accumulate:
                line.expect("=")
            body.append(Store(buffer, line.name(), accumulate))
            line.end()
        elif kind == "stream" and line.accept(kind):
            axis, skip = line.name(), _parse_skip(line)
            line.expect(":")
            line.end()
            body.append(Stream(axis, _statements(lines, line.indent, monoids), skip))
        else:
            line.fail("a statement")
    return tuple(body)


def _assignment(line: Line, monoids: Mapping[str, str]) -> Any:
    results = line.list(line.name)
    if line.accept("<-"):
        declared, start = monoids.get(results[0], "undeclared"), line.at
        if line.name("a monoid") != declared:
            line.at = start
            line.fail(f"`{declared}`, which {results[0]} is")
        line.expect("(")
        update = Update(results, line.list(line.name, end=")"))
        line.end()
        return update
    line.expect("=")
    if line.peek()[1] == "load" and line.peek(1)[1] != "(" and line.accept("load"):
        return Load(results[0], line.name(), _colon_type(line))
    return _compute(line, results[0], Compute)


def _compute(line: Line, result: str, kind: type[Compute]) -> Compute:
    op = line.name("an operation")
    line.expect("(")
    args = line.list(line.name, end=")")
    params = []
    while line.peek()[1] != ":":
        name = line.name("`:` or a parameter")
        line.expect("=")
        params.append((name, line.value()))
    return kind(result, op, args, tuple(params), _colon_type(line))


def _reduction(line: Line) -> OnlineReduction:
    results = line.list(line.name)
    line.expect("=")
    monoid = line.name("a monoid")
    if monoid not in MONOIDS:
        line.at -= 1
        line.fail(f"one of {', '.join(MONOIDS)}")
    over = line.list(line.name) if line.accept("over") else ()
    corrected = line.name() if line.accept("corrected", "by") else None
    base = line.base()
    return OnlineReduction(results, monoid, over, _colon_type(line), corrected, base)


def _parse_skip(line: Line) -> Skip | None:
    if not line.accept("while"):
        return None
    predicate = line.name()
    line.expect("is")
    visible = line.typed(bool, "`true` or `false`")
    line.expect("else")
    fill = line.typed(int | float, "a number")
    rows = line.name() if line.accept("unless") else None
    if rows is not None:
        line.expect("low")
    return Skip(predicate, visible, fill, rows, line.base())
