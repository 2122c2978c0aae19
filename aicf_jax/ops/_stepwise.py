"""A backward through all steps of an operation, each by its own equations' derivative.

For operations whose steps form more than a chain with one activation: gates, and affine functions with parameters of
their own. A few slots are kept; all others are computed again from the inputs and those.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import ad

from aicf_jax import _compat
from aicf_jax.ops._product_gradient import pulled_back
from aicf_jax.ops._semantic import Composite, FusedOp, Step

Kept = Callable[[FusedOp], Sequence[int]]


@dataclasses.dataclass(frozen=True)
class _Stepwise:
    """`Composite.save` and `Composite.cotangent` of operations that keep these slots."""

    kept: Kept

    def save(self, op: FusedOp, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        slots = op.evaluate(inputs)
        return [slots[s] for s in op.results], [slots[s] for s in self.kept(op)]

    def cotangent(
        self,
        op: FusedOp,
        inputs: Sequence[Any],
        results: Sequence[Any],
        saved: Sequence[Any],
        cts: Sequence[Any],
        wanted: Sequence[int],
    ) -> list[Any]:
        values = _Values(op, inputs, dict(zip((*self.kept(op), *op.results), (*saved, *results), strict=True)))
        return _cotangents(op, values, cts, wanted)


def stepwise(gradient: str, kept: Kept, names: tuple[str, ...]) -> Composite:
    """A `Composite` that keeps the slots `kept` gives, which prints call `names`."""
    steps = _Stepwise(kept)
    return Composite(steps.save, steps.cotangent, gradient, ("Y", *names))


def result_slots(op: FusedOp) -> list[range]:
    """The slots of each step's results."""
    found, free = [], len(op.in_avals)
    for step in op.steps:
        found.append(range(free, free + len(step.body.outvars)))
        free += len(step.body.outvars)
    return found


class _Values:
    """Values of slots, each computed once and when it is asked for."""

    def __init__(self, op: FusedOp, inputs: Sequence[Any], given: dict[int, Any]):
        self._known = {**dict(enumerate(inputs)), **given}
        self._step = {s: (step, slots) for step, slots in zip(op.steps, result_slots(op), strict=True) for s in slots}

    def __getitem__(self, slot: int) -> Any:
        if slot not in self._known:
            step, slots = self._step[slot]
            out = _compat.as_function(step.body)(*[self[i] for i in step.operands])
            self._known.update(zip(slots, out, strict=True))
        return self._known[slot]


def _cotangents(op: FusedOp, values: _Values, given: Sequence[Any], wanted: Sequence[int]) -> list[Any]:
    """Each intermediate cotangent computed once, from the last step to the first."""
    slots_of = result_slots(op)
    needed = set(wanted)
    for step, slots in zip(op.steps, slots_of, strict=True):
        if needed.intersection(step.operands):
            needed.update(slots)
    cts: dict[int, Any] = {s: ct for s, ct in zip(op.results, given, strict=True) if ct is not None}
    for step, slots in zip(reversed(op.steps), reversed(slots_of), strict=True):
        if not any(s in cts for s in slots):
            continue
        out = [cts[s] if s in cts else _zeros(v.aval) for s, v in zip(slots, step.body.outvars, strict=True)]
        for slot, term in _pulled_back(step, values, out, needed):
            cts[slot] = cts[slot] + term if slot in cts else term
    return [cts[i] if i in cts else _zeros(op.in_avals[i]) for i in wanted]


def _zeros(aval: Any) -> Any:
    return ad.instantiate_zeros(ad.Zero(aval))


def _pulled_back(step: Step, values: _Values, out: list[Any], needed: set[int]) -> list[tuple[int, Any]]:
    """``(slot, cotangent)`` of each needed operand of one step. What is linear is transposed, not evaluated."""
    places = [j for j, slot in enumerate(step.operands) if slot in needed]
    run = _compat.as_function(step.body)
    if step.role == "linear":
        avals = [v.aval for v in step.body.invars]
        terms = jax.linear_transpose(lambda *xs: run(*xs), *avals)(out)
        return [(step.operands[j], terms[j]) for j in places]
    operands: list[Any] = [values[s] for s in step.operands]
    if step.role == "bilinear":
        return [(step.operands[j], pulled_back(step, operands, j, out[0])) for j in places]

    def some(*xs: Any) -> Any:
        given = dict(zip(places, xs, strict=True))
        return run(*[given.get(k, o) for k, o in enumerate(operands)])

    terms = jax.vjp(some, *[operands[j] for j in places])[1](out)
    return list(zip([step.operands[j] for j in places], terms, strict=True))
