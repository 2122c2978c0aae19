"""The primitives that carry a fused operation through every JAX transformation.

- ``fused``: the operation. Lowers to the kernel chosen for the platform it is lowered to. Batching traces the batched
  equations and sends them through the engine again, so a batched fused operation is a fused operation where that is
  legal.
- ``fused_tangent``: its tangent, linear in the tangents. Forward mode evaluates it; its transpose is the composite
  backward.
- ``activation_grad`` (in `autodiff`): a pointwise derivative inside a composite backward.

An operation that is left to XLA on every platform is differentiated as its own equations plus ``fused_tangent``:
checkpoint policies then see the products they look for, and residuals are what `FusedOp.residual` says. One with a
kernel of its own is kept whole, and ``fused`` returns the residual as a further result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import jet
from jax.interpreters import ad, batching, mlir

from aicf_jax import _compat, autodiff, log, partition, verify
from aicf_jax.errors import FuseError
from aicf_jax.memo import memo
from aicf_jax.ops import FusedOp
from aicf_jax.policy import TARGETS
from aicf_jax.recompute import unordered
from aicf_jax.select import check_results, is_left_to_xla, kernel_for, results_of

fused_p = _compat.new_primitive("fused", multiple_results=True)
#: The same for an operation with a kernel that is split over devices by a rule of its own.
split_p = _compat.new_primitive("fused", multiple_results=True)
_compat.lowers_with_devices(split_p)
tangent_p = _compat.new_primitive("fused_tangent", multiple_results=True)


def bind(op: FusedOp, *inputs: Any) -> list[Any]:
    """The operation's results on these inputs, under whatever transformation is going on."""
    return primitive_of(op).bind(*inputs, op=op, residual=False)


def primitive_of(op: FusedOp) -> Any:
    """What stands for an operation in a program."""
    kernels = [kernel_for(op, platform) for platform, _ in op.choices]
    is_split = any(k is not None and k.partition is not None for k in kernels)
    is_placed = any(k is not None and k.with_devices for k in kernels)
    return split_p if is_placed or (is_split and _compat.has_devices()) else fused_p


def _results(op: FusedOp, inputs: Sequence[Any], residual: bool, platform: str | None) -> list[Any]:
    """Results, and the residual after them if asked for, by the platform's kernel or by the equations."""
    kernel = kernel_for(op, platform) if platform is not None else None
    if kernel is not None:
        try:
            saved: list[Any] | None = None
            if residual and kernel.save is not None:
                found, kept = kernel.save(op, *inputs)
                out, saved = list(found), list(kept)
            else:
                out = results_of(kernel, op, inputs)
            check_results(op, kernel, out)
        except Exception as error:
            if op.context.policy.on_failure == "raise":
                raise FuseError(f"kernel {kernel.name} failed on {op!r}: {type(error).__name__}: {error}") from error
            log.once(f"kernel {kernel.name} failed on {op!r}; left to XLA: {error}")
        else:
            if op.context.policy.verify:
                verify.watch(f"{op!r} by kernel {kernel.name}", op, out, op.reference(*inputs))
            if not residual:
                return out
            return [*out, *(_saved_beside(op, inputs, out) if saved is None else saved)]
    if not residual:
        return list(op.reference(*inputs))
    results, kept_values = autodiff.save(op, inputs)
    return [*results, *kept_values]


def _saved_beside(op: FusedOp, inputs: Sequence[Any], out: Sequence[Any]) -> list[Any]:
    """What the backward wants kept, for a kernel that does not return it: a result where it is one, else recomputed."""
    if op.residual is not None and op.residual in op.results:
        return [out[op.results.index(op.residual)]]
    return autodiff.save(op, inputs)[1]


def _has_residual(op: FusedOp, residual: bool) -> bool:
    return residual and (op.residual is not None or op.semantic.composite is not None)


@memo()
def _function(op: FusedOp, residual: bool, platform: str | None) -> Any:
    """One function object per operation, so that jax's own caches hit."""
    return lambda *inputs: _results(op, inputs, residual, platform)


@memo()
def _jitted(op: FusedOp, residual: bool) -> Any:
    return jax.jit(lambda *inputs: primitive_of(op).bind(*inputs, op=op, residual=residual))


def _abstract(*avals: Any, op: FusedOp, residual: bool) -> list[Any]:
    if tuple(avals) == op.in_avals and not _has_residual(op, residual):
        return list(op.out_avals)
    return _compat.abstract_result(_function(op, residual, None), *avals)


def _lowering(platform: str | None) -> Any:
    def lower(ctx: Any, *inputs: Any, op: FusedOp, residual: bool) -> Any:
        kernel = kernel_for(op, platform) if platform is not None else None
        if kernel is not None and kernel.opaque and _compat.is_split_by_xla(ctx):
            f = _on_parts(op, kernel, residual) or _function(op, residual, None)
        else:
            f = _function(op, residual, platform)
        return mlir.lower_fun(f, multiple_results=True)(ctx, *inputs)

    return lower


def _on_parts(op: FusedOp, kernel: Any, residual: bool) -> Any:
    """A kernel that XLA cannot split, split by its own rule; None where it has none, or for `Policy.verify`."""
    saving = residual and _has_residual(op, residual)
    if kernel.partition is None or (saving and kernel.save is None):
        return None
    if op.context.policy.verify or primitive_of(op) is fused_p:
        return None
    rule = kernel.partition(op, saving)
    if rule is None or callable(rule):
        return rule

    def on_a_part(*inputs: Any) -> list[Any]:
        if kernel.save is None or not saving:
            return results_of(kernel, op, inputs)
        out, saved = kernel.save(op, *inputs)
        return [*out, *saved]

    return partition.split(on_a_part, rule)


for _fused in (fused_p, split_p):
    _fused.def_impl(lambda *inputs, op, residual: _jitted(op, residual)(*inputs))
    _fused.def_abstract_eval(_abstract)
    mlir.register_lowering(_fused, _lowering(None))
    for _platform in sorted(set(TARGETS.values())):
        mlir.register_lowering(_fused, _lowering(_platform), platform=_platform)


def _batch(inputs: Sequence[Any], dims: Sequence[Any], *, op: FusedOp, residual: bool) -> Any:
    from aicf_jax.derived import batched_op, batched_program, batches_by_step

    batched = batched_op(op, tuple(dims), tuple(map(_compat.typeof, inputs))) if batches_by_step(op) else None
    # What is kept for the backward may depend on the shape of the result; it must be what was kept without a batch.
    if batched is not None and not (residual and len(autodiff.saved_avals(batched)) != len(autodiff.saved_avals(op))):
        moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(inputs, dims, strict=True)]
        out = primitive_of(batched).bind(*moved, op=batched, residual=residual)
        # What does not depend on a batched operand is not batched: the log-sum-exp where only V is.
        more = autodiff.saved_avals(op)[len(autodiff.kept_results(op)) :] if residual else ()
        before = [*op.out_avals, *more]
        return out, [0 if x.ndim > a.ndim else None for x, a in zip(out, before, strict=True)]
    out = batched_program(op, residual, tuple(dims), tuple(map(_compat.typeof, inputs)))(*inputs)
    return out, [0] * len(out)


# -- differentiation ------------------------------------------------------------------------------------


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, op: FusedOp, residual: bool) -> Any:
    if _is_differentiated_by_equations(op, residual):
        return _jvp_of_equations(_function(op, residual, None), primals, tangents)
    if is_left_to_xla(op):
        out, saved = autodiff.save(op, primals)
    else:
        found: Any = primitive_of(op).bind(*primals, op=op, residual=True)
        out, saved = found[: len(op.results)], found[len(op.results) :]
    saved = autodiff.kept(op, out, saved)
    present = tuple(type(t) is not ad.Zero for t in tangents)
    if not any(present):
        return out, [ad.Zero(_compat.typeof(x).to_tangent_aval()) for x in out]
    dots = [t for t in tangents if type(t) is not ad.Zero]
    return out, tangent_p.bind(*primals, *saved, *dots, op=op, present=present)


def _is_differentiated_by_equations(op: FusedOp, residual: bool) -> bool:
    """Second order through a residual, an operation of a backward, or one whose derived backward gains nothing."""
    composite = op.semantic.composite
    if residual or any(step.role in ("gradient", "opaque") for step in op.steps):
        return True
    if composite is None:
        return len(op.results) != 1 or (is_left_to_xla(op) and op.is_general)
    return is_left_to_xla(op) and not composite.lean(op)


def _jvp_of_equations(f: Any, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """Forward mode of a function, an input without a tangent being a constant of it: 0 times infinity would be NaN."""
    where = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    given = list(primals)

    def some(*xs: Any) -> Any:
        for i, x in zip(where, xs, strict=True):
            given[i] = x
        return f(*given)

    return jax.jvp(some, tuple(primals[i] for i in where), tuple(tangents[i] for i in where))


for _fused in (fused_p, split_p):
    batching.primitive_batchers[_fused] = _batch
    ad.primitive_jvps[_fused] = _jvp


def _split(args: Sequence[Any], op: FusedOp, present: Sequence[bool]) -> tuple[Any, Any, Any, list[int]]:
    """``(inputs, saved, tangents, slots of the tangents)`` of the arguments of ``fused_tangent``."""
    n, r = len(op.in_avals), len(autodiff.saved_avals(op))
    where = [i for i, p in enumerate(present) if p]
    return args[:n], args[n : n + r], args[n + r :], where


def _tangent(*args: Any, op: FusedOp, present: tuple[bool, ...]) -> list[Any]:
    inputs, saved, dots, where = _split(args, op, present)
    return autodiff.tangent(op, inputs, saved, dict(zip(where, dots, strict=True)))


def _tangent_transpose(cts: Sequence[Any], *args: Any, op: FusedOp, present: tuple[bool, ...]) -> list[Any]:
    inputs, saved, dots, where = _split(args, op, present)
    fixed = [None] * (len(args) - len(dots))
    given = tuple(type(ct) is not ad.Zero for ct in cts)
    if not any(given):
        return [*fixed, *(ad.Zero(d.aval) if ad.is_undefined_primal(d) else None for d in dots)]
    wanted = [i for i, d in zip(where, dots, strict=True) if ad.is_undefined_primal(d)]
    from aicf_jax.derived import backward_program

    values = backward_program(op, tuple(wanted), given)(
        inputs, saved, [ct for ct, g in zip(cts, given, strict=True) if g]
    )
    if op.context.policy.verify:
        expected = jax.vjp(op.reference, *inputs)[1](tuple(map(ad.instantiate_zeros, cts)))
        verify.watch(f"backward of {op!r}", op, values, [expected[i] for i in wanted], backward=True)
    # In a shard_map a composite's gradients vary wherever one of its inputs does.
    avals = {i: d.aval for i, d in zip(where, dots, strict=True) if ad.is_undefined_primal(d)}
    found = {i: autodiff.reduced_to(x, avals[i]) for i, x in zip(wanted, values, strict=True)}
    return [*fixed, *(found.get(i) for i in where)]


def _transpose(cts: Sequence[Any], *inputs: Any, op: FusedOp, residual: bool) -> list[Any]:
    """Transposes the equations: an operation without an activation is linear in its product's operands one by one."""
    where = [i for i, x in enumerate(inputs) if ad.is_undefined_primal(x)]
    given = list(inputs)
    op = dataclasses.replace(op, steps=tuple(dataclasses.replace(s, body=unordered(s.body)) for s in op.steps))

    def f(*xs: Any) -> list[Any]:
        for i, x in zip(where, xs, strict=True):
            given[i] = x
        return _results(op, given, residual, None)

    cts = [ad.instantiate_zeros(ct) for ct in cts]
    found = jax.linear_transpose(f, *(inputs[i].aval for i in where))(cts)
    out: list[Any] = [None] * len(inputs)
    for i, ct in zip(where, found, strict=True):
        out[i] = ct
    return out


for _fused in (fused_p, split_p):
    ad.primitive_transposes[_fused] = _transpose


def _tangent_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    f = functools.partial(_tangent, **params)
    return jax.jvp(f, tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


def _tangent_batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    out = jax.vmap(functools.partial(_tangent, **params), in_axes=tuple(dims))(*args)
    return out, [0] * len(out)


def _tangent_abstract(*avals: Any, op: FusedOp, present: tuple[bool, ...]) -> list[Any]:
    if avals[: len(op.in_avals)] == op.in_avals:
        return [a.to_tangent_aval() for a in op.out_avals]  # the common case: no need to trace the tangent for its type
    return _compat.abstract_result(functools.partial(_tangent, op=op, present=present), *avals)


@memo()
def _jitted_tangent(op: FusedOp, present: tuple[bool, ...]) -> Any:
    return jax.jit(functools.partial(_tangent, op=op, present=present))


tangent_p.def_impl(lambda *args, op, present: _jitted_tangent(op, present)(*args))
tangent_p.def_abstract_eval(_tangent_abstract)
mlir.register_lowering(tangent_p, mlir.lower_fun(_tangent, multiple_results=True))
ad.primitive_jvps[tangent_p] = _tangent_jvp
ad.primitive_transposes[tangent_p] = _tangent_transpose
batching.primitive_batchers[tangent_p] = _tangent_batch


# -- other interpreters ---------------------------------------------------------------------------------


def _equations(*avals: Any, op: FusedOp, residual: bool) -> Any:
    return _compat.trace(_function(op, residual, None), *avals)


def _tangent_equations(*avals: Any, **params: Any) -> Any:
    return _compat.trace(functools.partial(_tangent, **params), *avals)


def _jet(primals: Sequence[Any], series: Sequence[Any], *, op: FusedOp, residual: bool) -> Any:
    # Rules see Taylor coefficients; `jet` itself takes derivatives unless told otherwise.
    return jet.jet(_function(op, residual, None), tuple(primals), tuple(series), factorial_scaled=False)


for _fused in (fused_p, split_p):
    jet.jet_rules[_fused] = _jet
    _compat.register_checkify(_fused, _equations)
_compat.register_checkify(tangent_p, _tangent_equations)
_compat.register_checkify(
    autodiff.activation_grad_p, lambda r, t, *, grad: _compat.trace(lambda *xs: [grad(*xs)], r, t)
)
