"""``Policy(verify=True)``: fused beside unfused, with a bound derived from the reduction length.

An operation of class ``reassociated`` sums the same products in another order. Two orders of a sum of n terms differ
by at most ``2 n u sum|terms|``, with u the unit roundoff of the accumulator, plus a rounding of each result to its
own dtype; sums one after the other add up their lengths. The sums of absolute values are bounded by the largest entry
of the result only up to cancellation, so the check is against the largest magnitude of the reference with a factor for
it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aicf_jax import _compat
from aicf_jax.errors import Comparison, VerificationError

#: Allows for cancellation: the sum of magnitudes may exceed the largest result by about this much.
_CANCELLATION = 16.0

_lock = threading.Lock()
#: What callbacks of the running program have seen. They run on threads of the runtime, so it belongs to the process.
_seen: list[Comparison] = []
_collecting = 0


def unit_roundoff(dtype: Any) -> float:
    """Half the distance from 1 to the next larger number of a float type; 0 for exact types."""
    return float(jnp.finfo(dtype).eps) / 2 if jnp.issubdtype(dtype, jnp.inexact) else 0.0


def bound(dtype: Any, length: int) -> float:
    """Largest accepted difference, relative to the largest magnitude: ``16 (2 n u_acc + u_out)``.

    Low-precision types accumulate in float32, so their own roundoff counts once.
    """
    accumulator = jnp.promote_types(dtype, jnp.float32)
    return _CANCELLATION * (2 * length * unit_roundoff(accumulator) + unit_roundoff(dtype))


def bound_of(op: Any) -> float:
    """`bound` of an operation: that of its least precise result."""
    return max(bound(a.dtype, summed(op)) for a in op.out_avals)


def summed(op: Any, backward: bool = False) -> int:
    """Terms of all sums of an operation, one after the other: what its products contract, what its reductions reduce.

    `backward`: and those of its derivative, where what was free is contracted and what was broadcast is summed.
    """
    return max(1, sum(_terms(step.body, backward) for step in op.steps))


def _terms(jaxpr: Any, backward: bool) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                opened = _compat.open_jaxpr(part)
                total += _terms(opened[0], backward) if opened is not None else 0
        sizes, results = ([math.prod(getattr(v.aval, "shape", ())) for v in vs] for vs in (eqn.invars, eqn.outvars))
        out = results[0] if results else 0
        variables = [n for v, n in zip(eqn.invars, sizes, strict=True) if not isinstance(v, _compat.Literal)]
        name = eqn.primitive.name
        if name == "dot_general":
            contracted = math.prod(eqn.invars[0].aval.shape[d] for d in eqn.params["dimension_numbers"][0][0])
            # Of [M, K] x [K, N] -> [M, N]: K terms each, and M and N in the two products of its derivative.
            total += contracted + (sum(out * contracted // max(1, n) for n in sizes) if backward else 0)
        elif name == "conv_general_dilated":
            total += sizes[1] + (out if backward else 0)
        elif name in ("reduce_sum", "reduce_prod"):
            total += sizes[0] // max(1, out)
        elif name == "cumsum":
            total += eqn.invars[0].aval.shape[eqn.params["axis"]]
        elif backward:
            # What an operand was stretched to is summed back to it.
            total += max((out // n for n in variables if 0 < n < out), default=0)
    return total


def reduction_length(op: Any) -> int:
    """More terms than any sum of an operation and its backward can have: the elements of its largest array."""
    sizes = [math.prod(a.shape) for a in (*op.in_avals, *op.out_avals)]
    return max(1, *sizes)


def difference(got: Any, want: Any) -> float:
    """Largest difference relative to the largest finite magnitude of `want`.

    Infinite when shape or dtype differ, or NaN and infinities are in other places.
    """
    a, b = (np.asarray(x) for x in (got, want))
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if not jnp.issubdtype(b.dtype, jnp.inexact):
        return 0.0 if np.array_equal(a, b) else math.inf
    wide = np.complex128 if jnp.issubdtype(b.dtype, jnp.complexfloating) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    finite = np.isfinite(b)
    if not np.array_equal(finite, np.isfinite(a)) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return math.inf
    if not finite.any():
        return 0.0
    scale = float(np.max(np.abs(b[finite])))
    worst = float(np.max(np.abs(a[finite] - b[finite])))
    return 0.0 if worst == 0 else worst / scale if scale else math.inf


def compare(op: str, what: str, site: str, limit: float, got: Sequence[Any], want: Sequence[Any]) -> Comparison:
    """The largest difference of some results from what they should be."""
    errors = [difference(a, b) for a, b in zip(got, want, strict=True)]
    worst = max(range(len(errors)), key=errors.__getitem__, default=0)
    return Comparison(op, what, worst, errors[worst] if errors else 0.0, limit, site)


def watch(what: str, op: Any, got: Sequence[Any], want: Sequence[Any], backward: bool = False) -> None:
    """Compares at run time, from inside a compiled program, and fails the run where results disagree."""
    limit = max(bound(a.dtype, summed(op, backward)) for a in want)

    def host(*values: Any) -> None:
        found = compare(op.semantic.name, what, op.site, limit, values[: len(got)], values[len(got) :])
        with _lock:
            _seen.append(found)
            quiet = _collecting > 0
        if not (found.agrees or quiet):
            raise VerificationError(found)

    jax.debug.callback(host, *got, *want)


def compared(plan: Any, values: Sequence[Any]) -> list[Any]:
    """The plan's results after comparing them with the unfused program's.

    Raises:
      VerificationError: an operation, or the program as a whole, disagrees; the operation comes first.
    """
    with _lock:
        _seen.clear()
    try:
        out = plan.compiled(*values)
        jax.block_until_ready(out)
        jax.effects_barrier()
    except Exception as error:
        wrong = next((c for c in _taken() if not c.agrees), None)
        if wrong is not None:
            raise VerificationError(wrong) from error
        raise
    whole = _whole(plan, out, values)
    if not whole.agrees:
        raise VerificationError(whole)
    return out


def measured(plan: Any, values: Sequence[Any]) -> tuple[Comparison, ...]:
    """Every comparison of one run, of operations first and of the program last; nothing is raised for a difference."""
    global _collecting
    with _lock:
        _seen.clear()
        _collecting += 1
    try:
        out = plan.compiled(*values)
        jax.block_until_ready(out)
        jax.effects_barrier()
    finally:
        with _lock:
            _collecting -= 1
    return (*_taken(), _whole(plan, out, values))


def _taken() -> list[Comparison]:
    with _lock:
        return list(_seen)


def _whole(plan: Any, out: Sequence[Any], values: Sequence[Any]) -> Comparison:
    """The program's results against the unfused program's."""
    fusions = plan.rewritten.fusions if plan.rewritten is not None else ()
    ops = ", ".join(sorted({f.op.semantic.name for f in fusions})) or "no fused operation"
    length = max((reduction_length(f.op) for f in fusions), default=1)
    found = [Comparison("program", f"the program ({ops})", 0, 0.0, bound(jnp.float32, length), "all of it")]
    for k, (a, b) in enumerate(zip(out, plan.reference(*values), strict=True) if fusions else ()):
        if not jnp.issubdtype(a.dtype, jax.dtypes.extended):
            found.append(Comparison("program", found[0].what, k, difference(a, b), bound(a.dtype, length), "all of it"))
    return max(found, key=lambda c: (not c.agrees, c.error))
