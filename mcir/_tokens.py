"""Reading programs: a line as tokens, taken one after the other."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

import jax.numpy as jnp

from mcir.errors import ParseError
from mcir.ir import Type

#: Words that are values and not text.
LITERALS: dict[str, Any] = {"true": True, "false": False, "none": None, "inf": math.inf, "nan": math.nan}
#: What can be written without quotes.
WORD = re.compile(r"[^\W\d][\w.]*")

_TOKEN = re.compile(
    r"""\s+ | \#.* | (?P<string>"(?:[^"\\]|\\.)*")
    | (?P<number>-?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|-inf\b)
    | (?P<word>[^\W\d][\w.]*) | (?P<sign><-|\+=|[\[\](),:=])""",
    re.VERBOSE,
)


@dataclasses.dataclass
class Line:
    """The tokens of one line, read from left to right."""

    number: int
    indent: int
    tokens: list[tuple[str, str]]
    at: int = 0

    def fail(self, expected: str, found: str | None = None) -> NoReturn:
        if found is None:
            found = self.tokens[self.at][1] if self.at < len(self.tokens) else "the end of the line"
        raise ParseError(f"line {self.number}: expected {expected}, found {found}")

    def peek(self, ahead: int = 0) -> tuple[str, str]:
        at = self.at + ahead
        return self.tokens[at] if at < len(self.tokens) else ("end", "")

    def accept(self, *texts: str) -> bool:
        """Takes these tokens if they come next."""
        if any(self.peek(i)[1] != text or self.peek(i)[0] == "string" for i, text in enumerate(texts)):
            return False
        self.at += len(texts)
        return True

    def expect(self, *texts: str) -> None:
        for text in texts:
            if not self.accept(text):
                self.fail(f"`{text}`")

    def end(self) -> None:
        if self.at < len(self.tokens):
            self.fail("the end of the line")

    def name(self, what: str = "a name") -> str:
        kind, text = self.peek()
        if kind not in ("word", "string"):
            self.fail(what)
        self.at += 1
        return json.loads(text) if kind == "string" else text

    def list(self, item: Callable[[], Any], *, end: str | None = None) -> tuple[Any, ...]:
        """Items between commas; with `end`, up to that token, which may come at once."""
        if end is not None and self.accept(end):
            return ()
        items = [item()]
        while self.accept(","):
            items.append(item())
        if end is not None:
            self.expect(end)
        return tuple(items)

    def type(self) -> Type:
        dtype = self.name("an element type")
        self.expect("[")
        return Type(dtype, self.list(self.name, end="]"))

    def value(self) -> Any:
        kind, text = self.peek()
        if kind == "number":
            self.at += 1
            return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
        if self.accept("("):
            return self.list(self.value, end=")")
        if kind == "word" and text in LITERALS:
            self.at += 1
            return LITERALS[text]
        if self.accept("dtype", "("):
            return self.dtype()
        return self.name("a value")

    def dtype(self) -> Any:
        start = self.at
        name = self.name("an element type")
        self.expect(")")
        try:
            return jnp.dtype(name)
        except TypeError:
            self.at = start
            self.fail("an element type")

    def typed(self, kind: Any, what: str) -> Any:
        start = self.at
        value = self.value()
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.at = start
            self.fail(what)
        return value

    def base(self) -> float:
        return self.typed(int | float, "a number") if self.accept("base") else 1.0


def read_lines(text: str) -> list[Line]:
    lines = []
    for number, written in enumerate(text.split("\n"), 1):
        tokens, at = [], 0
        while at < len(written):
            match = _TOKEN.match(written, at)
            if match is None:
                raise ParseError(f"line {number}: expected a token, found {written[at:]}")
            if match.lastgroup is not None:
                tokens.append((match.lastgroup, match.group()))
            at = match.end()
        if tokens:
            lines.append(Line(number, len(written) - len(written.lstrip()), tokens))
    return lines
