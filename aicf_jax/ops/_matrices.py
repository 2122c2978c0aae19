"""Arrays of an operation as matrices: what their dimensions come to when those of one role are grouped."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from aicf_jax.ops._semantic import FusedOp


@dataclasses.dataclass(frozen=True)
class Matrices:
    """``[batch, m, k] @ [batch, k, n]``; `batch` is None without one.

    Attributes:
      trans_a, trans_b: the left operand is stored ``[k, m]``, the right one ``[n, k]``.
      bias: ``"none"``, ``"vector"`` (an element for each column, or for each row), or ``"other"``.
      bias_dtype: its type, ``"none"`` without one.
    """

    batch: int | None
    m: int
    n: int
    k: int
    trans_a: bool
    trans_b: bool
    bias: str
    bias_dtype: str

    @property
    def contiguous(self) -> int:
        """The largest power of two, up to 64, that divides the last dimensions of both operands and the result."""
        return multiple(self.m if self.trans_a else self.k, self.k if self.trans_b else self.n, self.n)

    @property
    def strided(self) -> int:
        """The same for the dimensions before them."""
        return multiple(self.k if self.trans_a else self.m, self.n if self.trans_b else self.k, self.m)


def multiple(*lengths: int) -> int:
    """The largest power of two, up to 64, that divides all of these."""
    found = math.gcd(64, *lengths)
    return found & -found


def matrices(op: FusedOp) -> Matrices | None:
    """The product of a fused operation, None where grouping its dimensions would move data, or there is no data."""
    return part_of(op, *(v.aval for v in op.steps[0].body.invars))


def part_of(op: FusedOp, a: Any, b: Any) -> Matrices | None:
    """The product of parts of its operands."""
    (a_contract, b_contract), (a_batch, b_batch) = op.steps[0].body.eqns[0].params["dimension_numbers"]
    batch = len(a_batch)
    if tuple(a_batch) != tuple(range(batch)) or tuple(b_batch) != tuple(range(batch)):
        return None
    trans_a = is_contracted_first(a, a_contract, batch)
    b_first = is_contracted_first(b, b_contract, batch)
    if trans_a is None or b_first is None or 0 in (*a.shape, *b.shape):
        return None
    k = math.prod(a.shape[d] for d in a_contract)
    size = math.prod(a.shape[:batch])
    m, n = (math.prod(x.shape) // (size * k) for x in (a, b))
    slot = bias_slot(op)
    dtype = "none" if slot is None else str(op.slot_avals[slot].dtype)
    return Matrices(size if batch else None, m, n, k, trans_a, not b_first, _bias(op, m, n), dtype)


def is_contracted_first(aval: Any, contract: tuple[int, ...], batch: int) -> bool | None:
    """Whether the contracted dimensions come before the free ones; None where they are mixed or in another order."""
    count = len(contract)
    if tuple(contract) == tuple(range(aval.ndim - count, aval.ndim)):
        return False
    return True if tuple(contract) == tuple(range(batch, batch + count)) else None


def named(op: FusedOp) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Dimensions of both operands by what they are: ``b0 ...`` batch, ``m0`` rows, ``n0`` columns, ``k0`` depth."""
    contracted, batch = op.steps[0].body.eqns[0].params["dimension_numbers"]

    def names(operand: int, free: str) -> tuple[str, ...]:
        known = {d: f"b{i}" for i, d in enumerate(batch[operand])}
        known |= {d: f"k{i}" for i, d in enumerate(contracted[operand])}
        left = (d for d in range(op.steps[0].body.invars[operand].aval.ndim) if d not in known)
        known |= {d: f"{free}{i}" for i, d in enumerate(left)}
        return tuple(known[d] for d in sorted(known))

    return names(0, "m"), names(1, "n")


def result_shape(op: FusedOp, a: Any, b: Any) -> tuple[int, ...]:
    """The shape of the product of parts of its operands."""
    left, right = (dict(zip(names, x.shape, strict=True)) for names, x in zip(named(op), (a, b), strict=True))
    batch, m = ([n for name, n in left.items() if name[0] == kind] for kind in "bm")
    return (*batch, *m, *(n for name, n in right.items() if name[0] == "n"))


def bias_slot(op: FusedOp) -> int | None:
    """The slot of the bias, None without one."""
    return next((step.operands[1] for step in op.steps if step.name == "bias_add"), None)


def _bias(op: FusedOp, m: int, n: int) -> str:
    slot = bias_slot(op)
    if slot is None:
        return "none"
    if slot >= len(op.in_avals):
        return "other"
    body = next(step.body for step in op.steps if step.name == "bias_add")
    placed = [e.params["broadcast_dimensions"] for e in body.eqns if e.primitive.name == "broadcast_in_dim"]
    in_order = all(list(dims) == sorted(dims) for dims in placed)
    size = math.prod(op.in_avals[slot].shape)
    return "vector" if in_order and size == (n if op.blob.unpack()["bias_along"] == "n" else m) else "other"


@dataclasses.dataclass(frozen=True)
class Rows:
    """A gradient ``[m, n]`` that is summed over its rows, as one operation.

    Attributes:
      steps: names of its steps.
      results: name of the step that makes each of its results.
      residual_dtype, sum_dtype: types of the residual and of the sum.
    """

    m: int
    n: int
    steps: tuple[str, ...]
    results: tuple[str, ...]
    residual_dtype: str
    sum_dtype: str


def summed_axes(op: FusedOp) -> tuple[int, ...]:
    """The dimensions that the gradient of the bias sums over."""
    return tuple(d for d in range(op.blob["ndim"]) if op.blob["summed"] >> d & 1)


def rows(op: FusedOp) -> Rows | None:
    """The matrix of an activation's gradient with its sum, None where other than leading dimensions are summed."""
    axes, shape = summed_axes(op), op.in_avals[-1].shape
    if axes != tuple(range(len(axes))) or 0 in shape or op.blob["ndim"] != len(shape):
        return None
    made_by = {len(op.in_avals) + k: step.name for k, step in enumerate(op.steps)}
    return Rows(
        math.prod(shape[: len(axes)]),
        math.prod(shape[len(axes) :]),
        tuple(step.name for step in op.steps),
        tuple(made_by[s] for s in op.results),
        str(op.slot_avals[op.steps[0].operands[0]].dtype),
        str(op.out_avals[0].dtype),
    )
