"""Values of a nest: at tile scope if they do not vary along the stream, inside it if they do, each written once."""

from __future__ import annotations

from typing import Any

from mcir._site import Site, accumulator
from mcir.errors import DeriveError
from mcir.ir import Compute, Load, Rematerialization, Type

_NAMES = {"dot": "s", "exp": "p", "bits": "bits", "reduce_sum": "total", "reduce_max": "m", "reduce_min": "least"}
_SHORT = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class Values:
    """`loops` are the tiled axes, `stream` the streamed one (None: nothing is streamed).

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
        self.depends_on_stream = self._after_stream()

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

    def _type(self, dtype: str, axes: Any) -> Type:
        return self.site.type_of(dtype, axes)

    def _cast(self, where: list[Any], name: str, dtype: str, axes: Any) -> str:
        out = self.site.names.fresh(_converted(name, dtype))
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
        name = self.site.names.fresh(self._wanted(v, args))
        params = tuple((k, self.site.renamed(p) if k == "over" else p) for k, p in value.params)
        if value.op == "iota":
            params = (("axis", self.site.axis_name[value.param("axis")]),)
        elif value.op == "bits":
            params = tuple((k, tuple(self.site.axis_name[a] for a in p) if k == "axes" else p) for k, p in params)
        cheap = value.op in ("constant", "iota")
        kind = Rematerialization if v in self.computed_before and not cheap else Compute
        where.append(kind(name, value.op, args, params, self._type(value.dtype, value.axes)))
        return name

    def _partial_of(self, v: int, args: tuple[str, ...], where: list[Any]) -> str:
        """A tile's share of a reduction over a tiled axis, in the accumulator's type."""
        value = self.graph.values[v]
        name = self.site.names.fresh(f"{self.targets[v]}_part" if v in self.targets else "part")
        params = tuple((k, self.site.renamed(p) if k == "over" else p) for k, p in value.params)
        where.append(Compute(name, value.op, args, params, self._type(accumulator(value.dtype), value.axes)))
        return name

    def _load(self, v: int, where: list[Any]) -> str:
        value, buffer = self.graph.values[v], self.site.known[v]
        type_ = self.site.buffer_types[buffer]
        name = self.site.names.fresh(f"{buffer}_tile")
        where.append(Load(name, buffer, type_))
        same = type_.dtype == value.dtype or "key" in value.dtype
        return name if same else self._cast(where, name, value.dtype, value.axes)

    def _wanted(self, v: int, args: tuple[str, ...]) -> str:
        """A name that says what it is: positions ``at_i``, a condition ``mask``, scores ``s``, then ``x`` or ``r``."""
        value = self.graph.values[v]
        if value.op == "constant":
            number = value.param("value")
            return "low" if number < -1e4 else {0: "zero", 1: "one"}.get(number, "c")
        if value.op == "iota":
            return f"at_{self.site.axis_name[value.param('axis')]}"
        if value.op == "convert_element_type":
            return _converted(args[0], value.dtype)
        if value.dtype == "bool":
            return "mask"
        if v in self.targets:
            return "o"
        return _NAMES.get(value.op, "x" if len(value.axes) > 1 else "r")


def _converted(name: str, dtype: str) -> str:
    return f"{name.rstrip('0123456789')}_{_SHORT.get(dtype, dtype)}"
