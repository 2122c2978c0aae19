"""``attention``: ``softmax(f(Q K^T)) W(V)`` over the keys, with all that may stand in between.

f is what the program does to the scores (scale, mask, bias, softcap, casts), W what it does to the weights (dropout,
casts); both are the user's own equations. Values that f and W need and that are cheaper to compute again than to read
(masks from positions, padding or segments, random bits) become part of the operation (`extend`).

That it is attention is proved on the operation as a whole (`prove`): with its axes named, the one axis that the softmax
normalizes over must be the one contracted with the values, whatever transposes and reshapes say.

Backward, from the results and the log-sum-exp of each row, kept as maximum m and sum l so that neither large fills nor
large scores cost precision::

    P = exp(a (X - m)) / l      dV = W'(P)^T dY      dP = W'^T(dY V^T)
    dX = a P (dP - delta)       delta = sum_e dY Y   dQ, dK, d... = f^T(dX)

Dao et al., "FlashAttention", 2022; Rabe and Staats, "Self-attention does not need O(n^2) memory", 2021.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from aicf_jax.attrs import Field, Schema
from aicf_jax.errors import Refusal
from aicf_jax.flags import OpFlags
from aicf_jax.legality import refuse
from aicf_jax.ops import _programs
from aicf_jax.ops._attention_composition import cotangent, products, save, side_by_side
from aicf_jax.ops._attention_operands import extend
from aicf_jax.ops._attention_proof import input_names, prove
from aicf_jax.ops._attention_variant import variant
from aicf_jax.ops._semantic import Composite, FusedOp, SemanticOp
from aicf_jax.pattern import Match

KEEP = ("all", "where_true", "where_false")

FIELDS = (
    Field("axis", "int"),  # of the scores: the keys, counted from the end, since batching adds dimensions in front
    Field("base", "float"),  # a in exp(a x)
    Field("keep", "enum", KEEP),  # a softmax with `where=`
    Field("zeroed", "int"),  # ... that is 0, not NaN, where a row has no elements
    Field("guarded", "int"),  # a maximum that is not finite counts as 0
    Field("permutation", "int"),  # which dimension of the scores each of the weights' is, see `_digits`; 0: the same
)

SCHEMA = Schema(kind_id=3, schema_id=1, fields=FIELDS)


def _attributes(match: Match) -> Mapping[str, object]:
    softmax = match.first(OpFlags.IS_SOFTMAX)
    if softmax is None:
        raise ValueError("attention stands for a softmax between two products: the sequence needs SOFTMAX")
    keep = {None: "all", True: "where_true", False: "where_false"}[softmax.attr("keep_when")]
    ndim = match.graph.values[softmax.inputs[0]].aval.ndim
    return {
        "axis": softmax.attr("axis") % ndim - ndim,
        "base": softmax.attr("base"),
        "keep": keep,
        "zeroed": int(softmax.attr("zeroed")),
        "guarded": int(softmax.attr("guarded")),
        "permutation": _digits(softmax.attr("permutation")),
    }


def _digits(permutation: Sequence[int] | None) -> int:
    """A permutation of up to ten dimensions as octal digits behind a leading 1."""
    return 0 if permutation is None else int("1" + "".join(map(str, permutation)), 8)


def _check(match: Match) -> Refusal | None:
    for node in match.nodes:
        shape = match.graph.values[node.outputs[0]].aval.shape
        if 0 in shape:
            return refuse(match, "empty", "arrays with elements", f"{node.op} of shape {shape}", node)
        if len(shape) > 8:
            return refuse(match, "rank", "at most eight dimensions", f"{node.op} of shape {shape}", node)
    return None


def _requirements(op: FusedOp) -> Mapping[str, Hashable]:
    q, k = (v.aval for v in op.steps[products(op)[0]].body.invars)
    return {
        "operand_dtypes": (str(q.dtype), str(k.dtype)),
        "output_dtype": str(op.out_avals[0].dtype),
        "steps": tuple(step.name for step in op.steps),
        # No kernel wants to know it of wider types.
        "variant": variant(op) if q.dtype.itemsize <= 2 else f"operands of type {q.dtype}",
    }


COMPOSITE = Composite(save, cotangent, "attention_grad", ("Y", "m", "l"), side_by_side, apart=True)

OP = SemanticOp(
    "attention",
    SCHEMA,
    _attributes,
    _requirements,
    _check,
    names=input_names,
    extend=extend,
    prove=prove,
    composite=COMPOSITE,
    any_operands=True,
    unfused_bytes=_programs.unfused_bytes,
)
