"""Passes 1 and 2 of `mcir.derive`: which axes become loops over blocks, which one is streamed, and their names."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

from mcir._site import accumulator
from mcir.graph import ComputationGraph, multiple_of

#: A value that no input or result is as large as counts this many times its size: scores of 64 queries and keys before
#: results of 64 queries and 128 features.
_OUTGROWS = 64


@dataclasses.dataclass(frozen=True)
class Plan:
    """Passes 1 and 2: which axes are tiled and which one is streamed."""

    loops: tuple[str, ...]
    stream: str | None
    tiled: str | None


class Planner:
    """Plans nests. `known`: value -> buffer of what need not be computed; `whole`: axes that no nest may cut."""

    def __init__(self, graph: ComputationGraph, whole: frozenset[str]):
        self.graph, self.whole = graph, whole
        self.known: dict[int, str] = {}

    def _over(self, v: int) -> set[str]:
        return set(self.graph.values[v].param("over", ()))

    def _summed(self, v: int, loops: Collection[str]) -> set[str]:
        """The loops that a value is summed over, itself or as a multiple of a sum in a type that sums are kept in."""
        found = set() if v in self.known else self._over(v) & set(loops)
        if found or v in self.known or accumulator(self.graph.values[v].dtype) != self.graph.values[v].dtype:
            return found
        w = multiple_of(self.graph, v)
        return set() if w is None else self._summed(w, loops)

    def _argument(self, i: int) -> int:
        return int(self.graph.values[i].param("argument"))

    def _depending(self, sources: Sequence[int], live: Sequence[int]) -> set[int]:
        """Live values computed from these (not these themselves)."""
        hit = set(sources)
        out: set[int] = set()
        for v in live:
            if v not in self.known and hit & set(self.graph.values[v].args):
                hit.add(v)
                out.add(v)
        return out

    def _bytes(self, v: int) -> int:
        value = self.graph.values[v]
        return math.prod(self.graph.axes[a] for a in value.axes)

    def _live(self, targets: set[int], stop: Collection[int] = ()) -> list[int]:
        """Values that targets are computed from, themselves included, back to what is known and to `stop`."""
        seen: set[int] = set()
        todo = list(targets)
        while todo:
            v = todo.pop()
            if v not in seen:
                seen.add(v)
                if v not in self.known and v not in stop:
                    todo.extend(self.graph.values[v].args)
        return sorted(seen)

    def _plan(self, targets: set[int]) -> Plan:
        values, live = self.graph.values, self._live(targets)
        made = [v for v in live if v not in self.known and values[v].op not in ("input", "constant")]
        if not made:
            made = live
        given = [set(values[v].axes) for v in live if v in self.known or values[v].op == "input"]
        given += [set(values[v].axes) for v in targets]

        def rank(v: int) -> tuple[int, bool, int]:
            # What is not as large as some input or result alone grows faster than all of them: it goes first.
            alone = any(set(values[v].axes) <= axes for axes in given)
            return self._bytes(v) * (1 if alone else _OUTGROWS), values[v].op == "dot", -v

        largest = max(made, key=rank)
        axes = tuple(a for a in values[largest].axes if a not in self.whole)
        reductions = [v for v in live if v not in self.known and values[v].param("over")]
        candidates = [a for a in axes if any(a in values[r].param("over") for r in reductions)]
        if not candidates:
            over = [(self._bytes(values[r].args[0]), r) for r in reductions if self._bytes(values[r].args[0]) > 0]
            if over and not values[largest].axes:
                longest = set(values[max(over)[1]].param("over")) - self.whole
                return Plan((), max(sorted(longest), key=lambda a: self.graph.axes[a], default=None), None)
            return Plan(axes, None, axes[-1] if axes else None)
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
            # The stream's axis is the minor one: a product that is summed over it contracts the minor axis of its tile,
            # which is the order that matrix products are fastest in.
            names.update(sorted(zip(big, "ij", strict=True), key=lambda pair: pair[0] == plan.stream))
        elif big:
            names[big[0]] = "j" if big[0] == plan.stream else "i"
        small = iter("defgklnopqrstuvwxyz")
        for a in rest:
            names[a] = next(small, f"z{len(names)}")
        return names
