"""Attention through Triton, checked and timed on a GPU: forward, and forward with gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_kernels import _triton
from pallas_kernels.attention import portable
from pallas_kernels.attention.device import SelfAttention, forward_case, gradient_case
from pallas_kernels.device_case import DeviceCase


def _forward(*args: Any, **kind: Any) -> DeviceCase:
    case = forward_case(SelfAttention(*args, **kind), portable.forward)
    return dataclasses.replace(case, refusal=_triton.refusal)


def _gradients(*args: Any, **kind: Any) -> DeviceCase:
    case = gradient_case(SelfAttention(*args, **kind), portable.forward, portable.backward)
    return dataclasses.replace(case, refusal=_triton.refusal)


DEVICE = (
    _forward(1, 2048, 16, 64, causal=True),
    _forward(1, 2048, 16, 128),
    _forward(1, 1000, 8, 256, causal=True, kv_heads=2),
    _gradients(1, 2048, 16, 64, causal=True),
    _gradients(1, 2048, 16, 128, causal=True, kv_heads=4),
)
