"""``glu``: ``Y = act(X Wg + bg) * (X Wu + bu)``, a gated linear unit, in one operation.

Two projections of one value, or one projection ``H = X W + b`` of twice the width that is cut in two. The activation
names the unit: silu SwiGLU, gelu GeGLU, relu ReGLU, sigmoid the GLU itself, none the bilinear one. Shapes: ``X [..., M,
K]``, ``Wg, Wu [K, F]`` or ``W [K, 2F]`` (or batched, or with several feature dimensions), ``Y [..., M, F]``.
Accumulation: as in the equations it stands for. Memory moved by one kernel: ``X``, weights and biases read once, ``Y``
written once; as written, both projections, the activation and the product are each written and read again.

Backward, from G and U, the values that the activation and the product read::

    dU = dY * act(G)            dG = dY * U * act'(G)
    dX = dG Wg^T + dU Wu^T      dWg = X^T dG      dWu = X^T dU      db = sum(d.)

Shazeer, "GLU variants improve Transformer", 2020; Dauphin et al., "Language modeling with gated convolutional
networks", 2017.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping

from aicf_jax.attrs import Field, Schema
from aicf_jax.errors import Refusal
from aicf_jax.flags import OpFlags
from aicf_jax.legality import refuse
from aicf_jax.normalize.gate import Branch, branches, part
from aicf_jax.ops._semantic import FusedOp, SemanticOp
from aicf_jax.ops._stepwise import stepwise
from aicf_jax.ops.epilogue import ACTIVATIONS
from aicf_jax.pattern import Match

#: Where gate and up-projection come from: products of their own, or halves of one (with the gate's named).
PROJECTIONS = ("separate", "gate_first", "gate_second", "gate_even", "gate_odd")

FIELDS = (
    Field("activation", "enum", ACTIVATIONS),
    Field("projections", "enum", PROJECTIONS),
    Field("gate_bias", "int"),
    Field("up_bias", "int"),
    Field("alpha", "float"),
)

SCHEMA = Schema(kind_id=11, schema_id=1, fields=FIELDS)


def _gate_and_up(match: Match) -> tuple[Branch, Branch]:
    gate, up = branches(match.graph, match.nodes[-1])
    if gate is None or up is None:
        raise ValueError("glu stands for the product of two branches: the pattern's sequence must end in GATE")
    return gate, up


def _extend(match: Match) -> Match:
    """The match with the branch that the chain did not come through."""
    found = branches(match.graph, match.nodes[-1])
    inside = {p for b in found if b is not None for p in b.positions}
    return dataclasses.replace(match, absorbed=tuple(sorted(inside - set(match.positions))))


def _attributes(match: Match) -> Mapping[str, object]:
    gate, up = _gate_and_up(match)
    return {
        "activation": gate.activation.op if gate.activation else "none",
        "projections": _projections(match, gate),
        "gate_bias": int(_has_bias(match, gate)),
        "up_bias": int(_has_bias(match, up)),
        "alpha": gate.activation.attr("alpha", 0.0) if gate.activation else 0.0,
    }


def _projections(match: Match, gate: Branch) -> str:
    if not gate.slices:
        return "separate"
    taken = part(match.graph, gate.slices[0][1])
    assert taken is not None
    _, start, _, stride = taken
    names = ("gate_first", "gate_second") if stride == 1 else ("gate_even", "gate_odd")
    return names[int(start > 0)]


def _has_bias(match: Match, branch: Branch) -> bool:
    return any(match.graph.nodes[p].flags & OpFlags.IS_BIAS for p in branch.positions)


def _check(match: Match) -> Refusal | None:
    if None in branches(match.graph, match.nodes[-1]):
        return refuse(match, "not_a_projection", "two projections", "a projection that is part of another operation")
    gate, _ = _gate_and_up(match)
    if gate.activation is not None and gate.activation.op not in ACTIVATIONS:
        return refuse(match, "activation", f"one of {', '.join(ACTIVATIONS)}", gate.activation.op, gate.activation)
    return None


def _requirements(op: FusedOp) -> Mapping[str, Hashable]:
    products = [s for s in op.steps if s.name == "gemm"]
    a, b = (v.aval for v in products[0].body.invars)
    attrs = op.blob.unpack()
    return {
        **{f.name: attrs[f.name] for f in FIELDS if f.name != "alpha"},
        "operand_dtypes": (str(a.dtype), str(b.dtype)),
        "output_dtype": str(op.out_avals[0].dtype),
        # The products' dimension numbers; one that was batched has more equations than one.
        "products": tuple(tuple(str(e.params.get("dimension_numbers")) for e in s.body.eqns) for s in products),
        "precision": str(products[0].body.eqns[0].params.get("precision")),
        "steps": tuple(step.name for step in op.steps),
    }


def _kept(op: FusedOp) -> tuple[int, int]:
    """G and U: what the activation reads, and the other factor."""
    gate, up = op.steps[-1].operands
    before = next((s for s in op.steps if s.role == "pointwise"), None)
    return (gate if before is None else before.operands[0]), up


def input_names(op: FusedOp) -> dict[int, str]:
    """X, and the weights and biases of gate and up-projection: by which of the two each product leads to."""
    found: dict[int, str] = {}
    if op.blob["projections"] != "separate":
        _name(op, op.steps[-1].operands[0], "", found)
        return found
    for slot, letter in zip(op.steps[-1].operands, "gu", strict=True):
        _name(op, slot, letter, found)
    products = [s.operands for s in op.steps if s.name == "gemm"]
    for slot in set(products[0]) & set(products[1]):
        found[slot] = "X"
    return found


def _name(op: FusedOp, slot: int, letter: str, found: dict[int, str]) -> None:
    """Names the inputs behind a slot: W and b with a letter; the first operand of a product is taken for X."""
    n, first = len(op.in_avals), 0
    producer = {}
    for step in op.steps:
        for k in range(len(step.body.outvars)):
            producer[n + first + k] = step
        first += len(step.body.outvars)
    while slot >= n:
        step = producer[slot]
        if step.role == "bilinear":
            for s, name in zip(step.operands, ("X", f"W{letter}"), strict=True):
                found.setdefault(s, name)
            return
        if step.role == "linear" and len(step.operands) == 2:
            found[step.operands[1]] = f"b{letter}"
        slot = step.operands[0]


OP = SemanticOp(
    "glu",
    SCHEMA,
    _attributes,
    _requirements,
    _check,
    names=input_names,
    extend=_extend,
    composite=stepwise("glu_grad", _kept, ("G", "U")),
)
