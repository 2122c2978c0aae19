"""``gemm_epilogue``: ``Y = act(A @ B + b)`` in one operation.

Shapes: ``A [..., M, K]``, ``B [K, N]`` (or batched, or with several feature dimensions), ``b`` broadcast along all
  but the
features. Accumulation: as in the equations it stands for (``preferred_element_type``, float32 for
low-precision operands). Memory moved by one kernel: ``A``, ``B``, ``b`` read once, ``Y`` written once; as written,
the product and the biased product are each written and read again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from aicf_jax.attrs import Field, Schema
from aicf_jax.errors import Refusal
from aicf_jax.flags import OpFlags
from aicf_jax.legality import refuse
from aicf_jax.ops._matrices import matrices
from aicf_jax.ops._semantic import FusedOp, SemanticOp
from aicf_jax.pattern import Match

ACTIVATIONS = (
    "none",
    "relu",
    "gelu_exact",
    "gelu_tanh",
    "silu",
    "tanh",
    "sigmoid",
    "elu",
    "leaky_relu",
    "softplus",
)

SCHEMA = Schema(
    kind_id=1,
    schema_id=1,
    fields=(
        Field("trans_a", "int"),
        Field("trans_b", "int"),
        Field("activation", "enum", ACTIVATIONS),
        Field("has_bias", "int"),
        Field("bias_along", "enum", ("n", "m")),  # free dimensions of the right or of the left operand
        Field("batched", "int"),
        Field("alpha", "float"),
    ),
)


def _attributes(match: Match) -> Mapping[str, object]:
    gemm = match.first(OpFlags.IS_GEMM_LIKE)
    bias, activation = match.first(OpFlags.IS_BIAS), match.first(OpFlags.IS_ACTIVATION)
    if gemm is None:
        raise ValueError("gemm_epilogue stands for a matrix product: the pattern's sequence needs a GEMM")
    return {
        "trans_a": int(gemm.attr("trans_a")),
        "trans_b": int(gemm.attr("trans_b")),
        "activation": activation.op if activation else "none",
        "has_bias": int(bias is not None),
        "bias_along": bias.attr("along") if bias else "n",
        "batched": int(bool(gemm.flags & OpFlags.IS_BATCHED)),
        "alpha": activation.attr("alpha", 0.0) if activation else 0.0,
    }


def _check(match: Match) -> Refusal | None:
    bias = match.first(OpFlags.IS_BIAS)
    if bias is not None and bias.attr("axis") != "features":
        return refuse(
            match, "bias_axis", "a bias along the features (columns)", "an addend that varies along the rows", bias
        )
    activation = match.first(OpFlags.IS_ACTIVATION)
    if activation is not None and activation.op not in ACTIVATIONS:
        return refuse(match, "activation", f"one of {', '.join(ACTIVATIONS)}", activation.op, activation)
    return None


def _requirements(op: FusedOp) -> Mapping[str, Hashable]:
    attrs = op.blob.unpack()
    a, b = (op.in_avals[i] for i in op.steps[0].operands)
    return {
        "activation": str(attrs["activation"]),
        "has_bias": bool(attrs["has_bias"]),
        "bias_along": str(attrs["bias_along"]),
        "batched": bool(attrs["batched"]),
        "trans_a": bool(attrs["trans_a"]),
        "trans_b": bool(attrs["trans_b"]),
        "operand_dtypes": (str(a.dtype), str(b.dtype)),
        "output_dtype": str(op.out_avals[0].dtype),
        "product_dtype": str(op.steps[0].body.outvars[0].aval.dtype),
        "precision": str(op.steps[0].body.eqns[0].params["precision"]),
        # Casts and layout changes between product, bias and activation are steps of the operation too.
        "steps": tuple(step.name for step in op.steps),
        "matrices": matrices(op),
        "formula": formula(next((s.body for s in op.steps if s.role == "pointwise"), None)),
    }


def formula(body: Any) -> str:
    """How an activation is written: ``"guarded"`` as in `jax.nn`, or ``"overflowing"``, itself or in its derivative.

    ``log(1 + exp(z))``, ``z / (1 + exp(-z))`` and an elu that takes the exponential of every z are infinite or NaN for
    large numbers, where a kernel with a formula of its own would be finite.
    """
    names = [e.primitive.name for e in body.eqns] if body is not None else []
    overflows = "exp" in names or "exp2" in names or ("expm1" in names and names.count("select_n") < 2)
    return "overflowing" if overflows else "guarded"


#: Names of the region's inputs in prints: by the step that reads them and the operand's position in it.
NAMES = (("bilinear", 0, "X"), ("bilinear", 1, "W"), ("linear", 1, "b"))

OP = SemanticOp("gemm_epilogue", SCHEMA, _attributes, _requirements, _check, names=NAMES)
