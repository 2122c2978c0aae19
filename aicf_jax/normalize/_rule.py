"""What a normalization rule is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from aicf_jax.graph import Graph, Node


@dataclasses.dataclass(frozen=True)
class Rule:
    """`apply` maps a graph to the canonical nodes it sees, by the position each takes.

    Rules with a lower `order` run first; a rule may rely on what earlier ones named.

    Attributes:
      after: names of the rules that must have run: those whose nodes it reads, and those that it leaves equations to.
        Any order that respects it gives the same normal form.
    """

    name: str
    order: int
    apply: Callable[[Graph], dict[int, Node]]
    after: tuple[str, ...] = ()
