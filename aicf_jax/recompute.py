"""Recomputation that stays one.

A backward that computes something again, from the little that is kept, keeps it after all when the compiler sees that
the forward computed the same: then the value lives from the one to the other. `jax.checkpoint` meets the same trouble
with the same means.

A barrier orders nothing once a compiler has removed it, and XLA's for CPUs removes it before it orders a program: what
the forward knows all about may then be computed early, and kept. `late` is for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from aicf_jax import _compat
from mcir.operations import never

#: A smaller array stays in a cache whatever is done, and launching what computes it again costs more than keeping it.
SMALLEST_BYTES = 1 << 20


def recomputed(values: Any) -> Any:
    """The same arrays (any tree), such that what is computed from them is not merged with what was computed before."""
    return jax.lax.optimization_barrier(values)


def late(x: Any, after: Any) -> Any:
    """`x`, which a compiler cannot have before `after`: nor, then, what is computed from it."""
    return late_p.bind(x, after) if after.size else x


def unordered(jaxpr: Any) -> Any:
    """The program without barriers and waiting, for a transpose: what waits for a cotangent would look linear in it."""
    known: dict[Any, Any] = {}

    def source(v: Any) -> Any:
        return v if isinstance(v, _compat.Literal) else known.get(v, v)

    eqns = []
    for eqn in jaxpr.eqns:
        operands = [source(v) for v in eqn.invars]
        if eqn.primitive in (late_p, jax.lax.optimization_barrier_p):
            known.update(zip(eqn.outvars, operands, strict=False))
        else:
            eqns.append(eqn.replace(invars=operands))
    return jaxpr.replace(eqns=eqns, outvars=[source(v) for v in jaxpr.outvars])


def _by_barrier(x: Any, after: Any) -> Any:
    return recomputed((x, after))[0]


def _by_select(x: Any, after: Any) -> Any:
    return jnp.where(never(after), jnp.zeros_like(x), x)


def _lower_on_cpu(ctx: Any, *args: Any) -> Any:
    # Among several devices one of them has the number that is asked for, and would have to send it to the others.
    f = _by_barrier if _compat.is_split_by_xla(ctx) else _by_select
    return mlir.lower_fun(f, multiple_results=False)(ctx, *args)


def _late_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    return late_p.bind(*primals), tangents[0]


def _late_transpose(ct: Any, x: Any, after: Any) -> Any:
    return [ct if ad.is_undefined_primal(x) else None, None]


late_p = _compat.new_primitive("late")
late_p.def_impl(lambda x, after: x)
late_p.def_abstract_eval(lambda x, after: x)
mlir.register_lowering(late_p, mlir.lower_fun(_by_barrier, multiple_results=False))
mlir.register_lowering(late_p, _lower_on_cpu, platform="cpu")
ad.primitive_jvps[late_p] = _late_jvp
ad.primitive_transposes[late_p] = _late_transpose
batching.primitive_batchers[late_p] = lambda args, dims: (late_p.bind(*args), dims[0])
