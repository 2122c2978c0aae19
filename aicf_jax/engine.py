"""The six stages on one program, and on every program inside it.

The engine knows no pattern, no operation and no kernel: it runs what the `Context` holds. Bodies of jit, scan, while,
cond, remat, shard_map and custom derivative calls are entered first and rewritten on their own; the construct is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from aicf_jax import _compat, autodiff, legality, primitives
from aicf_jax.errors import FuseError, Refusal
from aicf_jax.flags import PRIMITIVE_FLAGS, OpFlags
from aicf_jax.graph import Graph, build
from aicf_jax.kernels import Kernel
from aicf_jax.memo import memo
from aicf_jax.normalize import normalize
from aicf_jax.ops import FusedOp, Step
from aicf_jax.pattern import Match, Pattern, match, near_miss
from aicf_jax.plan import ExecPlan, linearize
from aicf_jax.policy import Policy
from aicf_jax.rewrite import region, rewrite, step_key
from aicf_jax.select import is_left_to_xla, select


@dataclasses.dataclass(frozen=True)
class Context:
    """What may be done: the caller's policy, patterns and kernels. Hashable; part of every cache key."""

    policy: Policy
    patterns: tuple[Pattern, ...]
    kernels: tuple[Kernel, ...]


@dataclasses.dataclass(frozen=True)
class Fused:
    """One fused operation of a program, found now or by an inner `fuse`."""

    op: FusedOp


@dataclasses.dataclass(frozen=True, eq=False)
class Rewritten:
    """A program after the six stages, with what was done and what was not."""

    jaxpr: Any
    plan: ExecPlan
    graph: Graph
    fusions: tuple[Fused, ...]
    refusals: tuple[Refusal, ...]


class Engine:
    """One run over a program; nested programs that occur more than once are rewritten once."""

    def __init__(self, context: Context):
        self.context = context
        self._memo: dict[int, tuple[Any, Rewritten]] = {}

    def rewrite(self, jaxpr: Any) -> Rewritten:
        """The rewritten program. Its variables, arguments, results and effects are those of `jaxpr`."""
        memo = self._memo.get(id(jaxpr))
        if memo is None:
            # The jaxpr is kept beside the result: an id is only meaningful while its object lives.
            memo = self._memo[id(jaxpr)] = (jaxpr, self._rewrite(jaxpr))
        return memo[1]

    def _rewrite(self, jaxpr: Any) -> Rewritten:
        fusions: list[Fused] = []
        refusals: list[Refusal] = []
        eqns = [self._enter(eqn, fusions, refusals) for eqn in jaxpr.eqns]
        inner = jaxpr.replace(eqns=eqns)
        bare = _compat.without_constants(inner)
        graph = normalize(build(bare).verify()).verify()
        graph, found, refused = self._fuse(graph)
        fused_eqns = {i: _equation(graph, i) for i, n in enumerate(graph.nodes) if n.payload is not None}
        plan = linearize(graph, fused_eqns)
        new = jaxpr.replace(eqns=list(plan.eqns))
        return Rewritten(new, plan, graph, (*fusions, *found), (*refusals, *refused))

    def _enter(self, eqn: Any, fusions: list[Fused], refusals: list[Refusal]) -> Any:
        """The equation with the programs in its parameters rewritten."""
        if eqn.primitive is primitives.fused_p:
            fusions.append(Fused(eqn.params["op"]))
        if not PRIMITIVE_FLAGS.get(eqn.primitive.name, OpFlags.NONE) & OpFlags.IS_CONTROL_FLOW and (
            eqn.primitive.name != "custom_jvp_call"
        ):
            return eqn
        changed = {}
        for name, value in eqn.params.items():
            new = self._parameter(value, fusions, refusals)
            if new is not value:
                changed[name] = new
        return eqn.replace(params={**eqn.params, **changed}) if changed else eqn

    def _parameter(self, value: Any, fusions: list[Fused], refusals: list[Refusal]) -> Any:
        if isinstance(value, (tuple, list)):
            new = [self._parameter(v, fusions, refusals) for v in value]
            return type(value)(new) if any(a is not b for a, b in zip(new, value, strict=True)) else value
        opened = _compat.open_jaxpr(value)
        if opened is None:
            return value
        jaxpr, consts = opened
        done = self.rewrite(jaxpr)
        refusals.extend(done.refusals)
        if not done.fusions:
            return value  # the very object, so that what jax has cached for it stays valid
        fusions.extend(done.fusions)
        return _compat.close_like(value, done.jaxpr, consts)

    # -- stages 3 to 6 on one graph ---------------------------------------------------------------------
    def _fuse(self, graph: Graph) -> tuple[Graph, list[Fused], list[Refusal]]:
        found: list[tuple[int, Fused]] = []
        refused: list[Refusal] = []
        settled: set[tuple[int, str]] = set()
        for pattern in self.context.patterns:
            hits = []
            for start, flags in enumerate(graph.flag_list):
                key = (start, pattern.rewrite.name)
                if key in settled or not pattern.sequence[0].accepts(flags):
                    continue
                hit, refusal = self._at(graph, pattern, start)
                if hit is not None:
                    hits.append(hit)
                if refusal is not None:
                    refused.append(refusal)
                if hit is not None or refusal is not None:
                    settled.add(key)
            if hits:
                graph = self._promote(graph, hits, found, refused)
        return graph, [fused for _, fused in sorted(found, key=lambda pair: pair[0])], refused

    def _at(self, graph: Graph, pattern: Pattern, start: int) -> tuple[Match | None, Refusal | None]:
        hit = match(graph, pattern, start)
        if hit is None:
            return None, near_miss(graph, pattern, start)
        hit = pattern.rewrite.extend(hit)
        refusal = legality.check(hit, self.context.policy)
        return (hit, None) if refusal is None else (None, refusal)

    def _promote(
        self, graph: Graph, hits: list[Match], found: list[tuple[int, Fused]], refused: list[Refusal]
    ) -> Graph:
        """Rewrites all matches of one pattern at once; of two that share a node the earlier anchor's wins."""
        taken: set[int] = set()
        rewrites = []
        for hit in hits:
            if taken.intersection(hit.positions):
                continue
            try:
                area = region(hit, self.context)
            except Exception as error:
                name, op_name = hit.pattern.name, hit.pattern.rewrite.name
                raise FuseError(f"pattern {name} matched what {op_name} cannot describe: {error!r}") from error
            refusal = prove(area.op)
            if refusal is not None:
                refused.append(dataclasses.replace(refusal, pattern=hit.pattern.name, site=hit.site))
                continue
            op, refusals = selected(area.op, hit.pattern.name)
            taken.update(hit.positions)
            rewrites.append((hit, area, op))
            found.append((hit.positions[0], Fused(op)))
            refused.extend(refusals)
        return rewrite(graph, rewrites).verify() if rewrites else graph


@memo()
def prove(op: FusedOp) -> Refusal | None:
    """What an operation's kind says against it as a whole; asked once for equal operations."""
    try:
        return op.semantic.prove(op)
    except Exception as error:
        # Equations that cannot be traced apart from where they stand, as in a shard_map that checks what varies.
        found = f"{type(error).__name__}: {error}"
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
        primitives.fused_p,
        {"op": node.payload, "residual": False},
    )


# -- programs the primitives ask for --------------------------------------------------------------------


@memo()
def batched_program(op: FusedOp, residual: bool, dims: tuple[Any, ...], avals: tuple[Any, ...]) -> Any:
    """The equations of an operation under ``vmap``, sent through the engine again."""
    f = jax.vmap(lambda *xs: primitives._results(op, xs, residual, None), in_axes=dims)
    jaxpr = _compat.trace(f, *avals)
    return _compat.as_function(Engine(op.context).rewrite(jaxpr).jaxpr)


@memo()
def batched_op(op: FusedOp, dims: tuple[Any, ...], avals: tuple[Any, ...]) -> FusedOp:
    """The operation under ``vmap``: each of its steps batched along a leading dimension, and selected again.

    For operations that are proved or derived as a whole; `batched_program` matches anew.
    """
    batched = [d is not None for d in dims]
    in_avals = tuple(
        a if d is None else a.update(shape=(a.shape[d], *(n for k, n in enumerate(a.shape) if k != d)))
        for a, d in zip(avals, dims, strict=True)
    )
    slots, steps, place = list(in_avals), [], list(range(len(in_avals)))
    length = next(a.shape[0] for a, b in zip(in_avals, batched, strict=True) if b)

    def add(step: Step, f: Any, operands: tuple[int, ...]) -> None:
        axes = tuple(0 if batched[s] else None for s in operands)
        mapped = jax.vmap(f, in_axes=axes) if 0 in axes else f
        body = _compat.trace(mapped, *[slots[s] for s in operands])
        steps.append(dataclasses.replace(step, body=body, operands=operands))
        slots.extend(v.aval for v in body.outvars)
        batched.extend([0 in axes] * len(body.outvars))

    def whole(slot: int, shape: tuple[int, ...]) -> int:
        """The slot of a softmax's operand with all its dimensions: scores and mask are read side by side."""
        wide = Step("linear", "broadcast", None, (slot,))
        add(wide, lambda x: [jnp.broadcast_to(x, shape if batched[slot] else (length, *shape))], (slot,))
        batched[-1] = True
        return len(slots) - 1

    for step in op.steps:
        operands = tuple(place[s] for s in step.operands)
        if step.role == "softmax" and len(operands) > 1 and any(batched[s] for s in operands):
            operands = tuple(whole(s, step.body.invars[0].aval.shape) for s in operands)
        add(step, _compat.as_function(step.body), operands)
        place += range(len(slots) - len(step.body.outvars), len(slots))
    results = tuple(place[s] for s in op.results)
    new = dataclasses.replace(
        op, steps=tuple(steps), results=results, in_avals=in_avals, key=step_key(steps), choices=()
    )
    return selected(new, op.pattern)[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Backward:
    """A derived backward: the program that computes the wanted cotangents, and its graph after the engine.

    `op` is the one operation it is, for a backward that is derived as a whole.
    """

    rewritten: Rewritten | None
    names: tuple[str, ...]
    wanted: tuple[int, ...]
    op: FusedOp | None = None

    def __call__(self, inputs: Sequence[Any], saved: Sequence[Any], ct: Any) -> list[Any]:
        if self.op is not None:
            return primitives.bind(self.op, *inputs, *saved, ct)
        assert self.rewritten is not None
        return _compat.as_function(self.rewritten.jaxpr)(*inputs, *saved, ct)


@memo()
def backward_program(op: FusedOp, wanted: tuple[int, ...]) -> Backward:
    """The composite backward of an operation for some of its inputs, matched and selected like any program."""
    saved = autodiff.saved_avals(op)
    n = len(op.in_avals)

    def f(*args: Any) -> list[Any]:
        return autodiff.cotangent(op, args[:n], args[n:-1], args[-1], wanted)

    avals = (*op.in_avals, *saved, op.out_avals[0])
    jaxpr = _compat.trace(f, *avals)
    composite = op.semantic.composite
    if composite is not None:
        names = (*_input_names(op), *composite.names, "dY")
        return Backward(None, names, wanted, _gradient_op(op, jaxpr, avals, names, wanted))
    engine = Engine(op.context)
    done = engine.rewrite(jaxpr)
    if all(is_left_to_xla(fusion.op) for fusion in done.fusions):
        # Nothing gained by an operation that stands for its own equations: keep them visible to further
        # transformations.
        done = dataclasses.replace(done, jaxpr=jaxpr)
    residual_name = () if not saved else ("Y",) if op.residual in op.results else ("Z",)
    return Backward(done, (*_input_names(op), *residual_name, "dY"), wanted)


def _gradient_op(
    op: FusedOp, jaxpr: Any, avals: tuple[Any, ...], names: tuple[str, ...], wanted: tuple[int, ...]
) -> FusedOp:
    """A backward as one operation, with kernels of its own. Where none is chosen its equations run."""
    from aicf_jax.ops import OPS

    composite = op.semantic.composite
    assert composite is not None
    semantic = OPS[composite.gradient]
    n = len(avals)
    steps = (Step("opaque", semantic.name, jaxpr, tuple(range(n))),)
    new = FusedOp(
        semantic=semantic,
        blob=semantic.schema.pack(op.blob.unpack()),
        steps=steps,
        results=tuple(range(n, n + len(jaxpr.outvars))),
        in_avals=avals,
        key=step_key(steps),
        context=op.context,
        site=op.site,
        pattern=op.pattern,
        input_names=names,
        result_names=tuple("d" + names[i] for i in wanted),
    )
    return selected(new, op.pattern)[0]


def _input_names(op: FusedOp) -> tuple[str, ...]:
    names: dict[int, str] = {}
    if callable(op.semantic.names):
        names.update(op.semantic.names(op))
        return tuple(names.get(i, f"in{i}") for i in range(len(op.in_avals)))
    for role, k, name in op.semantic.names:
        for step in op.steps:
            if step.role == role and k < len(step.operands) and step.operands[k] < len(op.in_avals):
                names.setdefault(step.operands[k], name)
    return tuple(names.get(i, f"in{i}") for i in range(len(op.in_avals)))
