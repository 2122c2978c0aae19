"""`explain`: what `fuse` does with a program, without running it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from aicf_jax import hardware
from aicf_jax.cache import Plan, build_plan
from aicf_jax.derived import Backward, backward_program
from aicf_jax.engine import Context, Fused
from aicf_jax.fronts import state
from aicf_jax.fronts.function import FusedFunction, trace_call
from aicf_jax.fuse import is_linen, make_context
from aicf_jax.graph import Graph, build, schedule
from aicf_jax.kernels import KERNELS, XLA, Kernel
from aicf_jax.normalize import normalize
from aicf_jax.ops import FusedOp
from aicf_jax.ops._programs import machine
from aicf_jax.outline import outlines
from aicf_jax.pattern import Pattern
from aicf_jax.patterns import FUSION_PATTERNS
from aicf_jax.plan import linearize
from aicf_jax.policy import NUMERICS, TARGETS, Policy
from aicf_jax.printer import type_text
from aicf_jax.report import Fusion, Report
from aicf_jax.select import is_left_to_xla, kernel_cost, kernel_for, reported_cost, unfused_cost
from aicf_jax.verify import bound_of


def explain(
    target: Any,
    /,
    *args: Any,
    policy: Policy | None = None,
    patterns: Sequence[Pattern] | None = None,
    kernels: Sequence[Kernel] | None = None,
    **kwargs: Any,
) -> Report:
    """What is fused in a call of `target`, what is refused and why.

    Args:
      target: as for `fuse`, or a fused target (whose own policy, patterns and kernels then hold unless given here).
      *args: of the call; for a linen module, of its ``apply``. `jax.ShapeDtypeStruct` may stand for arrays.
      policy: as for `fuse`.
      patterns: as for `fuse`.
      kernels: as for `fuse`.
      **kwargs: of the call.

    Runs nothing: the program is traced, and nothing is compiled or executed.

    Raises:
      TypeError: `target` is not callable.
      Exception: whatever tracing the call raises.
    """
    function, name, context = entry(target, policy, patterns, kernels)
    traced = trace_call(function, args, kwargs)
    return report_of(build_plan(traced.jaxpr, context), name, context)


def report_of(plan: Plan, name: str, context: Context) -> Report:
    """What a plan does, under this name."""
    before = linearize(build(plan.unfused), {}).peak_bytes()
    note = context.policy.map_note(_platform(context.policy))
    if plan.rewritten is None:
        return Report(name, (), (), str(plan.jaxpr), before, before, plan.failure, hardware=note)
    done = plan.rewritten
    fusions = tuple(_fusion(fused, context) for fused in done.fusions)
    after = done.plan.peak_bytes()
    return Report(name, fusions, done.refusals, str(plan.jaxpr), before, after, outlines=outlines(done), hardware=note)


def entry(
    target: Any,
    policy: Policy | None,
    patterns: Sequence[Pattern] | None,
    kernels: Sequence[Kernel] | None,
    **changes: Any,
) -> tuple[Callable[..., Any], str, Context]:
    """The function to trace, its name, and the context to rewrite it in.

    What is not given is that of a target that is fused already, else the default; `changes` are made to the policy.
    """
    function, name, own = _opened(target)
    chosen = policy if policy is not None else own.policy if own else Policy()
    context = make_context(
        dataclasses.replace(chosen, **changes)
        if isinstance(chosen, Policy)
        else chosen,  # the check names the argument
        patterns if patterns is not None else own.patterns if own else FUSION_PATTERNS,
        kernels if kernels is not None else own.kernels if own else KERNELS,
    )
    return function, name, context


def _opened(target: Any) -> tuple[Callable[..., Any], str, Context | None]:
    """The function to trace, its name, and the context of a target that is fused already."""
    if isinstance(target, FusedFunction):
        return target.__wrapped__, getattr(target, "__name__", "function"), target.context
    if is_linen(target) and target.scope is None:
        from aicf_jax.fronts import linen_module

        own = type(target)._aicf_context if linen_module.is_fused(target) else None
        original = linen_module.unfused(target) if own else target
        return original.apply, type(target).__name__, own
    if state.is_object(target):
        from aicf_jax.fronts import nnx_module

        own = type(target)._aicf_context if nnx_module.is_fused(target) else None
        return nnx_module.plain_call(target), type(target).__name__, own
    if not callable(target) or isinstance(target, type):
        raise TypeError(f"explain(target=...): expected what fuse takes, found {target!r}")
    return target, getattr(target, "__name__", type(target).__name__), None


def _fusion(fused: Fused, context: Context) -> Fusion:
    op = fused.op
    platform = _platform(context.policy)
    cost = reported_cost(op, platform)
    wanted = tuple(i for i, a in enumerate(op.in_avals) if jnp.issubdtype(a.dtype, jnp.inexact))
    # What is part of a backward already has none to show: it is differentiated as its equations.
    backward = None if any(s.role in ("gradient", "opaque") for s in op.steps) else backward_program(op, wanted)
    return Fusion(
        op=op.semantic.name,
        pattern=op.pattern,
        kernel=dict(op.choices).get(platform, XLA),
        kernels=op.choices,
        numerics=_numerics(op, platform),
        site=op.site,
        attrs=str(op.blob),
        result=type_text(op.out_avals[0]),
        bytes_before=cost.bytes_before,
        bytes_after=cost.bytes_after,
        launches_before=cost.launches_before,
        launches_after=cost.launches_after,
        backward=backward_text(backward) if backward is not None else "",
        program=program_text(op, platform),
        backward_program=program_text(backward.op, platform)
        if backward is not None and backward.op is not None
        else "",
        rewrite=fused.rewrite,
        bound=bound_of(op),
        hardware=hardware_text(op, platform),
    )


def _numerics(op: FusedOp, platform: str) -> str:
    """The class of the rewrite, or that of the kernel it runs as where that is looser."""
    kernel = kernel_for(op, platform)
    found = (op.semantic.numerics, kernel.numerics if kernel is not None else op.semantic.numerics)
    return max(found, key=NUMERICS.index)


def hardware_text(op: FusedOp, platform: str) -> str:
    """What the policy's property map tells of an operation, empty without one for the platform."""
    found = op.context.policy.properties(platform)
    if found is None:
        return ""
    kernel = kernel_for(op, platform)
    before = unfused_cost(op, platform)
    after = before if kernel is None else kernel_cost(kernel, op, platform)
    both = [hardware.estimate(op, found, cost.moved_bytes, cost.launches) for cost in (before, after)]
    # Only programs of mcir have tiles that are chosen for a machine.
    tiled = machine(op) if kernel is not None and kernel.program is not None else None
    return hardware.text(found, both[0], both[1], (tiled.used, tiled.missing) if tiled is not None else ((), ()))


def program_text(op: FusedOp, platform: str) -> str:
    """The memory flow program of the kernel an operation runs as, empty where it has none."""
    kernel = kernel_for(op, platform)
    return kernel.program(op).rstrip() if kernel is not None and kernel.program is not None else ""


def _platform(policy: Policy) -> str:
    if policy.target is not None:
        return TARGETS[policy.target]
    backend = jax.default_backend()
    return TARGETS.get(backend, backend)


def backward_text(backward: Backward) -> str:
    """A derived backward, one line per operation, with the names of the textbook: ``dZ``, ``dX``, ``dW``, ``db``."""
    if backward.rewritten is None:
        return _whole_backward_text(backward)
    wanted = ["d" + backward.names[i] for i in backward.wanted]
    return "\n".join(
        [*_equation_lines(backward.rewritten.graph, backward.names, wanted), "return " + ", ".join(wanted)]
    )


def _equation_lines(graph: Graph, inputs: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """One line per operation of a program whose arguments and results have these names."""
    same = _reshapes(graph)
    names = dict(zip(graph.arguments, inputs, strict=True))
    for v, name in zip(graph.results, wanted, strict=True):
        names.setdefault(same.get(v, v), name)
    lines = []
    for k, i in enumerate(schedule(graph)):
        node = graph.nodes[i]
        if node.outputs[0] in same:
            continue
        dz = 1 if node.payload is not None else 0 if node.op.endswith("_grad") else None
        for j, v in enumerate(node.outputs):
            names.setdefault(v, "dZ" if j == dz else f"t{k}")
        inputs = ", ".join(names.get(same.get(v, v)) or str(graph.literal(v)) for v in node.inputs)
        outputs = ", ".join(names[v] for v in node.outputs)
        activation = node.payload.blob.unpack().get("activation") if node.payload is not None else None
        what = f"{node.op}[{activation}]" if activation is not None else node.op
        kernel = f"   kernel {_kernel_names(node.payload)}" if node.payload is not None else ""
        lines.append(f"{outputs} = {what}({inputs}): {type_text(graph.values[node.outputs[0]].aval)}{kernel}")
    return lines


def _whole_backward_text(backward: Backward) -> str:
    op = backward.op
    assert op is not None
    wanted = ["d" + backward.names[i] for i in backward.wanted]
    types = ", ".join(type_text(a) for a in op.out_avals)
    call = f"{op.semantic.name}({', '.join(backward.names)})"
    lines = [f"{', '.join(wanted)} = {call}: {types}   kernel {_kernel_names(op)}"]
    if is_left_to_xla(op):
        lines += [f"  {line}" for line in _equation_lines(normalize(build(op.steps[0].body)), backward.names, wanted)]
    return "\n".join([*lines, "return " + ", ".join(wanted)])


def _reshapes(graph: Graph) -> dict[int, int]:
    """Value -> the value it is a view of: reshapes, sums over dimensions of one, what a barrier or `late` passes on."""
    same: dict[int, int] = {}
    for i in schedule(graph):
        node = graph.nodes[i]
        if node.op in ("optimization_barrier", "late"):
            same.update((v, same.get(u, u)) for u, v in zip(node.inputs, node.outputs, strict=False))
        if node.op == "reshape" or (
            node.op == "reduce_sum" and _size(graph, node.inputs) == _size(graph, node.outputs)
        ):
            same[node.outputs[0]] = same.get(node.inputs[0], node.inputs[0])
    return same


def _size(graph: Graph, vids: Sequence[int]) -> int:
    return math.prod(graph.values[vids[0]].aval.shape)


def _kernel_names(op: FusedOp) -> str:
    return ", ".join(dict.fromkeys(name for _, name in op.choices)) or XLA
