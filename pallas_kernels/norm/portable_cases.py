"""Norms through Triton, checked and timed on a GPU: cases of `device` with the portable kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels import _triton
from pallas_kernels.device_case import DeviceCase
from pallas_kernels.norm import portable
from pallas_kernels.norm.device import _EPS, backward_case, forward_case


def _forward(count: int, length: int) -> DeviceCase:
    def kernel(x: Any, residual: Any, scale: Any, bias: Any) -> tuple[Any, ...]:
        found = portable.forward(x, scale, bias, residual, eps=_EPS, with_sum=True, with_statistics=True)
        return tuple(x for x in found if x is not None)

    return dataclasses.replace(forward_case(count, length), kernel=kernel, refusal=_triton.refusal)


def _backward(count: int, length: int) -> DeviceCase:
    def kernel(dy: Any, x: Any, rstd: Any, mean: Any, scale: Any, residual: Any, dsum: Any) -> tuple[Any, ...]:
        arrays = {"mean": mean, "scale": scale, "residual": residual, "dsum": dsum}
        return tuple(portable.backward(dy, x, rstd, **arrays, dscale=jnp.bfloat16, dbias=jnp.bfloat16))

    return dataclasses.replace(backward_case(count, length), kernel=kernel, refusal=_triton.refusal)


DEVICE = (_forward(8192, 4096), _backward(8192, 4096), _forward(8191, 1599))
