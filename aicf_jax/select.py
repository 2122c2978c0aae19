"""Stage 6: from a fused operation to a kernel, for each platform the program may be lowered to.

A kernel is a candidate when the operation's requirements are a subset of its capabilities; candidates are ranked by
the bytes they move, or, where the policy has a map of the machine, by what bytes and launches take there. "Leave it to
XLA" is always a candidate, so fusing makes no program slower on purpose: it costs what the equations cost as written,
and wins when nothing is cheaper.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from aicf_jax import _compat, hardware, log, tuning
from aicf_jax.errors import FuseError, Refusal
from aicf_jax.kernels import XLA, Kernel
from aicf_jax.ops import FusedOp, nbytes
from aicf_jax.policy import GENERIC
from gpu_probe import units


@dataclasses.dataclass(frozen=True)
class Cost:
    """What an operation costs as written and as one kernel. Bytes between memory and chip, one launch per operation."""

    bytes_before: int
    bytes_after: int
    launches_before: int
    launches_after: int = 1


def cost_of(op: FusedOp) -> Cost:
    """The memory traffic of an operation, step by step and fused.

    As written every step reads its operands and writes its result; fused, inputs are read once and results written
    once. Casts and layout changes count as steps: on their own they read and write memory too. Of a norm and of what is
    derived as a whole there is no one step as written: there each equation counts.
    """
    avals = op.slot_avals
    before = launches = 0
    for step in op.steps:
        if step.role == "opaque":
            moved = [sum(nbytes(v.aval) for v in (*e.invars, *e.outvars)) for e in step.body.eqns]
        elif step.role == "norm":
            moved = _moved_by_equations(step.body)
        else:
            moved = [sum(nbytes(avals[i]) for i in step.operands) + sum(nbytes(v.aval) for v in step.body.outvars)]
        before += sum(moved)
        launches += len(moved)
    return Cost(before, op.outer_bytes(), launches)


def _moved_by_equations(body: Any) -> list[int]:
    """Bytes each equation reads and writes. Numbers cost nothing, and what was broadcast is read where it came from."""
    origin: dict[Any, Any] = {}
    moved = []
    for eqn in body.eqns:
        if eqn.primitive.name in ("broadcast_in_dim", "reshape", "squeeze", "expand_dims"):
            if not isinstance(eqn.invars[0], _compat.Literal):
                origin[eqn.outvars[0]] = origin.get(eqn.invars[0], eqn.invars[0])
        elif eqn.outvars[0].aval.ndim:
            read = [v for v in eqn.invars if not isinstance(v, _compat.Literal) and v.aval.ndim]
            moved.append(sum(nbytes(origin.get(v, v).aval) for v in (*read, *eqn.outvars)))
    return moved


def reported_cost(op: FusedOp, platform: str) -> Cost:
    """`cost_of`, where a kernel is chosen with what that moves and launches by its own account."""
    cost, kernel = cost_of(op), kernel_for(op, platform)
    if kernel is None:
        return cost
    moved = kernel.moved_bytes or kernel.cost_bytes
    after = moved(op) if moved is not None else cost.bytes_after
    return dataclasses.replace(cost, bytes_after=after, launches_after=kernel.launches_of(op))


def select(op: FusedOp, pattern: str) -> tuple[FusedOp, tuple[Refusal, ...]]:
    """`op` with its choice for each platform, and a refusal for each kernel that could not be taken."""
    refusals, choices = [], []
    for platform in op.context.policy.platforms():
        chosen, refused = _choose(op, pattern, platform)
        choices.append((platform, chosen))
        refusals += refused
    return op.with_choices(tuple(choices)), tuple(dict.fromkeys(refusals))


def _choose(op: FusedOp, pattern: str, platform: str) -> tuple[str, list[Refusal]]:
    """The best kernel for a platform: by measured time where it and the best so far have one, else by bytes."""
    candidates, refusals = _candidates(op, platform), _no_machine_named(op, pattern, platform)
    if not candidates:
        return XLA, refusals
    seconds = tuning.times(op, platform)
    best, best_cost = XLA, unfused_cost(op, platform)
    requirements = op.requirements()
    for kernel in candidates:
        refusal = refusal_of(kernel, op, pattern, requirements, platform)
        cost = kernel_cost(kernel, op, platform)
        if refusal is None and kernel.name in seconds and best in seconds:
            if seconds[kernel.name] >= seconds[best]:
                refusal = _measured_slower(kernel, op, pattern, seconds[kernel.name], best, seconds[best])
        elif refusal is None and cost.rank >= best_cost.rank:
            refusal = _slower(kernel, op, pattern, cost, best, best_cost)
        refusal = refusal or trial(kernel, op, pattern)
        if refusal is None:
            best, best_cost = kernel.name, cost
        else:
            refusals.append(refusal)
    return best, refusals


@dataclasses.dataclass(frozen=True)
class Ranked:
    """What one way to run an operation costs: bytes and launches, and their seconds where a map tells."""

    moved_bytes: int
    launches: int
    seconds: float | None

    @property
    def rank(self) -> float:
        """Less is better. All ways to run one operation on one platform have seconds, or none has."""
        return self.moved_bytes if self.seconds is None else self.seconds


def _ranked(op: FusedOp, platform: str, moved: int, launches: int) -> Ranked:
    found = op.context.policy.properties(platform)
    return Ranked(moved, launches, hardware.ranking_seconds(found, moved, launches))


def unfused_cost(op: FusedOp, platform: str) -> Ranked:
    """Of the operation left to XLA."""
    cost, unfused = cost_of(op), op.semantic.unfused_bytes
    moved = cost.bytes_before if unfused is None else unfused(op, platform)
    return _ranked(op, platform, moved, cost.launches_before)


def kernel_cost(kernel: Kernel, op: FusedOp, platform: str) -> Ranked:
    """Of the operation as a kernel runs it."""
    moved = kernel.cost_bytes(op) if kernel.cost_bytes else op.outer_bytes()
    return _ranked(op, platform, moved, kernel.launches_of(op))


def _candidates(op: FusedOp, platform: str) -> list[Kernel]:
    """Kernels of the operation for a platform. One for another machine is looked at only where a machine was named."""
    target = op.context.policy.target
    is_named = target is not None and target not in GENERIC
    return [
        k
        for k in op.context.kernels
        if k.op == op.semantic.name and platform in k.platforms and (is_named or k.is_for(target))
    ]


def _no_machine_named(op: FusedOp, pattern: str, platform: str) -> list[Refusal]:
    """One refusal for all kernels that are for some machines only, where a GPU was asked for without saying which."""
    target = op.context.policy.target
    if target is None or target not in GENERIC:
        return []
    of_op = (k for k in op.context.kernels if k.op == op.semantic.name and platform in k.platforms)
    machines = sorted({machine for k in of_op if not k.is_for(target) for machine in k.targets or ()})
    if not machines:
        return []
    detail = f"kernels for {op.semantic.name} on some machines only were not considered"
    expected = f"a target that names the machine, one of {', '.join(machines)}"
    return [Refusal(pattern, "select", "target", detail, expected, f"{target!r}, which names none", op.site)]


def refusal_of(
    kernel: Kernel, op: FusedOp, pattern: str, requirements: Mapping[str, Hashable], platform: str | None = None
) -> Refusal | None:
    """Why a kernel may not run an operation, whatever it costs; None when it may.

    What it needs of the machine is asked where a platform is given and the policy has a map for it.
    """
    policy = op.context.policy

    def refuse(code: str, expected: str, found: str) -> Refusal:
        detail = f"kernel {kernel.name} cannot take this {op.semantic.name}: {found}"
        return Refusal(pattern, "select", code, detail, expected, found, op.site, kernel.name)

    if not kernel.is_for(policy.target):
        return refuse("target", f"one of the machines {', '.join(kernel.targets or ())}", str(policy.target))
    unmet = kernel.unmet(requirements)
    if unmet:
        expected = [
            f"{name} in {_listed(kernel.capabilities[name])}" if name in kernel.capabilities else f"{name} declared"
            for name in unmet
        ]
        return refuse("capability", "; ".join(expected), "; ".join(f"{k}={v!r}" for k, v in unmet.items()))
    if policy.deterministic and not kernel.deterministic:
        return refuse("deterministic", "a deterministic kernel", f"{kernel.name} is not")
    if not policy.allows(kernel.numerics):
        return refuse("numerics", f"numerics class {policy.numerics} or stricter", f"class {kernel.numerics}")
    unmet_need = _unmet_need(kernel, op, platform)
    if unmet_need is not None:
        return refuse("hardware", *unmet_need)
    missing = kernel.available() if kernel.available is not None else None
    return None if missing is None else refuse("environment", *missing)


def _unmet_need(kernel: Kernel, op: FusedOp, platform: str | None) -> tuple[str, str] | None:
    found = op.context.policy.properties(platform) if platform is not None else None
    if found is None or kernel.needs is None:
        return None
    return next((unmet for need in kernel.needs(op) if (unmet := need.unmet(found)) is not None), None)


def _slower(kernel: Kernel, op: FusedOp, pattern: str, cost: Ranked, best: str, best_cost: Ranked) -> Refusal:
    if cost.seconds is None or best_cost.seconds is None:
        detail = f"kernel {kernel.name} would move no fewer bytes than {best}"
        expected = f"fewer than {best_cost.moved_bytes} bytes, as {best} moves"
        return Refusal(pattern, "select", "no_gain", detail, expected, str(cost.moved_bytes), op.site, kernel.name)
    detail = f"kernel {kernel.name} would take no less than {best} on the machine of the property map"
    expected = f"less than {units.text(best_cost.seconds, 's')} for {best_cost.moved_bytes} bytes, as {best} takes"
    found = f"{units.text(cost.seconds, 's')} for {cost.moved_bytes} bytes"
    return Refusal(pattern, "select", "no_gain", detail, expected, found, op.site, kernel.name)


def _measured_slower(kernel: Kernel, op: FusedOp, pattern: str, took: float, best: str, best_took: float) -> Refusal:
    detail = f"kernel {kernel.name} was measured to be no faster than {best}"
    return Refusal(
        pattern,
        "select",
        "slower",
        detail,
        f"less than {best_took * 1e3:.3f} ms, as {best} takes",
        f"{took * 1e3:.3f} ms",
        op.site,
        kernel.name,
    )


def trial(kernel: Kernel, op: FusedOp, pattern: str) -> Refusal | None:
    """A refusal when the kernel cannot even be traced on the operation's types, or gives results of other types.

    Raises FuseError instead under ``on_failure="raise"``.
    """
    try:
        check_results(
            op,
            kernel,
            _compat.abstract_result(lambda *xs: results_of(kernel, op, xs), *map(_compat.plain_aval, op.in_avals)),
        )
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        if op.context.policy.on_failure == "raise":
            raise FuseError(f"kernel {kernel.name} failed on {op!r}, at {op.site}: {found}") from error
        log.once(f"kernel {kernel.name} failed on {op!r}, which is left to other kernels: {found}")
        detail = f"kernel {kernel.name} failed while it was tried on this {op.semantic.name}"
        return Refusal(
            pattern, "select", "kernel_failed", detail, "a kernel that can be traced", found, op.site, kernel.name
        )
    return None


def results_of(kernel: Kernel, op: FusedOp, inputs: Sequence[Any]) -> list[Any]:
    """What a kernel returns. Raises TypeError unless that is a tuple: an array would pass for one, row by row."""
    out = kernel.run(op, *inputs)
    if not isinstance(out, tuple | list):
        expected = f"a tuple with one array for each of {len(op.results)} result(s)"
        raise TypeError(f"kernel {kernel.name}: expected {expected}, found {type(out).__name__}; return (y,)")
    return list(out)


def check_results(op: FusedOp, kernel: Kernel, out: Sequence[Any]) -> None:
    """Raises TypeError unless a kernel's results have the operation's shapes and dtypes."""
    want, got = ([(tuple(a.shape), str(a.dtype)) for a in avals] for avals in (op.out_avals, out))
    if want != got:
        raise TypeError(f"kernel {kernel.name}: expected results {want}, found {got}")


def _listed(values: Any) -> str:
    try:
        return "{" + ", ".join(sorted(map(repr, values))) + "}"
    except TypeError:
        return repr(values)


def kernel_for(op: FusedOp, platform: str) -> Kernel | None:
    """The chosen kernel, None where the operation is left to XLA."""
    name = dict(op.choices).get(platform, XLA)
    return next((k for k in op.context.kernels if k.name == name), None)


def is_left_to_xla(op: FusedOp) -> bool:
    """Whether no platform has a kernel of its own, so that the operation may be evaluated as its equations."""
    return all(name == XLA for _, name in op.choices)
