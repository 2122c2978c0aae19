"""The fused operations: what each means, what it may contain, and how its attributes are packed.

One module an operation, each exporting ``OP``; ``ops.gemm_epilogue`` is that module's constant.
"""

from __future__ import annotations

from aicf_jax.ops._semantic import Composite, FusedOp, SemanticOp, Step, nbytes
from aicf_jax.registry import discover, unique

__all__ = ["OPS", "Composite", "FusedOp", "SemanticOp", "Step", "nbytes"]

#: Every operation by name.
OPS: dict[str, SemanticOp] = {op.name: op for op in unique(discover(__name__, "OP"), "name")}

attention: SemanticOp = OPS["attention"]
attention_grad: SemanticOp = OPS["attention_grad"]
batch_norm: SemanticOp = OPS["batch_norm"]
batch_norm_grad: SemanticOp = OPS["batch_norm_grad"]
conv_epilogue: SemanticOp = OPS["conv_epilogue"]
conv_epilogue_grad: SemanticOp = OPS["conv_epilogue_grad"]
gemm_epilogue: SemanticOp = OPS["gemm_epilogue"]
gemm_epilogue_grad: SemanticOp = OPS["gemm_epilogue_grad"]
glu: SemanticOp = OPS["glu"]
glu_grad: SemanticOp = OPS["glu_grad"]
layer_norm: SemanticOp = OPS["layer_norm"]
layer_norm_grad: SemanticOp = OPS["layer_norm_grad"]
linear_cross_entropy: SemanticOp = OPS["linear_cross_entropy"]
linear_cross_entropy_grad: SemanticOp = OPS["linear_cross_entropy_grad"]
rms_norm: SemanticOp = OPS["rms_norm"]
rms_norm_grad: SemanticOp = OPS["rms_norm_grad"]
