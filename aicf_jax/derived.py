"""Operations and programs made from operations: under ``vmap``, and backward. What the primitives ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from aicf_jax import _compat, autodiff, primitives
from aicf_jax.engine import Engine, Rewritten, selected
from aicf_jax.memo import memo
from aicf_jax.ops import OPS, FusedOp, Step
from aicf_jax.rewrite import step_key
from aicf_jax.select import is_left_to_xla


@memo()
def batched_program(op: FusedOp, residual: bool, dims: tuple[Any, ...], avals: tuple[Any, ...]) -> Any:
    """The equations of an operation under ``vmap``, sent through the engine again."""
    f = jax.vmap(lambda *xs: primitives._results(op, xs, residual, None), in_axes=dims)
    jaxpr = _compat.trace(f, *avals)
    return _compat.as_function(Engine(op.context).rewrite(jaxpr).jaxpr)


def batches_by_step(op: FusedOp) -> bool:
    """Whether `batched_op` is right: for what is derived as a whole, if its steps tell which dimension is which."""
    composite = op.semantic.composite
    return op.steps[0].role == "opaque" or (composite is not None and composite.side_by_side(op) is not None)


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
    composite = op.semantic.composite
    aligned = (composite.side_by_side(op) if composite is not None else None) or frozenset()
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
        """The slot of an operand with all its dimensions, for one that is read beside others."""
        wide = Step("linear", "broadcast", None, (slot,))
        add(wide, lambda x: [jnp.broadcast_to(x, shape if batched[slot] else (length, *shape))], (slot,))
        batched[-1] = True
        return len(slots) - 1

    for k, step in enumerate(op.steps):
        operands = tuple(place[s] for s in step.operands)
        if k in aligned and len(operands) > 1 and any(batched[s] for s in operands):
            operands = tuple(whole(s, v.aval.shape) for s, v in zip(operands, step.body.invars, strict=True))
        add(step, _compat.as_function(step.body), operands)
        place += range(len(slots) - len(step.body.outvars), len(slots))
    results = tuple(place[s] for s in op.results)
    new = dataclasses.replace(
        op, steps=tuple(steps), results=results, in_avals=in_avals, key=step_key(steps), choices=(),
        gradient_of=_batched_origin(op, dims, avals),
    )  # fmt: skip
    return selected(new, op.pattern)[0]


def _batched_origin(op: FusedOp, dims: tuple[Any, ...], avals: tuple[Any, ...]) -> Any:
    """What a batched backward is the backward of; None where only some of its inputs are batched."""
    if op.gradient_of is None or None in dims:
        return None
    origin, wanted = op.gradient_of
    n = len(origin.in_avals)
    return (batched_op(origin, dims[:n], avals[:n]), wanted) if batches_by_step(origin) else None


@dataclasses.dataclass(frozen=True, eq=False)
class Backward:
    """A derived backward: the program that computes the wanted cotangents, and its graph after the engine.

    `op` is the one operation it is, for a backward that is derived as a whole.
    """

    rewritten: Rewritten | None
    names: tuple[str, ...]
    wanted: tuple[int, ...]
    op: FusedOp | None = None

    def __call__(self, inputs: Sequence[Any], saved: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
        if self.op is not None:
            return primitives.bind(self.op, *inputs, *saved, *cts)
        assert self.rewritten is not None
        return _compat.as_function(self.rewritten.jaxpr)(*inputs, *saved, *cts)


@memo()
def backward_program(op: FusedOp, wanted: tuple[int, ...], given: tuple[bool, ...] | None = None) -> Backward:
    """The composite backward of an operation for some of its inputs, matched and selected like any program.

    `given`: which results have a cotangent; all of them unless told otherwise.
    """
    given = given or (True,) * len(op.results)
    saved = autodiff.saved_avals(op)
    n, m = len(op.in_avals), len(op.in_avals) + len(saved)

    def f(*args: Any) -> list[Any]:
        rest = iter(args[m:])
        return autodiff.cotangent(op, args[:n], args[n:m], [next(rest) if g else None for g in given], wanted)

    avals = (*op.in_avals, *saved, *(a for a, g in zip(op.out_avals, given, strict=True) if g))
    jaxpr = _compat.trace(f, *avals)
    composite = op.semantic.composite
    outer = _cotangent_names(op, given)
    if composite is not None:
        names = (*_input_names(op), *composite.names_of(op), *outer)
        return Backward(None, names, wanted, _gradient_op(op, jaxpr, avals, names, wanted))
    engine = Engine(op.context)
    done = engine.rewrite(jaxpr)
    if all(is_left_to_xla(fusion.op) for fusion in done.fusions):
        # Nothing gained by an operation that stands for its own equations: keep them visible to further
        # transformations.
        done = dataclasses.replace(done, jaxpr=jaxpr)
    residual_name = () if not saved else ("Y",) if op.residual in op.results else ("Z",)
    return Backward(done, (*_input_names(op), *residual_name, *outer), wanted)


def _gradient_op(
    op: FusedOp, jaxpr: Any, avals: tuple[Any, ...], names: tuple[str, ...], wanted: tuple[int, ...]
) -> FusedOp:
    """A backward as one operation, with kernels of its own. Where none is chosen its equations run."""
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
        gradient_of=(op, wanted),
    )
    return selected(new, op.pattern)[0]


def _cotangent_names(op: FusedOp, given: Sequence[bool]) -> list[str]:
    """``dY``, and for further results what they are called where they are kept."""
    composite = op.semantic.composite
    names = composite.names_of(op) if composite is not None else ()
    known = dict(zip(autodiff.kept_results(op), names, strict=False))
    return ["dY" if not k else "d" + known.get(k, f"Y{k}") for k, g in enumerate(given) if g]


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
