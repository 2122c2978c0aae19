"""What a normalization rule is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from aicf_jax.graph import Graph, Node


@dataclasses.dataclass(frozen=True)
class Rule:
    """`apply` maps a graph to the canonical nodes it sees, by the position each takes.

    Rules with a lower `order` run first; a rule may rely on what earlier ones named.
    """

    name: str
    order: int
    apply: Callable[[Graph], dict[int, Node]]
