"""The composite backward: derived from the steps of a fused operation, not written for it.

For ``Y = act(X W + b)``, with one shared ``dZ`` in the layout of ``Y``::

    dZ = dY * act'(.)      dX = dZ W^T      dW = X^T dZ      db = sum(dZ)

Each step contributes its own VJP: a product is linear in each operand, casts, layouts and biases are linear, an
activation multiplies by its derivative. The derivative is evaluated from the *residual*: the result Y where jax's own
formula is one of the output (relu, tanh, sigmoid), else the input Z, recomputing the rest (gelu, silu, elu, ...).
Formulas are jax's, step by step, so NaN and infinity appear where they do in the unfused gradient. Order of summation
over rows is the compiler's.

The derived backward is traced to a graph, matched, legalized and selected by the same engine as any program
(`composite`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from aicf_jax import _compat
from aicf_jax.memo import memo
from aicf_jax.ops import FusedOp, Step, nbytes
from aicf_jax.ops._product_gradient import one_operand, pulled_back
from aicf_jax.recompute import SMALLEST_BYTES, late


def save(op: FusedOp, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """``(results, saved)``: the results by the equations, and what the backward wants kept besides them."""
    if op.semantic.composite is not None:
        return op.semantic.composite.save(op, inputs)
    slots = op.evaluate(inputs)
    return [slots[s] for s in op.results], [] if op.residual is None else [slots[op.residual]]


@memo()
def saved_avals(op: FusedOp) -> tuple[Any, ...]:
    """Types of what the backward takes besides inputs and cotangents: for a composite also results."""
    if op.semantic.composite is None:
        return () if op.residual is None else (op.slot_avals[op.residual],)
    found = _compat.abstract_result(lambda *xs: save(op, xs), *op.in_avals)
    n = len(op.results)
    return tuple(kept(op, found[:n], found[n:]))


def kept_results(op: FusedOp) -> tuple[int, ...]:
    """Positions of the results that the backward takes."""
    composite = op.semantic.composite
    return composite.keeps(op) if composite is not None else ()


def kept(op: FusedOp, results: Sequence[Any], saved: Sequence[Any]) -> list[Any]:
    """What `fused_tangent` takes besides inputs and tangents, in the order of `saved_avals`."""
    return [*(results[k] for k in kept_results(op)), *saved]


def _run(step: Step, operands: Sequence[Any]) -> Any:
    (out,) = _compat.as_function(step.body)(*operands)
    return out


# -- derivative of a pointwise step ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class PointwiseGrad:
    """``(r, t) -> t * act'(r)``: cotangent and tangent rule of a pointwise step in one; static parameter of a node."""

    name: str
    body: Any
    from_output: bool
    alpha: float
    key: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PointwiseGrad) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return self.name

    def __call__(self, r: Any, t: Any) -> Any:
        """The cotangent: products associate as in a transposed program."""
        if self.from_output:
            return FROM_OUTPUT[self.name](r, t)
        return jax.vjp(self._function, r)[1](t)[0]

    def tangent(self, r: Any, t: Any) -> Any:
        """The tangent: products associate as in forward mode (3e38 * (t * 0) is not (3e38 * t) * 0)."""
        if self.from_output:
            return FROM_OUTPUT[self.name](r, t)
        return jax.jvp(self._function, (r,), (t,))[1]

    def _function(self, z: Any) -> Any:
        return _compat.as_function(self.body)(z)[0]


def _relu_grad(y: Any, t: Any) -> Any:
    return jax.lax.select(y > 0, t, jnp.zeros_like(t))


def _tanh_grad(y: Any, t: Any) -> Any:
    return (t + t * y) * (jnp.ones_like(y) - y)


def _sigmoid_grad(y: Any, t: Any) -> Any:
    return t * y * (jnp.ones_like(y) - y)


#: Derivatives as functions of the output, the formulas jax uses for these functions.
FROM_OUTPUT = {"relu": _relu_grad, "tanh": _tanh_grad, "sigmoid": _sigmoid_grad}


def pointwise_grad(op: FusedOp) -> PointwiseGrad | None:
    """The derivative of the operation's activation, None when it has none."""
    for k, step in enumerate(op.steps):
        if step.role == "pointwise":
            alpha = op.blob.unpack().get("alpha", 0.0)
            return PointwiseGrad(step.name, step.body, step.from_output, float(alpha), (op.key, k, op.blob))  # pyright: ignore[reportArgumentType]
    return None


activation_grad_p = _compat.new_primitive("activation_grad")
activation_grad_p.def_impl(lambda r, t, *, grad: _jitted_grad(grad)(r, t))
activation_grad_p.def_abstract_eval(lambda r, t, *, grad: _compat.abstract_result(grad, r, t)[0])
mlir.register_lowering(
    activation_grad_p, mlir.lower_fun(lambda r, t, *, grad: grad(*_recomputing(grad, r, t)), multiple_results=False)
)


def _recomputing(grad: PointwiseGrad, r: Any, t: Any) -> tuple[Any, Any]:
    """A derivative that starts from the activation's input computes the activation's inner values again."""
    return (r, t) if grad.from_output or nbytes(_compat.typeof(r)) < SMALLEST_BYTES else (late(r, t), t)


@memo(256)
def _jitted_grad(grad: PointwiseGrad) -> Any:
    return jax.jit(grad)


def _grad_jvp(primals: Any, tangents: Any, *, grad: PointwiseGrad) -> Any:
    return jax.jvp(grad, tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


def _grad_batch(args: Any, dims: Any, *, grad: PointwiseGrad) -> Any:
    return jax.vmap(grad, in_axes=tuple(dims))(*args), 0


def _grad_transpose(ct: Any, r: Any, t: Any, *, grad: PointwiseGrad) -> Any:
    """Element by element it is its own transpose."""
    return [None, ad.Zero(t.aval) if type(ct) is ad.Zero else activation_grad_p.bind(r, ct, grad=grad)]


ad.primitive_jvps[activation_grad_p] = _grad_jvp
ad.primitive_transposes[activation_grad_p] = _grad_transpose
batching.primitive_batchers[activation_grad_p] = _grad_batch


# -- tangent and cotangent of the composition -----------------------------------------------------------


def tangent(op: FusedOp, inputs: Sequence[Any], saved: Sequence[Any], tangents: dict[int, Any]) -> list[Any]:
    """Forward mode: the tangent of each result. Linear in `tangents`.

    Step by step from the residual, or that of the equations for an operation with a `Composite` or a general step.

    Args:
      op: the fused operation.
      inputs: the operation's inputs (values are read only where a product needs them).
      saved: what `kept` gave.
      tangents: input slot -> tangent; a missing slot has none.
    """
    if op.semantic.composite is not None or op.is_general:
        return _tangent_of_equations(op, inputs, tangents)
    residual = saved[0] if saved else None
    slots: dict[int, Any] = dict(tangents)
    n = len(op.in_avals)
    for k, step in enumerate(op.steps):
        terms = []
        if step.role == "bilinear":
            operands = [inputs[i] for i in step.operands]
            terms = [one_operand(step, operands, j)(slots[i]) for j, i in enumerate(step.operands) if i in slots]
        elif step.role == "pointwise":
            grad = pointwise_grad(op)
            terms = [grad.tangent(residual, slots[i]) for i in step.operands if grad is not None and i in slots]
        elif any(i in slots for i in step.operands):
            avals = [v.aval for v in step.body.invars]
            terms = [_run(step, [slots.get(i, _zeros(a)) for i, a in zip(step.operands, avals, strict=True)])]
        if terms:
            slots[n + k] = functools.reduce(jnp.add, terms)
    return [slots[s] if s in slots else _zeros(a) for s, a in zip(op.results, op.out_avals, strict=True)]


def _tangent_of_equations(op: FusedOp, inputs: Sequence[Any], tangents: dict[int, Any]) -> list[Any]:
    where = sorted(tangents)

    def f(*xs: Any) -> list[Any]:
        given = dict(zip(where, xs, strict=True))
        return list(op.reference(*[given.get(i, x) for i, x in enumerate(inputs)]))

    return jax.jvp(f, tuple(inputs[i] for i in where), tuple(tangents[i] for i in where))[1]


def _zeros(aval: Any) -> Any:
    return ad.instantiate_zeros(ad.Zero(aval))


def cotangent(
    op: FusedOp, inputs: Sequence[Any], saved: Sequence[Any], cts: Sequence[Any], wanted: Sequence[int]
) -> list[Any]:
    """Reverse mode: cotangents of the input slots in `wanted`, each intermediate cotangent computed once.

    `cts` has the cotangent of each result, None where it has none.
    """
    composite = op.semantic.composite
    if composite is not None:
        where = kept_results(op)
        known = dict(zip(where, saved, strict=False))
        results = [known.get(k) for k in range(len(op.results))]
        return composite.cotangent(op, inputs, results, saved[len(where) :], cts, wanted)
    if op.is_general:
        return _cotangent_of_equations(op, inputs, cts, wanted)
    residual = saved[0] if saved else None
    n, needed = len(op.in_avals), _depends_on(op, wanted)
    found: dict[int, Any] = {s: ct for s, ct in zip(op.results, cts, strict=True) if ct is not None}
    for k in reversed(range(len(op.steps))):
        step, out = op.steps[k], found.get(n + k)
        if out is None:
            continue
        for slot, term in _step_cotangents(op, step, inputs, residual, out, needed):
            found[slot] = term if slot not in found else found[slot] + term
    return [found[i] if i in found else _zeros(op.in_avals[i]) for i in wanted]


def _cotangent_of_equations(op: FusedOp, inputs: Sequence[Any], cts: Sequence[Any], wanted: Sequence[int]) -> list[Any]:
    def f(*xs: Any) -> list[Any]:
        given = dict(zip(wanted, xs, strict=True))
        results = op.reference(*[given.get(i, x) for i, x in enumerate(inputs)])
        return [y for y, ct in zip(results, cts, strict=True) if ct is not None]

    return list(jax.vjp(f, *(inputs[i] for i in wanted))[1]([ct for ct in cts if ct is not None]))


def _step_cotangents(
    op: FusedOp, step: Step, inputs: Sequence[Any], residual: Any, ct: Any, needed: set[int]
) -> list[tuple[int, Any]]:
    """``(slot, cotangent)`` of each needed operand of one step."""
    positions = [j for j, slot in enumerate(step.operands) if slot in needed]
    if step.role == "pointwise":
        return [(step.operands[0], activation_grad_p.bind(residual, ct, grad=pointwise_grad(op)))]
    if step.role == "linear":
        terms = jax.linear_transpose(lambda *xs: _run(step, xs), *(v.aval for v in step.body.invars))(ct)
        return [(step.operands[j], terms[j]) for j in positions]
    operands = [inputs[i] for i in step.operands]
    return [(step.operands[j], pulled_back(step, operands, j, ct)) for j in positions]


def reduced_to(x: Any, aval: Any) -> Any:
    """A cotangent of a value of type `aval`, summed over the manual axes that only the cotangent varies along."""
    extra = _compat.typeof(x).manual_axis_type.varying - aval.manual_axis_type.varying
    return jax.lax.psum(x, tuple(sorted(extra))) if extra else x


def _depends_on(op: FusedOp, wanted: Sequence[int]) -> set[int]:
    """Slots through which a wanted input reaches the result."""
    reached, n = set(wanted), len(op.in_avals)
    for k, step in enumerate(op.steps):
        if reached.intersection(step.operands):
            reached.add(n + k)
    return reached
