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
from collections.abc import Callable, Sequence
from typing import Any

from mcir._nest import Nest
from mcir._plan import Plan, Planner
from mcir._site import Names, Site, accumulator
from mcir.errors import DeriveError
from mcir.graph import ComputationGraph, View
from mcir.ir import Axis, Buffer, Compute, Load, OnlineReduction, Program, Tile, Type
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
    graph: ComputationGraph,
    name: str,
    argument_names: Sequence[str] = (),
    result_names: Sequence[str] = (),
    whole: frozenset[str] = frozenset(),
) -> Derived:
    """`derive_bound` of a computation graph. `whole`: axes of it that no nest may cut."""
    if 0 in graph.axes.values() or any(0 in v.shape for v in graph.views.values()):
        raise DeriveError("empty", "dimensions of at least one element", "a dimension of size zero")
    while True:
        deriver = _Deriver(graph, argument_names, result_names, whole)
        derived = deriver.run(name)
        found = deriver.whole_somewhere(derived.program) - whole
        if not found:
            derived.program.verify()
            return derived
        whole |= found


def _parameter_names(function: Any, count: int) -> list[str]:
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
    plain = [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return plain[:count] if len(plain) >= count else []


class _Deriver(Planner):
    def __init__(
        self,
        graph: ComputationGraph,
        argument_names: Sequence[str],
        result_names: Sequence[str],
        whole: frozenset[str],
    ):
        super().__init__(graph, whole)
        self.argument_names, self.result_names = argument_names, result_names
        self.buffers: list[Buffer] = []
        self.nests: list[Tile] = []
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
        program = Program(name, axes, tuple(self.buffers), tuple(self.nests))
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
        return dataclasses.replace(view, dims=tuple(tuple(self.axis_name[a] for a in dim) for dim in view.dims))

    # -- passes 3 to 5 ----------------------------------------------------------------------------------------
    def _lower(self, targets: dict[int, str]) -> None:
        """Nests that compute `targets` (value -> buffer) from what is known."""
        targets = {v: b for v, b in targets.items() if v not in self.known or b != self.known[v]}
        if not targets:
            return
        plan = self._plan(set(targets))
        live = self._live(set(targets))
        partial = [v for v in live if self._over(v) & set(plan.loops) and v not in self.known]
        multiples = {v for v in targets if v not in partial and self._summed(v, plan.loops)}
        after = self._depending(partial, live) - multiples
        before = self._before(plan, live, after | multiples | set(partial))
        if before:
            made = {v: self._buffer(self._temporary_name(v), "temporary", *self._type_of(v)) for v in before}
            self._lower(dict(made))
            self.known.update(made)
            self._lower(targets)
            return
        now: dict[int, str] = {}
        later: dict[int, str] = {}
        for v, buffer in targets.items():
            fits = set(plan.loops) <= set(self.graph.values[v].axes) | self._summed(v, plan.loops)
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

    def _type_of(self, v: int) -> tuple[str, tuple[str, ...]]:
        return self.graph.values[v].dtype, self.graph.values[v].axes

    def _temporary_name(self, v: int) -> str:
        return {"reduce_sum": "total", "dot": "product"}.get(self.graph.values[v].op, "row")

    def _accumulation(self, v: int) -> str:
        value = self.graph.values[v]
        return self._buffer("partial", "temporary", accumulator(value.dtype), value.axes)

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
        # Of those that others are computed from, the others only: they take the rest with them.
        return [v for v in found if not any(v in self._live({w}) and w != v for w in found)]

    def _handed_on(self, later: set[int], now: set[int], plan: Plan) -> dict[int, str]:
        """Values the later nests need that only this one can know: results of its stream."""
        live = self._live(set(now) | later)
        streaming = [v for v in live if plan.stream in self._over(v) and v not in self.known]
        rooted = set(streaming) | self._depending(streaming, live)
        needed = self._live(later, stop=now)
        handed = []
        for v in needed:
            value = self.graph.values[v]
            fits = set(plan.loops) <= set(value.axes) and plan.stream not in value.axes
            users = [w for w in needed if v in self.graph.values[w].args]
            if v in rooted and v not in now and fits and any(w not in rooted or w in later for w in users):
                handed.append(v)
        return {v: self._buffer("row", "temporary", *self._type_of(v)) for v in handed}

    def whole_somewhere(self, program: Program) -> set[str]:
        """Axes of the graph that one nest walks over in blocks and another has whole on chip: all must have it so."""
        whole = {a for loops, s in program.statements() for a in _axes_of(s) if a not in loops}
        return {old for old, new in self.axis_name.items() if new in whole and new in self.loop_axes}

    def _emit(self, plan: Plan, targets: dict[int, str]) -> None:
        types = {b.name: b.type for b in self.buffers}
        site = Site(self.graph, self.known, types, self.names, self.axis_name, self.computed)
        self.nests.append(Nest(site, plan.loops, plan.stream, targets).emit())
        self.loop_axes.update(self.axis_name[a] for a in (*plan.loops, *([plan.stream] if plan.stream else [])))


def _axes_of(statement: Any) -> tuple[str, ...]:
    return statement.type.axes if isinstance(statement, Load | Compute | OnlineReduction) else ()
