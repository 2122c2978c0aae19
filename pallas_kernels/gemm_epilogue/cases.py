"""Shapes and variants of the GEMM epilogue kernels."""

from __future__ import annotations

from pallas_kernels.gemm_epilogue.device import backward_case, forward_case

#: Checked and timed on a GPU: small and middle K, where an epilogue that is not fused costs most.
DEVICE = (
    forward_case(8192, 4096, 512),
    forward_case(8192, 4096, 1024),
    forward_case(8192, 4096, 2048),
    forward_case(8192, 4096, 4096),
    forward_case(8192, 4096, 1024, "gelu_tanh", with_z=True),
    forward_case(8192, 4096, 1024, "gelu_exact"),
    forward_case(8192, 4096, 2048, "silu", dtype="float16", with_z=True),
    forward_case(8192, 4096, 1024, "none", trans_b=True),
    forward_case(4080, 2064, 528, "gelu_tanh", with_z=True),
    backward_case(8192, 4096),
    backward_case(8192, 4096, "gelu_tanh"),
    backward_case(8192, 4096, "gelu_exact"),
    backward_case(4080, 2064, "silu", "float16"),
)
