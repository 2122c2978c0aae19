"""Stage 2: same meaning, same form.

Each module here exports one `RULE`. A rule looks at a graph and says which nodes are really one canonical operation;
the canonical node remembers the equations it covers (`Node.covers`). Normalization is a *view*: nothing is edited,
and what is not fused later runs the covered equations exactly as written.
"""

from __future__ import annotations

from collections.abc import Iterable

from aicf_jax.graph import Graph
from aicf_jax.normalize._rule import Rule
from aicf_jax.registry import discover, unique

__all__ = ["RULES", "Rule", "normalize", "with_rules"]

#: All rules, by `Rule.order`, then by file name.
RULES: tuple[Rule, ...] = tuple(sorted(unique(discover(__name__, "RULE"), "name"), key=lambda rule: rule.order))


def with_rules(more: Iterable[Rule]) -> tuple[Rule, ...]:
    """All rules and these, by `Rule.order`; the package's first where it is the same. Each rule once.

    Raises:
      ValueError: two different rules of one name.
    """
    return tuple(sorted(unique(list(dict.fromkeys((*RULES, *more))), "name"), key=lambda rule: rule.order))


def normalize(graph: Graph, rules: tuple[Rule, ...] = RULES) -> Graph:
    """The canonical view of a graph. Idempotent."""
    for rule in rules:
        found = rule.apply(graph)
        if found:
            graph = graph.replace(found)
    return graph
