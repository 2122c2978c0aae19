"""Stage 1, first half: from a jaxpr to a flat list of equations.

Library functions such as `jax.nn.gelu` arrive as small inner jits. They hide what an operation means, so plain, pure
and small ones are *seen through*: their equations join the list, each remembering the call it came from. The call
itself is not lost: whatever is not fused across its border is later emitted as the call it was (`plan.linearize`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from aicf_jax import _compat
from aicf_jax.flags import PRIMITIVE_FLAGS, OpFlags

#: An inner jit with more equations than this is a program of its own: it is entered, not seen through.
TRANSPARENT_EQUATIONS = 24


@dataclasses.dataclass(frozen=True)
class FlatEquation:
    """One equation of the flat program. `top` is the position of the program's own equation it stems from."""

    eqn: Any
    top: int


def flatten(eqns: Sequence[Any]) -> list[FlatEquation]:
    """The equations of a program with its transparent calls replaced by their bodies, variables renamed apart."""
    flat = []
    for top, eqn in enumerate(eqns):
        if is_transparent(eqn):
            flat.extend(FlatEquation(inner, top) for inner in _inlined(eqn))
        else:
            flat.append(FlatEquation(eqn, top))
    return flat


def is_transparent(eqn: Any) -> bool:
    """Whether an equation is a call that may be seen through."""
    return 0 <= _size(eqn, TRANSPARENT_EQUATIONS) <= TRANSPARENT_EQUATIONS and is_call(eqn)


def is_call(eqn: Any) -> bool:
    """Whether an equation is an inner jit."""
    return eqn.primitive.name in _compat.JIT_NAMES


def _size(eqn: Any, limit: int) -> int:
    """Equations after seeing through, more than `limit` (or -1) when it is not allowed."""
    if not is_call(eqn):
        opaque = PRIMITIVE_FLAGS.get(eqn.primitive.name, OpFlags.NONE) & OpFlags.IS_CONTROL_FLOW
        return -1 if opaque or eqn.effects else 1
    body, consts = _compat.open_jaxpr(eqn.params["jaxpr"])  # pyright: ignore[reportGeneralTypeIssues]
    if consts or body.constvars or len(body.eqns) > limit or not _compat.is_plain_jit(eqn.params):
        return -1
    # A result that is a parameter, a literal or another result has no equation whose output could be renamed to it.
    locals_ = {v for e in body.eqns for v in e.outvars}
    if len({v for v in body.outvars if not isinstance(v, _compat.Literal)} & locals_) != len(body.outvars):
        return -1
    total = 0
    for inner in body.eqns:
        n = _size(inner, limit - total)
        if n < 0 or total + n > limit:
            return -1
        total += n
    return total


def _inlined(call: Any) -> Iterator[Any]:
    """The body of a call with its variables replaced: parameters by arguments, results by the call's results."""
    body, _ = _compat.open_jaxpr(call.params["jaxpr"])  # pyright: ignore[reportGeneralTypeIssues]
    new = dict(zip(body.invars, call.invars, strict=True))
    new.update(zip(body.outvars, call.outvars, strict=True))

    def rename(v: Any) -> Any:
        if isinstance(v, (_compat.Literal, _compat.DropVar)):
            return v
        if v not in new:
            new[v] = _compat.new_var(v.aval)
        return new[v]

    for eqn in body.eqns:
        renamed = eqn.replace(
            invars=[rename(v) for v in eqn.invars],
            outvars=[rename(v) for v in eqn.outvars],
            source_info=call.source_info,
        )
        if is_call(eqn):
            yield from _inlined(renamed)
        else:
            yield renamed
