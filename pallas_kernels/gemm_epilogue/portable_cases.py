"""GEMM epilogues through Triton, checked and timed on a GPU: cases of `device` with the portable kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels import _triton
from pallas_kernels.device_case import DeviceCase
from pallas_kernels.gemm_epilogue import portable
from pallas_kernels.gemm_epilogue.device import backward_case, forward_case


def _forward(m: int, n: int, k: int, activation: str) -> DeviceCase:
    def kernel(x: Any, w: Any, b: Any) -> tuple[Any, ...]:
        return portable.forward(x, w, b, activation=activation, z_dtype=jnp.bfloat16)

    case = forward_case(m, n, k, activation, with_z=True)
    return dataclasses.replace(case, kernel=kernel, refusal=_triton.refusal)


def _backward(m: int, n: int, activation: str) -> DeviceCase:
    def kernel(residual: Any, dy: Any) -> tuple[Any, ...]:
        return portable.backward(residual, dy, activation=activation)

    return dataclasses.replace(backward_case(m, n, activation), kernel=kernel, refusal=_triton.refusal)


DEVICE = (
    _forward(8192, 4096, 1024, "gelu_tanh"),
    _forward(1001, 999, 997, "gelu_exact"),
    _backward(8192, 4096, "gelu_exact"),
)
