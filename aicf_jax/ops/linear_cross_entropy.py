"""``linear_cross_entropy``: ``loss_i = g(logsumexp_j x_ij, x_i,label_i, sum_j w_ij x_ij)`` of logits ``x = f(h W)``.

f is what the program does to the logits (bias, temperature, softcap, masks, casts, slices of rows), g what it makes of
the log-sum-exp over the vocabulary, of elements at integer labels and of sums with weights (one-hot, soft or smoothed
labels): cross entropy, label smoothing, z-loss. Both are the user's own equations. h is ``[..., d]``, W ``[d, V]`` or
``[V, d]``; the result is one loss a row, or their sum over all rows, row weights in between, where nothing else uses
the losses.

Backward, with m and l of ``sum_j exp(a (x_j - m))`` kept of each row and the cotangents of the numbers of rows::

    dX = a dl exp(a (x - m)) + dt onehot(label) + sum_k dt_k w_k        dh = f^T(dX) W^T      dW = h^T f^T(dX)

Neither x nor dX exists whole. A result that is one number is differentiated in its forward, where x is known block by
block: three products as unfused; other results compute x again: four. Sums are in float32 or wider. A label out of
bounds gives what the program's own gather gives: NaN, or the nearest class. Rows that a slice leaves out are not
computed: for ``x[:, :-1]`` h is sliced instead. Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018; Wijmans et al., "Cut your losses in large-vocabulary language models", 2024; Hsu et al.,
"Liger kernel", 2024.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping

from aicf_jax.attrs import Field, Schema
from aicf_jax.errors import Refusal
from aicf_jax.flags import OpFlags
from aicf_jax.legality import refuse
from aicf_jax.ops import _loss_programs
from aicf_jax.ops._absorb import absorb
from aicf_jax.ops._loss_composition import cotangent, input_names, names, save, side_by_side
from aicf_jax.ops._loss_proof import prove
from aicf_jax.ops._loss_variant import variant
from aicf_jax.ops._semantic import Composite, FusedOp, SemanticOp
from aicf_jax.pattern import Match

FIELDS = (Field("axis", "int"),)  # of the logits: the vocabulary, from the end, since batching adds dimensions in front

SCHEMA = Schema(kind_id=9, schema_id=1, fields=FIELDS)


def _attributes(match: Match) -> Mapping[str, object]:
    loss = match.first(OpFlags.IS_CROSS_ENTROPY)
    if loss is None:
        raise ValueError("linear_cross_entropy stands for a loss of logits: the sequence needs CROSS_ENTROPY")
    ndim = match.graph.values[loss.inputs[0]].aval.ndim
    return {"axis": loss.attr("axis") % ndim - ndim}


def _check(match: Match) -> Refusal | None:
    for node in match.nodes:
        shape = match.graph.values[node.inputs[0]].aval.shape
        if 0 in shape:
            return refuse(match, "empty", "arrays with elements", f"{node.op} of shape {shape}", node)
        if len(shape) > 8:
            return refuse(match, "rank", "at most eight dimensions", f"{node.op} of shape {shape}", node)
        if len(node.outputs) > 1:
            return refuse(
                match, "split", "slices of rows of the logits", "logits that are split in several parts", node
            )
    return None


def _extend(match: Match) -> Match:
    """Labels that are cheaper to compute than to read, and the transposes of what enters the product."""
    match = absorb(match)
    graph = match.graph
    producers = {int(graph.producer[v]) for n in match.nodes if n.flags & OpFlags.IS_GEMM_LIKE for v in n.inputs}
    turned = {p for p in producers if p >= 0 and graph.nodes[p].op == "transpose"}
    return dataclasses.replace(match, absorbed=tuple(sorted({*match.absorbed, *turned} - set(match.positions))))


def _requirements(op: FusedOp) -> Mapping[str, Hashable]:
    product = next(step for step in op.steps if step.role == "bilinear")
    return {
        "operand_dtypes": tuple(str(op.slot_avals[s].dtype) for s in product.operands),
        "output_dtype": str(op.out_avals[0].dtype),
        "steps": tuple(step.name for step in op.steps),
        "variant": variant(op),
    }


COMPOSITE = Composite(save, cotangent, "linear_cross_entropy_grad", names, side_by_side)

OP = SemanticOp(
    "linear_cross_entropy",
    SCHEMA,
    _attributes,
    _requirements,
    _check,
    names=input_names,
    extend=_extend,
    prove=prove,
    composite=COMPOSITE,
    any_operands=True,
    unfused_bytes=_loss_programs.unfused_bytes,
)
