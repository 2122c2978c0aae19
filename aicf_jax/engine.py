"""The six stages on one program, and on every program inside it.

The engine knows no pattern, no operation and no kernel: it runs what the `Context` holds. Bodies of jit, scan, while,
cond, remat, shard_map and custom derivative calls are entered first and rewritten on their own; the construct is kept.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from aicf_jax import _compat, legality, log, primitives
from aicf_jax.errors import FuseError, Refusal
from aicf_jax.flags import PRIMITIVE_FLAGS, OpFlags
from aicf_jax.graph import Graph, build
from aicf_jax.kernels import Kernel
from aicf_jax.memo import memo
from aicf_jax.normalize import normalize, with_rules
from aicf_jax.ops import FusedOp
from aicf_jax.pattern import Match, Pattern, match, near_miss
from aicf_jax.plan import ExecPlan, linearize
from aicf_jax.policy import Policy
from aicf_jax.rewrite import region, rewrite
from aicf_jax.select import select


@dataclasses.dataclass(frozen=True)
class Context:
    """What may be done: the caller's policy, patterns and kernels. Hashable; part of every cache key."""

    policy: Policy
    patterns: tuple[Pattern, ...]
    kernels: tuple[Kernel, ...]


@dataclasses.dataclass(frozen=True)
class Fused:
    """One fused operation of a program, found now or by an inner `fuse`.

    `rewrite`: its number in the order in which rewrites are made, from 1; None for one that an inner `fuse` made.
    """

    op: FusedOp
    rewrite: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Rewritten:
    """A program after the six stages, with what was done and what was not.

    `normal` is its graph after normalization, before anything was fused; `inside` the programs in it that hold fusions.
    """

    jaxpr: Any
    plan: ExecPlan
    normal: Graph
    graph: Graph
    fusions: tuple[Fused, ...]
    refusals: tuple[Refusal, ...]
    inside: tuple[Inside, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Inside:
    """A program that an operation calls: the operation's name, its source line, the program."""

    caller: str
    site: str
    program: Rewritten


@dataclasses.dataclass
class _Found:
    """What the programs inside of one hold, collected while they are entered."""

    fusions: list[Fused] = dataclasses.field(default_factory=list)
    refusals: list[Refusal] = dataclasses.field(default_factory=list)
    inside: list[Inside] = dataclasses.field(default_factory=list)


class Engine:
    """One run over a program; nested programs that occur more than once are rewritten once.

    Rewrites are made in an order that depends on the program alone: inner programs before the one that calls them, in
    program order; in each the patterns in their order, and the matches of one pattern in program order.
    """

    def __init__(self, context: Context):
        self.context = context
        # Operations know nothing of the fuel: an operation that is made brings its whole backward with it.
        self._inner_context = dataclasses.replace(context, policy=dataclasses.replace(context.policy, fuel=None))
        self._rules = with_rules(rule for pattern in context.patterns for rule in pattern.rules)
        self._rewrites = 0
        self._memo: dict[int, tuple[Any, Rewritten]] = {}

    def rewrite(self, jaxpr: Any) -> Rewritten:
        """The rewritten program. Its variables, arguments, results and effects are those of `jaxpr`."""
        memo = self._memo.get(id(jaxpr))
        if memo is None:
            # The jaxpr is kept beside the result: an id is only meaningful while its object lives.
            memo = self._memo[id(jaxpr)] = (jaxpr, self._rewrite(jaxpr))
        return memo[1]

    def _rewrite(self, jaxpr: Any) -> Rewritten:
        found = _Found()
        eqns = [self._enter(eqn, found) for eqn in jaxpr.eqns]
        inner = jaxpr.replace(eqns=eqns)
        bare = _compat.without_constants(inner)
        normal = normalize(build(bare).verify(), self._rules).verify()
        graph, fusions, refused = self._fuse(normal)
        fused_eqns = {i: _equation(graph, i) for i, n in enumerate(graph.nodes) if n.payload is not None}
        plan = linearize(graph, fused_eqns)
        new = jaxpr.replace(eqns=list(plan.eqns))
        all_fusions, all_refusals = (*found.fusions, *fusions), (*found.refusals, *refused)
        return Rewritten(new, plan, normal, graph, all_fusions, all_refusals, tuple(found.inside))

    def _enter(self, eqn: Any, found: _Found) -> Any:
        """The equation with the programs in its parameters rewritten."""
        if eqn.primitive in (primitives.fused_p, primitives.split_p):
            found.fusions.append(Fused(eqn.params["op"]))
        if not PRIMITIVE_FLAGS.get(eqn.primitive.name, OpFlags.NONE) & OpFlags.IS_CONTROL_FLOW and (
            eqn.primitive.name != "custom_jvp_call"
        ):
            return eqn
        changed = {}
        for name, value in eqn.params.items():
            new = self._parameter(eqn, value, found)
            if new is not value:
                changed[name] = new
        return eqn.replace(params={**eqn.params, **changed}) if changed else eqn

    def _parameter(self, eqn: Any, value: Any, found: _Found) -> Any:
        if isinstance(value, (tuple, list)):
            new = [self._parameter(eqn, v, found) for v in value]
            return type(value)(new) if any(a is not b for a, b in zip(new, value, strict=True)) else value
        opened = _compat.open_jaxpr(value)
        if opened is None:
            return value
        jaxpr, consts = opened
        done = self.rewrite(jaxpr)
        found.refusals.extend(done.refusals)
        if not done.fusions:
            return value  # the very object, so that what jax has cached for it stays valid
        found.fusions.extend(done.fusions)
        found.inside.append(Inside(eqn.primitive.name, _compat.site_of(eqn), done))
        return _compat.close_like(value, done.jaxpr, consts)

    # -- stages 3 to 6 on one graph ---------------------------------------------------------------------
    def _fuse(self, graph: Graph) -> tuple[Graph, list[Fused], list[Refusal]]:
        found: list[tuple[int, Fused]] = []
        refused: list[Refusal] = []
        settled: set[tuple[int, str]] = set()
        unfuelled: set[int] = set()
        for pattern in self.context.patterns:
            hits = []
            for start, flags in enumerate(graph.flag_list):
                key = (start, pattern.rewrite.name)
                if key in settled or not pattern.starts_at(flags):
                    continue
                hit, refusal, anchors = self._at(graph, pattern, start)
                if hit is not None:
                    hits.append(hit)
                if refusal is not None:
                    refused.append(refusal)
                if hit is not None or refusal is not None:
                    settled.update((i, pattern.rewrite.name) for i in anchors)
            if hits:
                graph = self._promote(graph, hits, found, refused, unfuelled)
        return graph, [fused for _, fused in sorted(found, key=lambda pair: pair[0])], refused

    def _at(self, graph: Graph, pattern: Pattern, start: int) -> tuple[Match | None, Refusal | None, tuple[int, ...]]:
        """``(match, refusal, nodes that other patterns of the operation are not to start at)``."""
        hit = match(graph, pattern, start)
        if hit is None:
            refusal, whole = near_miss(graph, pattern, start)
            return None, refusal, (start,) if whole else ()
        anchors = hit.positions[: pattern.prefix + 1]
        hit = pattern.rewrite.extend(hit)
        refusal = legality.check(hit, self.context.policy)
        return (hit, None, anchors) if refusal is None else (None, refusal, anchors)

    def _promote(
        self,
        graph: Graph,
        hits: list[Match],
        found: list[tuple[int, Fused]],
        refused: list[Refusal],
        unfuelled: set[int],
    ) -> Graph:
        """Rewrites all matches of one pattern at once; of two that share a node the earlier anchor's wins.

        `unfuelled`: positions that only the fuel keeps from being rewritten, so that each is reported once.
        """
        taken: set[int] = set()
        rewrites = []
        for hit in hits:
            if not (taken | unfuelled).isdisjoint(hit.positions):
                continue
            try:
                area = region(hit, self._inner_context)
            except Exception as error:
                name, op_name = hit.pattern.name, hit.pattern.rewrite.name
                raise FuseError(f"pattern {name} matched what {op_name} cannot describe: {error!r}") from error
            refusal = prove(area.op)
            if refusal is not None:
                refused.append(dataclasses.replace(refusal, pattern=hit.pattern.name, site=hit.site))
                continue
            if (refusal := self._fuel_is_out(hit)) is not None:
                unfuelled.update(hit.positions)
                refused.append(refusal)
                continue
            op, refusals = selected(area.op, hit.pattern.name)
            taken.update(hit.positions)
            rewrites.append((hit, area, op))
            self._rewrites += 1
            found.append((hit.positions[0], Fused(op, self._rewrites)))
            refused.extend(refusals)
        return rewrite(graph, rewrites).verify() if rewrites else graph

    def _fuel_is_out(self, hit: Match) -> Refusal | None:
        fuel = self.context.policy.fuel
        if fuel is None or self._rewrites < fuel:
            return None
        detail = f"{hit.pattern.name} would be rewritten, but Policy(fuel={fuel}) is used up"
        expected = f"one of the first {fuel} rewrites"
        return Refusal(hit.pattern.name, "legality", "fuel", detail, expected, "a later one", hit.site)


@memo()
def prove(op: FusedOp) -> Refusal | None:
    """What an operation's kind says against it as a whole; asked once for equal operations."""
    try:
        return op.semantic.prove(op)
    except Exception as error:
        # Equations that cannot be traced apart from where they stand, as in a shard_map that checks what varies.
        found = f"{type(error).__name__}: {error}"
        if op.context.policy.on_failure == "raise":
            raise FuseError(f"{op!r} cannot be looked at on its own, at {op.site}: {found}") from error
        log.once(f"{op!r} cannot be looked at on its own and is left unfused: {found}")
        detail = "the operation cannot be looked at on its own"
        return Refusal(op.pattern, "legality", "untraceable", detail, "equations of arrays alone", found, op.site)


def selected(op: FusedOp, pattern: str) -> tuple[FusedOp, tuple[Refusal, ...]]:
    """`select`, asked once for equal operations; source lines stay those of this one."""
    found, refusals = _selected(op, pattern)
    chosen = op.with_choices(found.choices)
    return chosen, tuple(dataclasses.replace(r, site=op.site) for r in refusals)


_selected = memo()(select)


def _equation(graph: Graph, position: int) -> Any:
    node = graph.nodes[position]
    anchor = graph.eqn(node.covers[0])
    atoms = graph.values
    return _compat.new_equation(
        anchor,
        [atoms[v].atom for v in node.inputs],
        [atoms[v].atom for v in node.outputs],
        primitives.primitive_of(node.payload),
        {"op": node.payload, "residual": False},
    )
