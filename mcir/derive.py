"""From a computation graph to a memory flow program.

Five passes, none of which knows attention or normalization by name:

1. **tile**: the largest value that would be stored is found; its axes become loops over blocks.
2. **stream**: of those that are reduced, the one whose streaming leaves the fewest bytes to accumulate in memory is
   walked over in order, innermost.
3. **online_reduce**: reductions over it become online reductions; what depends on their final values is taken out of
   the sums by algebra (`mcir.algebra`), or waits for a second stream.
4. **rematerialize**: what a later loop needs of an earlier one is recomputed, unless it is small (reductions over axes
   that are not loops): that is stored by a nest before.
5. **buffers**: inputs, outputs and the few temporaries get names and types; lifetimes follow from the statements.

FlashAttention (Dao et al., 2022), its backward from the saved log-sum-exp, log-sum-exp over a long axis,
softmax-weighted sums and the moments of LayerNorm all come out of these.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from mcir._nest import Nest
from mcir._site import Names, Site, accumulator
from mcir.errors import DeriveError
from mcir.graph import ComputationGraph, View
from mcir.ir import Axis, Buffer, Program, Tile, Type
from mcir.read import trace

#: Tile of a loop before `schedule` chooses.
BLOCK = 512


@dataclasses.dataclass(frozen=True)
class Derived:
    """A program and how its buffers lie in the arrays of the function it came from.

    Attributes:
      program: the memory flow program.
      arguments: for each input buffer, which argument of the function it is and the axes of that argument's dimensions.
      results: for each result of the function, its output buffer and the axes of its dimensions.
      graph: the computation graph.
    """

    program: Program
    arguments: tuple[tuple[int, View], ...]
    results: tuple[tuple[str, View], ...]
    graph: ComputationGraph


def derive(function: Callable[..., Any], *avals: Any, name: str | None = None, results: Sequence[str] = ()) -> Program:
    """The memory flow program of a function of these types, verified.

    Args:
      function: plain JAX on arrays; what it closes over must be scalars.
      *avals: arrays or `jax.ShapeDtypeStruct`s.
      name: of the program; the function's own by default.
      results: names of the output buffers; ``out``, or ``out0, out1, ...``, by default.

    Raises:
      DeriveError: with a code, what was expected and what was found, for what cannot be streamed: primitives that are
        no loop over elements (sort, gather, cumulative sums, convolutions), reshapes that cut axes unevenly, arrays
        closed over, dimensions of size zero.
    """
    return derive_bound(function, *avals, name=name, results=results).program


def derive_bound(
    function: Callable[..., Any], *avals: Any, name: str | None = None, results: Sequence[str] = ()
) -> Derived:
    """`derive`, with the binding of buffers to arguments and results."""
    names = _parameter_names(function, len(avals))
    return from_graph(trace(function, *avals), name or getattr(function, "__name__", "program"), names, results)


def from_graph(
    graph: ComputationGraph, name: str, argument_names: Sequence[str] = (), result_names: Sequence[str] = ()
) -> Derived:
    """`derive_bound` of a computation graph."""
    if 0 in graph.axes.values() or any(0 in v.shape for v in graph.views.values()):
        raise DeriveError("empty", "dimensions of at least one element", "a dimension of size zero")
    return _Deriver(graph, argument_names, result_names).run(name)


def _parameter_names(function: Any, count: int) -> list[str]:
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
    plain = [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return plain[:count] if len(plain) >= count else []


@dataclasses.dataclass(frozen=True)
class Plan:
    """Passes 1 and 2: which axes are tiled and which one is streamed."""

    loops: tuple[str, ...]
    stream: str | None
    tiled: str | None


class _Deriver:
    def __init__(self, graph: ComputationGraph, argument_names: Sequence[str], result_names: Sequence[str]):
        self.graph = graph
        self.argument_names, self.result_names = argument_names, result_names
        self.buffers: list[Buffer] = []
        self.nests: list[Tile] = []
        self.known: dict[int, str] = {}
        self.computed: set[int] = set()
        self.loop_axes: set[str] = set()

    def run(self, name: str) -> Derived:
        graph = self.graph
        outputs = list(dict.fromkeys(v for v, _ in graph.outputs))
        plan = self._plan(set(outputs))
        self.axis_name = self._name_axes(plan)
        self.names = Names([n for n in self.axis_name.values()])
        arguments = self._inputs()
        stored = self._outputs(outputs)
        self._lower(dict(stored))
        axes = tuple(
            Axis(new, graph.axes[old], min(BLOCK, graph.axes[old]) if new in self.loop_axes else graph.axes[old])
            for old, new in self.axis_name.items()
        )
        program = Program(name, axes, tuple(self.buffers), tuple(self.nests)).verify()
        results = tuple((stored[v], self._renamed(view)) for v, view in graph.outputs)
        return Derived(program, tuple(arguments), results, graph)

    # -- buffers ------------------------------------------------------------------------------------------
    def _buffer(self, wanted: str, role: str, dtype: str, axes: Sequence[str]) -> str:
        name = self.names.fresh(wanted)
        type_ = Type(dtype, tuple(new for old, new in self.axis_name.items() if old in axes))
        self.buffers.append(Buffer(name, role, type_))
        return name

    def _inputs(self) -> list[tuple[int, View]]:
        arguments = []
        order = sorted((i for i, v in enumerate(self.graph.values) if v.op == "input"), key=self._argument)
        for i in order:
            value, k = self.graph.values[i], self._argument(i)
            wanted = self.argument_names[k] if k < len(self.argument_names) else f"x{k}"
            dtype = "uint32" if value.dtype.startswith("key<") else value.dtype
            self.known[i] = self._buffer(wanted, "input", dtype, value.axes)
            arguments.append((k, self._renamed(self.graph.views[i])))
        return arguments

    def _argument(self, i: int) -> int:
        return int(self.graph.values[i].param("argument"))

    def _outputs(self, outputs: Sequence[int]) -> dict[int, str]:
        stored = {}
        results = [v for v, _ in self.graph.outputs]
        for k, v in enumerate(outputs):
            value = self.graph.values[v]
            wanted = "out" if len(outputs) == 1 else f"out{k}"
            if results.index(v) < len(self.result_names):
                wanted = self.result_names[results.index(v)]
            stored[v] = self._buffer(wanted, "output", value.dtype, value.axes)
        return stored

    def _renamed(self, view: View) -> View:
        return View(view.shape, tuple(tuple(self.axis_name[a] for a in dim) for dim in view.dims))

    # -- passes 1 and 2 -------------------------------------------------------------------------------------
    def _bytes(self, v: int) -> int:
        value = self.graph.values[v]
        return math.prod(self.graph.axes[a] for a in value.axes)

    def _live(self, targets: set[int]) -> list[int]:
        seen: set[int] = set()
        todo = list(targets)
        while todo:
            v = todo.pop()
            if v not in seen:
                seen.add(v)
                if v not in self.known:
                    todo.extend(self.graph.values[v].args)
        return sorted(seen)

    def _plan(self, targets: set[int]) -> Plan:
        values, live = self.graph.values, self._live(targets)
        made = [v for v in live if v not in self.known and values[v].op not in ("input", "constant")]
        if not made:
            made = live
        largest = max(made, key=lambda v: (self._bytes(v), values[v].op == "dot", -v))
        axes = values[largest].axes
        reductions = [v for v in live if v not in self.known and values[v].param("over")]
        candidates = [a for a in axes if any(a in values[r].param("over") for r in reductions)]
        if not candidates:
            over = [(self._bytes(values[r].args[0]), r) for r in reductions if self._bytes(values[r].args[0]) > 0]
            outer = [a for a in axes]
            if over and not axes:
                whole = values[max(over)[1]]
                stream = max(whole.param("over"), key=lambda a: self.graph.axes[a])
                return Plan((), stream, None)
            return Plan(tuple(outer), None, outer[-1] if outer else None)
        stream = min(candidates, key=lambda a: (self._accumulated(a, axes, reductions), -self.graph.axes[a]))
        loops = tuple(a for a in axes if a != stream and not self._needs_whole(a, reductions, live))
        tiled = max(loops, key=lambda a: (self._reduced(a, reductions), self.graph.axes[a]), default=None)
        return Plan(loops, stream, tiled)

    def _needs_whole(self, axis: str, reductions: Sequence[int], live: Sequence[int]) -> bool:
        """Whether a reduction over this axis cannot be accumulated in memory.

        It is no sum, or its result is used along the axis again; then the axis stays whole on chip.
        """
        for r in reductions:
            if axis in self._over(r):
                if self.graph.values[r].op in ("reduce_max", "reduce_min"):
                    return True
                if any(axis in self.graph.values[w].axes for w in self._depending([r], live)):
                    return True
        return False

    def _reduced(self, axis: str, reductions: Sequence[int]) -> bool:
        return any(axis in self._over(r) for r in reductions)

    def _accumulated(self, stream: str, axes: Sequence[str], reductions: Sequence[int]) -> int:
        """Elements that reductions over the other loops leave to accumulate in memory."""
        other = set(axes) - {stream}
        return sum(self._bytes(r) for r in reductions if other & set(self.graph.values[r].param("over")))

    def _name_axes(self, plan: Plan) -> dict[str, str]:
        """Names by role: ``b h`` independent axes, ``i`` and ``j`` the two large ones, ``d e f`` the rest."""
        graph = self.graph
        big = [a for a in (plan.tiled, plan.stream) if a is not None]
        appearance = [a for i in sorted(graph.views, key=self._argument) for d in graph.views[i].dims for a in d]
        if plan.tiled is not None and self._reduced(plan.tiled, range(len(graph.values))):
            # Both are reduced, as in a backward: the first to appear is i. Else j is the one that is streamed.
            big.sort(key=lambda a: appearance.index(a) if a in appearance else len(appearance))
        batch = [a for a in plan.loops if a not in big]
        batch.sort(key=lambda a: appearance.index(a) if a in appearance else len(appearance))
        rest = [a for a in dict.fromkeys([*appearance, *graph.axes]) if a not in big and a not in batch]
        letters = {1: ["h"], 2: ["b", "h"]}.get(len(batch), [f"b{k}" for k in range(len(batch))])
        names = dict(zip(batch, letters, strict=True))
        if len(big) == 2:
            names.update(zip(big, "ij", strict=True))
        elif big:
            names[big[0]] = "j" if big[0] == plan.stream else "i"
        small = iter("defgklnopqrstuvwxyz")
        for a in rest:
            names[a] = next(small, f"z{len(names)}")
        return names

    # -- passes 3 to 5 ----------------------------------------------------------------------------------------
    def _lower(self, targets: dict[int, str]) -> None:
        """Nests that compute `targets` (value -> buffer) from what is known."""
        targets = {v: b for v, b in targets.items() if v not in self.known or b != self.known[v]}
        if not targets:
            return
        plan = self._plan(set(targets))
        live = self._live(set(targets))
        partial = [v for v in live if self._over(v) & set(plan.loops) and v not in self.known]
        after = self._depending(partial, live)
        before = self._before(plan, live, after | set(partial))
        if before:
            made = {v: self._buffer(self._temporary_name(v), "temporary", *self._type_of(v)) for v in before}
            self._lower(dict(made))
            self.known.update(made)
            self._lower(targets)
            return
        now: dict[int, str] = {}
        later: dict[int, str] = {}
        for v, buffer in targets.items():
            fits = set(plan.loops) <= set(self.graph.values[v].axes) | self._over(v)
            if v in after or not fits:
                later[v] = buffer
            elif v in partial and accumulator(self.graph.values[v].dtype) != self.graph.values[v].dtype:
                later[v] = buffer
                now[v] = self._accumulation(v)
            else:
                now[v] = buffer
        for v in partial:
            if v not in now and any(v in self.graph.values[w].args for w in after):
                now[v] = self._accumulation(v)
        if later:
            now.update(self._handed_on(set(later), set(now), plan))
        if not now:
            raise DeriveError("loops", "a result of the nest that holds the largest value", "none that fits")
        self._emit(plan, now)
        self.known.update(now)
        self._lower(later)

    def _over(self, v: int) -> set[str]:
        return set(self.graph.values[v].param("over", ()))

    def _type_of(self, v: int) -> tuple[str, tuple[str, ...]]:
        return self.graph.values[v].dtype, self.graph.values[v].axes

    def _temporary_name(self, v: int) -> str:
        return {"reduce_sum": "total", "dot": "product"}.get(self.graph.values[v].op, "row")

    def _accumulation(self, v: int) -> str:
        value = self.graph.values[v]
        return self._buffer("partial", "temporary", accumulator(value.dtype), value.axes)

    def _depending(self, sources: Sequence[int], live: Sequence[int]) -> set[int]:
        """Live values computed from these (not these themselves)."""
        hit = set(sources)
        out: set[int] = set()
        for v in live:
            if v not in self.known and hit & set(self.graph.values[v].args):
                hit.add(v)
                out.add(v)
        return out

    def _before(self, plan: Plan, live: Sequence[int], excluded: set[int]) -> list[int]:
        """Reductions over axes that are no loops, of values that lack a tiled axis: once before, not in every tile."""
        if plan.stream is None:
            return []
        loops = {*plan.loops, plan.stream}
        streaming = {v for v in live if plan.stream in self._over(v) and v not in self.known}
        rooted = self._depending(list(streaming), live) | streaming
        found = []
        for v in live:
            over, value = self._over(v), self.graph.values[v]
            if v in self.known or v in excluded or v in rooted or not over or over & loops:
                continue
            if not set(plan.loops) <= set(value.axes) and plan.stream in value.axes:
                found.append(v)
        needed = self._live(set(found))
        return [v for v in found if not any(v in self._live({w}) and w != v for w in found)] if needed else []

    def _handed_on(self, later: set[int], now: set[int], plan: Plan) -> dict[int, str]:
        """Values the later nests need that only this one can know: results of its stream."""
        live = self._live(set(now) | later)
        streaming = [v for v in live if plan.stream in self._over(v) and v not in self.known]
        rooted = set(streaming) | self._depending(streaming, live)
        self_known, out = dict(self.known), {}
        self.known.update(dict.fromkeys(now, ""))
        for v in self._live(later):
            value = self.graph.values[v]
            fits = set(plan.loops) <= set(value.axes) and plan.stream not in value.axes
            users = [w for w in self._live(later) if v in self.graph.values[w].args]
            if v in rooted and v not in self.known and fits and any(w not in rooted or w in later for w in users):
                out[v] = v
        self.known = self_known
        return {v: self._buffer("row", "temporary", *self._type_of(v)) for v in out}

    def _emit(self, plan: Plan, targets: dict[int, str]) -> None:
        types = {b.name: b.type for b in self.buffers}
        site = Site(self.graph, self.known, types, self.names, self.axis_name, self.computed)
        self.nests.append(Nest(site, plan.loops, plan.stream, targets).emit())
        self.loop_axes.update(self.axis_name[a] for a in (*plan.loops, *([plan.stream] if plan.stream else [])))
