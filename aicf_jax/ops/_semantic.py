"""`SemanticOp`, the kind of a fused operation, and `FusedOp`, one instance of it in a program."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from aicf_jax import _compat
from aicf_jax.attrs import AttrBlob, Schema
from aicf_jax.errors import Refusal
from aicf_jax.policy import NUMERICS


def nbytes(aval: Any) -> int:
    """Bytes of one array of this type."""
    return math.prod(aval.shape) * aval.dtype.itemsize


def _no_check(match: Any) -> Refusal | None:
    return None


def _nothing(op: Any) -> frozenset[int]:
    return frozenset()


def _never(op: Any) -> bool:
    return False


def _all_results(op: Any) -> tuple[int, ...]:
    return tuple(range(len(op.results)))


def _no_extension(match: Any) -> Any:
    return match


@dataclasses.dataclass(frozen=True)
class Composite:
    """How an operation is differentiated as a whole, where its steps one by one would keep too much.

    Attributes:
      save: ``(op, inputs) -> (results, saved)``, plain JAX: the results as the equations give them, and what the
        backward wants kept.
      cotangent: ``(op, inputs, results, saved, cts, wanted) -> cotangents`` of the inputs in `wanted`, plain JAX built
        from the equations' own derivatives. `cts` has the cotangent of each result, None where it has none; of
        `results` those in `keeps` are there.
      gradient: name of the operation that this backward is.
      names: of the kept results and the saved values, in prints; or `FusedOp` -> names.
      apart: an array that enters several products (x as queries, keys and values) is an input for each of them.
      side_by_side: `FusedOp` -> positions of the steps whose operands are read element beside element, so that batching
        one means batching all; None where batching step by step could not tell which dimension is which.
      keeps: `FusedOp` -> positions of the results that `cotangent` reads.
      lean: `FusedOp` -> whether it keeps so much less than the equations' own derivatives that it is taken where the
        operation is left to XLA too.
    """

    save: Callable[..., tuple[list[Any], list[Any]]]
    cotangent: Callable[..., list[Any]]
    gradient: str
    names: tuple[str, ...] | Callable[[Any], tuple[str, ...]]
    side_by_side: Callable[[Any], frozenset[int] | None] = _nothing
    keeps: Callable[[Any], tuple[int, ...]] = _all_results
    apart: bool = False
    lean: Callable[[Any], bool] = _never

    def names_of(self, op: Any) -> tuple[str, ...]:
        """What `cotangent` takes besides inputs and cotangents, in prints."""
        return self.names(op) if callable(self.names) else self.names


@dataclasses.dataclass(frozen=True)
class SemanticOp:
    """What a family of rewrites produces.

    Attributes:
      name: as in reports and in ``Report.count``.
      schema: layout of its `AttrBlob`.
      attributes: match -> attribute values, one for each field of the schema.
      check: match -> `Refusal` or None; the legality rules only this operation knows.
      requirements: `FusedOp` -> what a kernel must be capable of.
      numerics: the class of the rewrite, see `Policy`.
      names: ``(role, operand, name)``: what prints of the backward call the input that a step of this role reads as
        this operand; or `FusedOp` -> names by input slot.
      extend: match -> match that also takes in what is cheaper to compute again than to read (`Match.absorbed`).
      prove: `FusedOp` -> `Refusal` or None; what can only be told of the operation as a whole. Called once for equal
        operations.
      composite: how it is differentiated; None: step by step (`autodiff`).
      any_operands: operands that are no floating-point arrays (masks, positions, keys) are legal.
      unfused_bytes: ``(op, platform) -> bytes`` its equations move between memory and chip; None: each step reads its
        operands and writes its result.
    """

    name: str
    schema: Schema
    attributes: Callable[[Any], Mapping[str, object]]
    requirements: Callable[[Any], Mapping[str, Hashable]]
    check: Callable[[Any], Refusal | None] = _no_check
    numerics: str = "reassociated"
    names: tuple[tuple[str, int, str], ...] | Callable[[Any], Mapping[int, str]] = ()
    extend: Callable[[Any], Any] = _no_extension
    prove: Callable[[Any], Refusal | None] = _no_check
    composite: Composite | None = None
    any_operands: bool = False
    unfused_bytes: Callable[[Any, str], int] | None = None

    def __post_init__(self) -> None:
        if self.numerics not in NUMERICS:
            raise ValueError(
                f"SemanticOp({self.name!r}, numerics=...): expected one of {list(NUMERICS)}, found {self.numerics!r}"
            )

    def __hash__(self) -> int:
        return hash((self.name, self.schema))


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One canonical operation inside a fused one.

    Attributes:
      role: how it is differentiated: ``"bilinear"`` (a product of its two operands), ``"linear"`` (in all its
        operands), ``"pointwise"`` (a function of its one operand), ``"opaque"`` (by its equations), ``"general"`` (none
        of these); ``"joint"`` (a function of all its operands), ``"softmax"``, ``"normalize"``, ``"norm"`` and
        ``"loss"`` by the `Composite` of the operation.
      name: the canonical operation, e.g. ``"gelu_tanh"``.
      body: jaxpr from the operands to the results: the user's own equations.
      operands: slots, one for each input of `body`. Slots 0 … n-1 are the region's inputs, slot n + k is step k's
        result (a step with several results, opaque or a split, takes as many slots).
      from_output: a pointwise step whose derivative is a function of its result.
    """

    role: str
    name: str
    body: Any
    operands: tuple[int, ...]
    from_output: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class FusedOp:
    """One fused operation. Equal and hashed by attributes, structure and choices, so equal programs share jax's caches.

    Attributes:
      semantic: its kind.
      blob: packed attributes.
      steps: the composition it stands for, in order.
      results: slots that are results of the operation; the first is the end of the chain.
      in_avals: types of the inputs.
      key: structural key of the equations.
      context: policy, patterns and kernels it was made under.
      choices: (platform, kernel name) for every platform it may be lowered to.
      site, pattern: the user's source line and the pattern that found it; not part of equality.
      input_names, result_names: for prints, where somebody knows them; not part of equality.
      gradient_of: for a backward that is derived as a whole, the operation it is of and the inputs whose cotangents are
        its results; its own inputs are that operation's, what that one keeps, and the cotangents. Not part of equality.
    """

    semantic: SemanticOp
    blob: AttrBlob
    steps: tuple[Step, ...]
    results: tuple[int, ...]
    in_avals: tuple[Any, ...]
    key: Hashable
    context: Any
    choices: tuple[tuple[str, str], ...] = ()
    site: str = ""
    pattern: str = ""
    input_names: tuple[str, ...] = ()
    result_names: tuple[str, ...] = ()
    gradient_of: tuple[FusedOp, tuple[int, ...]] | None = None

    def _identity(self) -> tuple[Hashable, ...]:
        return (self.semantic.name, self.blob, self.key, self.results, self.choices, self.context)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, FusedOp) and self._identity() == other._identity())

    def __hash__(self) -> int:
        return hash((self.semantic.name, self.blob, self.key))

    def __repr__(self) -> str:
        return f"{self.semantic.name}({self.blob})"

    @property
    def slot_avals(self) -> tuple[Any, ...]:
        """Types of all slots."""
        return (*self.in_avals, *(v.aval for step in self.steps for v in step.body.outvars))

    @property
    def out_avals(self) -> tuple[Any, ...]:
        avals = self.slot_avals
        return tuple(avals[s] for s in self.results)

    @property
    def residual(self) -> int | None:
        """The slot the derivative is computed from, besides the inputs; None for operations linear in each input.

        The result itself where the activation's derivative is a function of it (nothing further is kept alive), else
        the activation's input.
        """
        if self.semantic.composite is not None or self.is_general:
            return None
        n = len(self.in_avals)
        for k, step in enumerate(self.steps):
            if step.role == "pointwise":
                return n + k if step.from_output else step.operands[0]
        return None

    @property
    def is_general(self) -> bool:
        """Whether its steps cannot be differentiated one by one, so that the whole is, through its equations.

        One by one takes products of inputs, linear maps, and one function whose derivative a single residual gives.
        """
        if self.semantic.composite is not None:
            return False
        roles = [step.role for step in self.steps]
        inner = len(self.in_avals)
        nested = any(s.role == "bilinear" and max(s.operands, default=0) >= inner for s in self.steps)
        return nested or roles.count("pointwise") > 1 or bool({"general", "softmax", "normalize"} & set(roles))

    def evaluate(self, inputs: Sequence[Any]) -> list[Any]:
        """All slots: the inputs, then the results of each step. These are the user's own equations."""
        slots = list(inputs)
        for step in self.steps:
            slots.extend(_compat.as_function(step.body)(*[slots[i] for i in step.operands]))
        return slots

    def reference(self, *inputs: Any) -> tuple[Any, ...]:
        """The results, as the unfused program computes them."""
        slots = self.evaluate(inputs)
        return tuple(slots[s] for s in self.results)

    def outer_bytes(self) -> int:
        """Bytes of inputs and results."""
        return sum(nbytes(a) for a in (*self.in_avals, *self.out_avals))

    def with_choices(self, choices: tuple[tuple[str, str], ...]) -> FusedOp:
        return dataclasses.replace(self, choices=choices)

    def requirements(self) -> Mapping[str, Hashable]:
        """What a kernel must be capable of; see `select`."""
        return self.semantic.requirements(self)
