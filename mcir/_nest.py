"""Emits one nest of loops: tiles of the independent axes around streams of one axis.

The passes of `mcir.derive` decide which loops there are and which values belong here; this file writes the statements.
Per phase there is one stream. What it reduces is final after it; what needs a final value that no algebra can take out
of the sum waits for the next phase, where the stream starts over and recomputes (a Rematerialization) what it needs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mcir._finals import Finals
from mcir._reductions import Kind
from mcir.algebra import Exp, Forms
from mcir.errors import DeriveError
from mcir.ir import Skip, Store, Stream, Tile
from mcir.visibility import find_skip

#: Maxima first, for sums are relative to them; products last: m, l, acc.
_ORDER = {"reduce_max": 0, "dot": 2}


class Nest(Finals):
    """One nest; see `mcir._values.Values` for what it is made from."""

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
                self.body.append(Store(buffer, self._outer_value(v), self._adds_up(v)))
        return Tile(self.site.renamed(self.loops), (*self.prologue, *self.body))

    def _adds_up(self, v: int) -> bool:
        """Whether tiles store parts of a target: a sum over a loop, or a multiple of one."""
        return not set(self.loops) <= set(self.graph.values[v].axes)

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

    def _phase(self, forms: Forms, reductions: list[int], ready: list[int], phase: int) -> None:
        self.inside, self.inner, self.represented = [], {}, {}
        self.maxima, self.states, self.chosen = {}, {}, {}
        self.computed_before = set(self.site.computed)
        declared: list[Any] = []
        self.declared = declared
        finals: list[tuple[int, str, Kind]] = []
        order = sorted(reductions, key=lambda r: (_ORDER.get(self.graph.values[r].op, 1), r))
        updated: list[tuple[int, Any]] = []
        for r in order:
            found = self._form_of(forms, r)
            assert found is not None
            state = self._update(r, found)
            finals.append((r, state, found))
            updated.append((r, found))
        for v in ready:
            self.inside.append(Store(self.targets[v], self._inner_value(v), self._adds_up(v)))
        skip = self._skip(updated, ready) if phase == 0 else None
        if skip is not None:
            # Blocks that are left out keep the zero their buffer starts with.
            self.inside = [dataclasses.replace(s, accumulate=True) if isinstance(s, Store) else s for s in self.inside]
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
            guarded = any(isinstance(form, Exp) and form.guards for _, (_, form, _) in updated)
            if found.fill == float("-inf") and row not in self.site.known and not guarded:
                rows = None
        return Skip(self.inner[found.predicate], found.visible, found.fill, rows, found.base)
