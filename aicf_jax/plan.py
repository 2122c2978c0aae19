"""The ExecPlan: active nodes in order, what lives how long, what may be overwritten.

The graph stays as it was built; the plan lists only what has to run. Dead equations and NOPs are gone, inner calls that
nothing was fused across are calls again, every step knows which values die after it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from aicf_jax import _compat
from aicf_jax.errors import GraphError
from aicf_jax.flags import PRIMITIVE_FLAGS, OpFlags
from aicf_jax.graph import Graph
from aicf_jax.ops import nbytes
from aicf_jax.trace import is_transparent


@dataclasses.dataclass(frozen=True)
class Item:
    """A candidate step: an equation to run as it is, or a fused node."""

    position: int
    eqn: Any

    @property
    def reads(self) -> list[Any]:
        return [v for v in self.eqn.invars if not isinstance(v, _compat.Literal)]


@dataclasses.dataclass(frozen=True, eq=False)
class ExecPlan:
    """Steps of one program, in order.

    Attributes:
      eqns: the equations to run.
      arguments, results: variables of the program.
    """

    eqns: tuple[Any, ...]
    arguments: tuple[Any, ...]
    results: tuple[Any, ...]

    @functools.cached_property
    def lifetimes(self) -> dict[Any, tuple[int, int]]:
        """Variable -> (step that defines it, last step that reads it).

        Arguments are defined at -1; a result of the program is read by the step after the last; a value nobody reads
        dies where it is defined.
        """
        born = dict.fromkeys(self.arguments, -1)
        last = dict(born)
        for k, eqn in enumerate(self.eqns):
            for v in eqn.invars:
                if not isinstance(v, _compat.Literal):
                    last[v] = k
            for v in eqn.outvars:
                if not isinstance(v, _compat.DropVar):
                    born[v] = last[v] = k
        last.update({v: len(self.eqns) for v in self.results if not isinstance(v, _compat.Literal)})
        return {v: (born[v], last[v]) for v in born}

    @functools.cached_property
    def in_place(self) -> dict[int, dict[int, int]]:
        """Step -> {operand: result}: results that may be written over an operand.

        Safe when the operand dies at this step, is computed by an earlier step (arguments and constants belong to the
        caller), is read by it once, and has the result's shape and dtype. Only pointwise and fused steps read each
        element before they write it. Kernels take this as ``input_output_aliases``.
        """
        found: dict[int, dict[int, int]] = {}
        for k, eqn in enumerate(self.eqns):
            if not PRIMITIVE_FLAGS.get(eqn.primitive.name, OpFlags.NONE) & (OpFlags.IS_ELEMENTWISE | OpFlags.IS_FUSED):
                continue
            pairs: dict[int, int] = {}
            for j, out in enumerate(eqn.outvars):
                i = next((i for i in self._free_operands(k, eqn) if i not in pairs and _same(eqn.invars[i], out)), None)
                if i is not None:
                    pairs[i] = j
            if pairs:
                found[k] = pairs
        return found

    def _free_operands(self, k: int, eqn: Any) -> Iterator[int]:
        for i, v in enumerate(eqn.invars):
            if isinstance(v, _compat.Literal) or eqn.invars.count(v) > 1:
                continue
            if _is_product_operand(eqn, i):
                continue
            born, last = self.lifetimes[v]
            if born >= 0 and last == k:
                yield i

    def peak_bytes(self) -> int:
        """Largest sum of bytes alive at one step, as if no step needed scratch memory.

        Arguments are the caller's and alive throughout.
        """
        change = [0] * (len(self.eqns) + 3)
        for v, (born, last) in self.lifetimes.items():
            last = len(self.eqns) if born < 0 else last
            size = nbytes(v.aval) if hasattr(v.aval, "shape") and hasattr(v.aval.dtype, "itemsize") else 0
            change[born + 1] += size
            change[last + 2] -= size
        peak = alive = 0
        for delta in change:
            alive += delta
            peak = max(peak, alive)
        return peak


def _is_product_operand(eqn: Any, i: int) -> bool:
    """A fused product reads its operands more than once: only what is read element by element may be overwritten."""
    op = eqn.params.get("op")
    steps = getattr(op, "steps", ())
    return any(s.role == "bilinear" and i in s.operands for s in steps)


def _same(a: Any, b: Any) -> bool:
    return getattr(a.aval, "shape", None) == getattr(b.aval, "shape", ()) and a.aval.dtype == b.aval.dtype


def linearize(graph: Graph, fused_eqns: dict[int, Any]) -> ExecPlan:
    """The plan of a rewritten graph. `fused_eqns`: position of a fused node -> the equation that stands for it."""
    items = [Item(i, flat.eqn) for i, flat in enumerate(graph.equations)]
    covered: set[int] = set()
    for position, eqn in fused_eqns.items():
        node = graph.nodes[position]
        covered.update(node.covers)
        items.append(Item(node.covers[0], eqn))
    results = [graph.values[v].atom for v in graph.results]
    replaced = {v for eqn in fused_eqns.values() for v in eqn.outvars}
    needed = _needed(items, results, replaced)
    calls = _whole_calls(graph, covered, needed)
    while missing := _missing(graph, items, needed, calls):
        needed = _needed(items, [*results, *missing], replaced)
        calls = _whole_calls(graph, covered, needed)
    return ExecPlan(
        tuple(_ordered(list(_emitted(graph, needed, calls)))),
        tuple(graph.values[v].atom for v in graph.arguments),
        tuple(results),
    )


def _needed(items: Sequence[Item], results: Sequence[Any], replaced: set[Any]) -> list[Item]:
    """Items the results depend on, and all with effects. A value of a fused node is computed by it alone."""
    fused_outputs = {id(v) for v in replaced}
    producer: dict[int, Item] = {}
    for item in items:
        is_fused = item.eqn.primitive.name == "fused" and any(id(v) in fused_outputs for v in item.eqn.outvars)
        for v in item.eqn.outvars:
            if is_fused or id(v) not in fused_outputs:
                producer[id(v)] = item
    kept: dict[int, Item] = {}
    todo = [producer[id(v)] for v in results if id(v) in producer]
    todo.extend(item for item in items if item.eqn.effects)
    while todo:
        item = todo.pop()
        if id(item) in kept:
            continue
        kept[id(item)] = item
        todo.extend(producer[id(v)] for v in item.reads if id(v) in producer)
    return sorted(kept.values(), key=lambda item: item.position)


def _whole_calls(graph: Graph, covered: set[int], needed: Sequence[Item]) -> set[int]:
    """Positions (in the program) of seen-through calls that nothing was fused across.

    Neither is anything inside of them read from outside, as by an operation that took in the rest of the call.
    """
    program = graph.program.eqns
    broken = {graph.equations[c].top for c in covered}
    home = {id(flat.eqn): flat.top for flat in graph.equations}
    inner = {id(v): f.top for f in graph.equations for v in f.eqn.outvars if v not in program[f.top].outvars}
    for item in needed:
        own = home.get(id(item.eqn))
        broken.update(top for v in item.reads if (top := inner.get(id(v))) is not None and top != own)
    return {top for top, eqn in enumerate(graph.program.eqns) if is_transparent(eqn) and top not in broken}


def _missing(graph: Graph, items: Sequence[Item], needed: Sequence[Item], calls: set[int]) -> list[Any]:
    """What whole calls take though their bodies do not use it, together with all that such calls take."""
    whole = [graph.program.eqns[t] for t in sorted({graph.equations[item.position].top for item in needed} & calls)]
    taken = [v for eqn in whole for v in eqn.invars if not isinstance(v, _compat.Literal)]
    there = {id(v) for item in needed for v in item.eqn.outvars} | {id(v) for eqn in whole for v in eqn.outvars}
    made = {id(v) for item in items for v in item.eqn.outvars}
    return taken if any(id(v) in made and id(v) not in there for v in taken) else []


def _emitted(graph: Graph, needed: Sequence[Item], calls: set[int]) -> Iterator[Any]:
    done: set[int] = set()
    for item in needed:
        top = graph.equations[item.position].top
        if top not in calls:
            yield item.eqn
        elif top not in done:
            done.add(top)
            yield graph.program.eqns[top]


def _ordered(eqns: Sequence[Any]) -> list[Any]:
    """Program order, a step held back only until its inputs exist."""
    missing = {id(v) for eqn in eqns for v in eqn.outvars}
    held: dict[int, list[Any]] = {}
    out: list[Any] = []
    for start in eqns:
        ready = [start]
        while ready:
            eqn = ready.pop(0)
            waiting = next((id(v) for v in eqn.invars if id(v) in missing), None)
            if waiting is not None:
                held.setdefault(waiting, []).append(eqn)
                continue
            out.append(eqn)
            for v in eqn.outvars:
                missing.discard(id(v))
                ready.extend(held.pop(id(v), ()))
    if held:
        raise GraphError(f"plan: {next(iter(held.values()))[0].primitive} waits for a value that is never computed")
    return out
