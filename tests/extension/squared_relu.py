"""A family of one's own, from outside of the package: ``relu(A @ B + b) ** 2`` as one operation.

So et al., "Primer: searching for efficient transformers for language modeling", 2021. The page docs/extending.md is
about this file: a rule that sees the activation in its spellings, a tag for what it sees, an operation, a pattern with
near misses, a kernel. Nothing of the package is changed and nothing is registered.
"""

import jax.numpy as jnp

import aicf_jax
from aicf_jax import Kernel, OpFlags, Pattern
from aicf_jax.attrs import Field, Schema
from aicf_jax.graph import Node
from aicf_jax.normalize import Rule
from aicf_jax.ops import SemanticOp
from aicf_jax.pattern import BIAS, CAST, GEMM, LAYOUT, NearMiss, opt, star, test

#: The tag: one of the eight bits that are for users. A node that has it is a squared relu.
TAG = OpFlags.USER_0


def _squares(graph, node):
    """The value that a node squares, None for a node that does not."""
    eqn = graph.eqn(node.covers[0]) if len(node.covers) == 1 else None
    if node.op == "square" or (node.op == "integer_pow" and eqn.params["y"] == 2):
        return node.inputs[0]
    return node.inputs[0] if node.op == "mul" and node.inputs[0] == node.inputs[1] else None


def _apply(graph):
    """Position of each square of a relu -> the canonical node that stands for both."""
    found = {}
    for i, node in enumerate(graph.nodes):
        squared = _squares(graph, node)
        producer = -1 if squared is None else int(graph.producer[squared])
        inner = graph.nodes[producer] if producer >= 0 else None
        # Only where nobody else needs the relu: its node would stay, and be computed twice.
        if inner is None or inner.op != "relu" or not graph.flag_list[producer] & OpFlags.SAFE_NODE:
            continue
        covers = tuple(sorted({*inner.covers, *node.covers}))
        found[i] = Node("squared_relu", OpFlags.IS_ELEMENTWISE | TAG, inner.inputs, node.outputs, covers)
    return found


#: After the package's rule for activations (20), on whose `relu` it relies.
RULE = Rule("squared_relu", 50, _apply)


def _attributes(match):
    bias = match.first(OpFlags.IS_BIAS)
    return {"has_bias": int(bias is not None), "bias_along": bias.attr("along") if bias else "n"}


OP = SemanticOp(
    name="gemm_squared_relu",
    schema=Schema(
        kind_id=1000, schema_id=1, fields=(Field("has_bias", "int"), Field("bias_along", "enum", ("n", "m")))
    ),
    attributes=_attributes,
    requirements=lambda op: {"dtype": str(op.out_avals[0].dtype), "steps": tuple(s.name for s in op.steps)},
    names=(("bilinear", 0, "X"), ("bilinear", 1, "W"), ("linear", 1, "b")),
)

SQUARED_RELU = test(TAG)
_BETWEEN = star(CAST | LAYOUT)

PATTERN = Pattern(
    "gemm_squared_relu",
    (GEMM, _BETWEEN, opt(BIAS), _BETWEEN, SQUARED_RELU),
    rewrite=OP,
    near_misses=(
        NearMiss(
            "cubed",
            (GEMM, _BETWEEN, opt(BIAS), _BETWEEN, test(OpFlags.IS_ACTIVATION), test(OpFlags.IS_ELEMENTWISE, TAG)),
            expected="the square of a relu",
            found="another function of an activation",
        ),
    ),
    rules=(RULE,),
)


def _run(op, x, w, *bias):
    z = jnp.matmul(x, w) + (bias[0] if bias else 0)
    return (jnp.square(jnp.maximum(z, 0)),)


KERNEL = Kernel(
    name="squared_relu_gemm",
    op="gemm_squared_relu",
    platforms=("cpu",),
    capabilities={
        "dtype": {"float32", "float64"},
        "steps": {("gemm", "squared_relu"), ("gemm", "bias_add", "squared_relu")},  # no casts, nothing transposed
    },
    run=_run,
    numerics="reassociated",
)

#: What `fuse` and `explain` take.
PATTERNS = (PATTERN, *aicf_jax.FUSION_PATTERNS)
KERNELS = (*aicf_jax.KERNELS, KERNEL)
