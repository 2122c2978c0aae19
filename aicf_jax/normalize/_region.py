"""A connected part of a graph that is looked at as functions of one value x."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any

from aicf_jax.flags import OpFlags
from aicf_jax.graph import Graph

_HAS_EFFECT = int(OpFlags.HAS_EFFECT)


class Region:
    """Members (positions) in program order; `forms`: what is known of their values, by VID, that of x included."""

    def __init__(self, graph: Graph, x: int):
        self.graph, self.x = graph, x
        self.members: list[int] = []
        self.forms: dict[int, Any] = {}

    def _grow(self, limit: int) -> None:
        """Takes in consumers, in program order, as long as `_add` knows what they are."""
        queue = list(self.graph.users(self.x))
        heapq.heapify(queue)
        seen: set[int] = set()
        while queue and len(self.members) < limit:
            position = heapq.heappop(queue)
            if position not in seen and self._add(position):
                self.members.append(position)
                for c in self.graph.consumers(position):
                    heapq.heappush(queue, c)
            seen.add(position)

    def _add(self, position: int) -> bool:
        """Whether a node is a member; remembers what is known of its value."""
        raise NotImplementedError

    def _is_inside(self, vid: int) -> bool:
        return vid in self.forms

    # -- closed parts of the region ------------------------------------------------------------------------
    def needed(self, exit_position: int, stop: Iterable[int] = ()) -> list[int]:
        """Members the exit is computed from, itself included, back to x and the values in `stop`."""
        nodes, producer, stop = self.graph.nodes, self.graph.producer, {self.x, *stop}
        found, todo = {exit_position}, [exit_position]
        while todo:
            for v in nodes[todo.pop()].inputs:
                p = int(producer[v])
                if v not in stop and self._is_inside(v) and p not in found:
                    found.add(p)
                    todo.append(p)
        return sorted(found)

    def is_closed(self, members: Iterable[int], exits: Iterable[int]) -> bool:
        """Whether only `members` use the values between x and the `exits` (positions)."""
        members, exits = set(members), set(exits)
        return all(set(self.users(p)) <= members | exits and not self._escapes(p) for p in members - exits)

    def users(self, position: int) -> list[int]:
        """Consumers, but for those whose own result nobody uses (jax's logsumexp computes a sign it drops)."""
        graph = self.graph
        return [
            c
            for c in graph.consumers(position)
            if graph.consumers(c) or self._escapes(c) or graph.nodes[c].flags & _HAS_EFFECT
        ]

    def _escapes(self, position: int) -> bool:
        return not self.graph.escaping.isdisjoint(self.graph.nodes[position].outputs)
