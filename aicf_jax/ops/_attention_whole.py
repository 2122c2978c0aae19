"""Attention that XLA's CPU compiler makes one kernel of by itself, scores on chip only.

It does so with two products around a softmax, nothing masked or added: of matrices, heads in front, or as `einsum`
writes them for heads behind positions, where there is more than one batch and head; and where scores are as many as
`_LEAST_SCORES`. That kernel takes 0.5 to 0.9 of the time of loops on jax 0.12. With derivatives it keeps the weights,
and loops are the better.
"""

from __future__ import annotations

import math

from aicf_jax import _compat
from aicf_jax.memo import memo
from aicf_jax.ops._attention_composition import products, softmax_step
from aicf_jax.ops._semantic import FusedOp, Step

#: What may stand around products and softmax, with one array each, which keeps its number of elements.
_AROUND = frozenset(
    ("mul", "div", "convert_element_type", "transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim")
    + ("sqrt", "rsqrt", "pow")
)
#: What the softmax may be written with. It knows no choices, as that of a maximum that is not finite (logsumexp).
_SOFTMAX = frozenset(
    ("reduce_max", "max", "sub", "exp", "exp2", "log", "reduce_sum", "mul", "div", "stop_gradient")
    + ("convert_element_type", "broadcast_in_dim", "reshape", "expand_dims", "squeeze")
)
_DTYPES = ("float32", "bfloat16")

#: Fewer scores, or as many of one head, are written to memory.
_LEAST_SCORES = 2**22

#: ``(left, right)`` dimensions that are summed and those in front, from the end: Q and K, weights and V as matrices.
_MATRICES = (((-1,), (-1,)), ((-1,), (-2,)))
#: For heads behind positions: of Q and K, of V and the weights, of the weights and V.
_SCORES = (((3,), (3,)), ((0, 2), (0, 2)))
_VALUES = ((((1,), (3,)), ((0, 2), (0, 1))), (((3,), (1,)), ((0, 1), (0, 2))))


@memo()
def is_one_kernel_of_xla(op: FusedOp) -> bool:
    """Whether the equations of an operation are such attention, as they are written."""
    if not _compat.XLA_FUSES_ATTENTION or op.blob["keep"] != "all" or op.blob["permutation"] or op.blob["axis"] != -1:
        return False
    first, second = products(op)
    softmax, step = softmax_step(op)
    n, scores, values = len(op.in_avals), op.steps[first], op.steps[second]
    if any(eqn.primitive.name not in _SOFTMAX for eqn in step.body.eqns):
        return False
    if any(not _is_around(s) for k, s in enumerate(op.steps) if k not in (first, second, softmax)):
        return False
    shape = scores.body.outvars[0].aval.shape
    if math.prod(shape) + (math.prod(shape[:-2]) > 1) <= _LEAST_SCORES:
        return False
    weights = [_comes_from(op, s, n + softmax) for s in values.operands]
    if sum(weights) != 1 or not _comes_from(op, step.operands[0], n + first):
        return False
    as_matrices = _is_of_matrices(scores, _MATRICES) and weights[0] and _is_of_matrices(values, _MATRICES[1:])
    return as_matrices or (_numbers(scores) == _SCORES and _numbers(values) in _VALUES and _has_several(scores))


def _is_around(step: Step) -> bool:
    arrays = [v.aval for v in step.body.invars if v.aval.ndim]
    elements = math.prod(step.body.outvars[0].aval.shape)
    return step.name in _AROUND and (not arrays or [math.prod(a.shape) for a in arrays] == [elements])


def _numbers(product: Step) -> tuple[tuple[tuple[int, ...], ...], ...] | None:
    """The dimensions of a plain product of these types: pairs that are summed, and pairs in front; None: it is none."""
    (eqn, *more) = product.body.eqns
    if more or eqn.primitive.name != "dot_general" or list(eqn.invars) != list(product.body.invars):
        return None
    if any(str(v.aval.dtype) not in _DTYPES for v in eqn.invars):
        return None
    return tuple(tuple(map(tuple, sides)) for sides in eqn.params["dimension_numbers"])


def _is_of_matrices(product: Step, sums: tuple[tuple[tuple[int, ...], ...], ...]) -> bool:
    """Whether it is a product of matrices behind equal dimensions in front, summed over these, counted from the end."""
    numbers = _numbers(product)
    if numbers is None:
        return False
    (left, right), batch = numbers
    a, b = (v.aval.ndim for v in product.body.invars)
    front = tuple(range(a - 2))
    return batch == (front, front) and (tuple(d - a for d in left), tuple(d - b for d in right)) in sums


def _has_several(product: Step) -> bool:
    """Whether there is more than one of each dimension in front: XLA drops others, and does not know the rest."""
    aval = product.body.invars[0].aval
    return all(aval.shape[d] > 1 for d in product.body.eqns[0].params["dimension_numbers"][1][0])


def _comes_from(op: FusedOp, slot: int, source: int) -> bool:
    """Whether a value is made of another through what may stand around."""
    n = len(op.in_avals)
    while slot != source:
        if slot < n or op.steps[slot - n].name not in _AROUND:
            return False
        step = op.steps[slot - n]
        arrays = [s for s, v in zip(step.operands, step.body.invars, strict=True) if v.aval.ndim]
        if len(arrays) != 1:
            return False
        (slot,) = arrays
    return True
