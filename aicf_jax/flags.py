"""64-bit fingerprints: what an operation is, and what the graph around it allows.

Every node of a `Graph` carries one `OpFlags` value; a graph keeps them in one ``numpy.uint64`` array. Bits 0-39 are
*static* (a function of the primitive and its parameters), bits 40-47 are *derived* (a function of the neighbours), and
bits 48-55 are tags that the normalization rules of users may give to canonical nodes of their own (`Pattern.rules`).
Matching is `has`: two AND operations and two comparisons per test, whatever the pattern. A primitive without a row in
`PRIMITIVE_FLAGS` is opaque: it is executed as written and never fused.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np


class OpFlags(enum.IntFlag):
    """One bit per property. The values are part of the contract: golden prints and tuning caches contain them."""

    NONE = 0
    # -- static: the operation itself -----------------------------------------------------------------
    IS_GEMM_LIKE = 1 << 0
    IS_ELEMENTWISE = 1 << 1
    IS_ACTIVATION = 1 << 2
    HAS_PARAM = 1 << 3
    IS_REDUCTION = 1 << 4
    IS_NORMALIZATION = 1 << 5
    IS_SOFTMAX = 1 << 6
    IS_MASK = 1 << 7
    IS_SCALE = 1 << 8
    IS_CONV = 1 << 9
    IS_BIAS = 1 << 10
    IS_CAST = 1 << 11
    IS_LAYOUT = 1 << 12
    IS_BROADCAST = 1 << 13
    IS_CONTROL_FLOW = 1 << 14
    IS_BATCHED = 1 << 15
    IS_ACTIVATION_GRAD = 1 << 16
    IS_BIAS_GRAD = 1 << 17
    IS_NEAR_ACTIVATION = 1 << 18
    IS_FUSED = 1 << 19
    IS_JOIN = 1 << 20
    IS_UNNORMALIZED = 1 << 21
    IS_NORMALIZE = 1 << 22
    IS_NEAR_SOFTMAX = 1 << 23
    IS_CENTERED = 1 << 24
    IS_RESIDUAL = 1 << 25
    IS_NEAR_NORM = 1 << 26
    IS_CROSS_ENTROPY = 1 << 27
    IS_NEAR_CROSS_ENTROPY = 1 << 28
    IS_SLICE = 1 << 29
    HAS_EFFECT = 1 << 30
    IS_NOP = 1 << 31
    IS_GATE = 1 << 32
    IS_NEAR_GATE = 1 << 33
    IS_AFFINE = 1 << 34
    IS_NEAR_AFFINE = 1 << 35
    IS_BATCH_NORM = 1 << 36
    IS_TRANSPOSE = 1 << 37
    # -- derived: the graph around it -----------------------------------------------------------------
    SAFE_NODE = 1 << 40
    ESCAPES = 1 << 41
    DTYPE_F64 = 1 << 42
    DTYPE_F32 = 1 << 43
    DTYPE_BF16 = 1 << 44
    DTYPE_F16 = 1 << 45
    LAYOUT_CONTIG = 1 << 46
    # -- tags of users: nothing in the package sets or tests them ------------------------------------------
    USER_0 = 1 << 48
    USER_1 = 1 << 49
    USER_2 = 1 << 50
    USER_3 = 1 << 51
    USER_4 = 1 << 52
    USER_5 = 1 << 53
    USER_6 = 1 << 54
    USER_7 = 1 << 55


STATIC_MASK = OpFlags((1 << 40) - 1)

_E = OpFlags.IS_ELEMENTWISE


def _names(words: str) -> list[str]:
    return words.split()


#: primitive name -> static bits. This is the only place where operations are told apart by name.
PRIMITIVE_FLAGS: Mapping[str, OpFlags] = {
    **dict.fromkeys(
        _names(
            "abs acos acosh asin asinh atan atan2 atanh cbrt ceil clamp cos cosh div erf erf_inv erfc eq exp exp2 "
            "expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min ne neg nextafter not or and xor "
            "pow real rem round rsqrt select_n sign sin sinh sqrt square sub tan tanh copy copy_p stop_gradient "
            "custom_jvp_call"
        ),
        _E,
    ),
    **dict.fromkeys(_names("add add_any mul"), _E | OpFlags.IS_JOIN),
    "convert_element_type": _E | OpFlags.IS_CAST,
    "broadcast_in_dim": OpFlags.IS_BROADCAST,
    **dict.fromkeys(_names("slice split"), OpFlags.IS_SLICE),
    **dict.fromkeys(_names("reshape squeeze expand_dims"), OpFlags.IS_LAYOUT),
    "transpose": OpFlags.IS_LAYOUT | OpFlags.IS_TRANSPOSE,
    "activation_grad": _E | OpFlags.IS_ACTIVATION_GRAD,
    **dict.fromkeys(_names("fused fused_tangent"), OpFlags.IS_FUSED),
    "dot_general": OpFlags.IS_GEMM_LIKE | OpFlags.HAS_PARAM,
    "conv_general_dilated": OpFlags.IS_CONV | OpFlags.HAS_PARAM,
    **dict.fromkeys(
        _names("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin cumsum cumprod cummax"),
        OpFlags.IS_REDUCTION,
    ),
    **dict.fromkeys(
        _names(
            "jit pjit scan while cond remat remat2 checkpoint closed_call core_call custom_vjp_call "
            "custom_vjp_call_jaxpr shard_map"
        ),
        OpFlags.IS_CONTROL_FLOW,
    ),
}

_DTYPE_FLAGS: Mapping[np.dtype, int] = {
    np.dtype(np.float64): int(OpFlags.DTYPE_F64),
    np.dtype(np.float32): int(OpFlags.DTYPE_F32),
    np.dtype(jnp.bfloat16): int(OpFlags.DTYPE_BF16),
    np.dtype(np.float16): int(OpFlags.DTYPE_F16),
}


def dtype_flags(dtype: object) -> int:
    """The derived dtype bit of a result type, 0 for types no kernel speaks of (ints, keys, ...)."""
    return _DTYPE_FLAGS.get(dtype, 0)  # pyright: ignore[reportArgumentType, reportCallIssue]


def has(flags: int, require: int, forbid: int = 0) -> bool:
    """``flags & require == require and flags & forbid == 0``: the whole matching test."""
    return flags & require == require and not flags & forbid


def describe(flags: int) -> str:
    """``GEMM_LIKE|HAS_PARAM|SAFE_NODE``: set bits by name, without the ``IS_`` prefix, lowest first."""
    names = [(f.name or "").removeprefix("IS_") for f in OpFlags if f.value and f.value & flags == f.value]
    return "|".join(names) or "-"
