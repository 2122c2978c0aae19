"""Stage 4: may a match be rewritten? Every check returns None or a `Refusal`; the first refusal wins.

The checks here hold for every operation. What only one operation knows (which dimension a bias may run along) is that
operation's own `SemanticOp.check`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from aicf_jax import _compat
from aicf_jax.errors import Refusal
from aicf_jax.pattern import Match
from aicf_jax.policy import Policy


def refuse(match: Match, code: str, expected: str, found: str, node: Any = None) -> Refusal:
    """A refusal of the legality stage at a node of the match (the last by default)."""
    site = match.site if node is None else match.graph.site(node)
    detail = f"{match.pattern.name} fits, but is not legal here: {found}"
    return Refusal(match.pattern.name, "legality", code, detail, expected, found, site)


def check(match: Match, policy: Policy) -> Refusal | None:
    """The first reason not to rewrite, None when the match is legal."""
    for one in CHECKS:
        refusal = one(match, policy)
        if refusal is not None:
            return refusal
    return match.pattern.rewrite.check(match)


def _values(match: Match) -> list[Any]:
    vids = dict.fromkeys(v for n in match.all_nodes for v in (*n.inputs, *n.outputs))
    return [match.graph.values[v] for v in vids if match.graph.values[v].kind != "literal"]


def _effects(match: Match, policy: Policy) -> Refusal | None:
    for node in match.all_nodes:
        if any(match.graph.eqn(c).effects for c in node.covers):
            return refuse(match, "effect", "operations without side effects", f"{node.op} has an effect", node)
    return None


def _context(match: Match, policy: Policy) -> Refusal | None:
    eqns = [match.graph.eqn(c) for node in match.all_nodes for c in node.covers]
    if not all(_compat.plain_context(e) for e in eqns) or len(set(map(_compat.context_of, eqns))) > 1:
        return refuse(match, "context", "one context, without compute_on or XLA metadata", "equations in others")
    return None


def _dtypes(match: Match, policy: Policy) -> Refusal | None:
    chain = match.graph.values
    values = [chain[n.outputs[0]] for n in match.nodes] if match.pattern.rewrite.any_operands else _values(match)
    for value in values:
        dtype = getattr(value.aval, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            return refuse(match, "dtype", "floating-point operands", f"{value.aval.str_short()}")
    return None


def _shapes(match: Match, policy: Policy) -> Refusal | None:
    for value in _values(match):
        if not all(isinstance(n, int) for n in value.aval.shape):
            return refuse(match, "symbolic_shape", "static shapes", f"{value.aval.str_short()}")
    return None


def _numerics(match: Match, policy: Policy) -> Refusal | None:
    found = match.pattern.rewrite.numerics
    if not policy.allows(found):
        return refuse(match, "numerics", f"numerics class {policy.numerics} or stricter", f"class {found}")
    return None


CHECKS: tuple[Callable[[Match, Policy], Refusal | None], ...] = (_effects, _context, _dtypes, _shapes, _numerics)
