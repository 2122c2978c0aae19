"""Shapes and variants of the GEMM epilogue kernels: for the simulator, compiled, and for a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from pallas_kernels.gemm_epilogue.config import BackwardConfig, ForwardConfig
from pallas_kernels.gemm_epilogue.device import backward_case, forward_case


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `forward`. `config`: None for the default."""

    m: int
    n: int
    k: int
    activation: str = "relu"
    alpha: float = 0.0
    dtype: str = "bfloat16"
    batch: int | None = None
    trans_a: bool = False
    trans_b: bool = False
    bias: str | None = "n"
    bias_dtype: str = "bfloat16"
    out_dtype: str | None = None
    z_dtype: str | None = None
    config: ForwardConfig | None = None

    @property
    def is_ragged(self) -> bool:
        """Whether tiles reach beyond the arrays."""
        c = self.config or ForwardConfig()
        return bool(self.m % c.tile_m or self.n % c.tile_n or self.k % c.tile_k)

    @property
    def is_transposed(self) -> bool:
        return self.trans_a or self.trans_b

    def arrays(self, key: jax.Array) -> tuple[Any, ...]:
        """Random ``(a, b, bias)``; products have a variance of 1."""
        ka, kb, kc = jax.random.split(key, 3)
        lead = () if self.batch is None else (self.batch,)
        a = jax.random.normal(ka, (*lead, *((self.k, self.m) if self.trans_a else (self.m, self.k))))
        b = jax.random.normal(kb, (*lead, *((self.n, self.k) if self.trans_b else (self.k, self.n)))) * self.k**-0.5
        length = self.n if self.bias == "n" else self.m
        bias = None if self.bias is None else jax.random.normal(kc, (length,)).astype(self.bias_dtype)
        return a.astype(self.dtype), b.astype(self.dtype), bias

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the call."""
        names = ("activation", "alpha", "trans_a", "trans_b", "out_dtype", "z_dtype", "config")
        return {**{name: getattr(self, name) for name in names}, "bias_along": self.bias or "n"}


@dataclasses.dataclass(frozen=True)
class GradCase:
    """One call of `backward`. `config`: None for the default."""

    m: int
    n: int
    activation: str = "relu"
    alpha: float = 0.0
    dtype: str = "bfloat16"
    residual_dtype: str = "bfloat16"
    from_output: bool | None = None
    db_dtype: str | None = None
    in_place: bool = False
    config: BackwardConfig | None = None

    @property
    def is_ragged(self) -> bool:
        """Whether blocks reach beyond the arrays."""
        c = self.config or BackwardConfig()
        rows = c.block_m * c.warpgroups * c.groups
        return bool(self.m % rows or self.n % c.block_n)

    def arrays(self, key: jax.Array) -> tuple[Any, ...]:
        """Random ``(residual, dy)``."""
        kr, kd = jax.random.split(key)
        residual = jax.random.normal(kr, (self.m, self.n)).astype(self.residual_dtype)
        return residual, jax.random.normal(kd, (self.m, self.n)).astype(self.dtype)

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the call."""
        names = ("activation", "alpha", "from_output", "db_dtype", "in_place", "config")
        return {name: getattr(self, name) for name in names}


_TILE = ForwardConfig(64, 128, 64, 2, "n", sm_count=1)
_ROWS = ForwardConfig(128, 64, 64, 2, "m", sm_count=1)

#: In the simulator, on every run: the fewest that show each part. More tiles than CTAs, more steps than stages.
QUICK: Mapping[str, Case] = {
    "whole tiles, Z kept": Case(128, 128, 192, "gelu_exact", z_dtype="float32", config=_TILE),
    "ragged, batch, W transposed": Case(72, 144, 80, "silu", dtype="float16", batch=3, trans_b=True, config=_TILE),
    "X transposed, bias along rows": Case(80, 64, 64, "tanh", trans_a=True, bias="m", bias_dtype="float32",
                                          config=_ROWS),
}  # fmt: skip

#: In the simulator, the rest.
SLOW: Mapping[str, Case] = {
    "split by rows": Case(256, 128, 128, "gelu_tanh", z_dtype="bfloat16", config=_ROWS),
    "ragged rows": Case(72, 128, 64, config=_TILE),
    "ragged columns": Case(64, 80, 64, "elu", 0.5, config=_TILE),
    "ragged depth": Case(64, 128, 80, "leaky_relu", 0.1, config=_TILE),
    "few rows": Case(8, 128, 64, "sigmoid", config=_TILE),
    "no bias": Case(64, 128, 64, "softplus", bias=None, config=_TILE),
    "no activation, float32 result": Case(64, 128, 64, "none", out_dtype="float32", config=_TILE),
    "both transposed": Case(80, 144, 80, trans_a=True, trans_b=True, z_dtype="bfloat16", config=_TILE),
    "ragged, bias along rows": Case(72, 144, 80, bias="m", config=_TILE),
    "batch": Case(64, 128, 64, batch=3, config=_TILE),
    "one step, many tiles": Case(256, 256, 64, config=_TILE),
    "wide parts": Case(64, 128, 128, config=dataclasses.replace(_TILE, store_n=64)),
}

_STRIPE = BackwardConfig(64, 32, 2, 2)

#: As `QUICK` and `SLOW`, of `backward`.
QUICK_GRAD: Mapping[str, GradCase] = {
    "whole blocks": GradCase(384, 64, config=_STRIPE),
    "ragged, groups of rows": GradCase(456, 80, "gelu_exact", residual_dtype="float32", db_dtype="float32",
                                       config=BackwardConfig(64, 64, 2, 2, 2)),
}  # fmt: skip
SLOW_GRAD: Mapping[str, GradCase] = {
    "one block": GradCase(8, 16, "silu", config=_STRIPE),
    "in place": GradCase(384, 64, "silu", in_place=True, config=_STRIPE),
    "in place, ragged": GradCase(456, 80, "gelu_tanh", in_place=True, config=BackwardConfig(64, 64, 2, 2, 2)),
    "not in place for another type": GradCase(384, 64, "elu", residual_dtype="float32", in_place=True, config=_STRIPE),
    "float16": GradCase(128, 32, "gelu_tanh", dtype="float16", residual_dtype="float16", config=_STRIPE),
    "from Y": GradCase(128, 32, "tanh", config=_STRIPE),
    "from Z": GradCase(128, 32, "sigmoid", from_output=False, config=_STRIPE),
    "elu": GradCase(128, 32, "elu", 0.5, config=_STRIPE),
    "leaky": GradCase(128, 32, "leaky_relu", 0.1, config=_STRIPE),
    "softplus": GradCase(200, 48, "softplus", config=_STRIPE),
    "one stage": GradCase(384, 96, "relu", config=BackwardConfig(64, 96, 1, 1)),
}

#: Compiled for a described GPU with default configurations.
COMPILED: Mapping[str, Case] = {
    **{
        name: Case(8192, 4096, 4096, name, 0.5)
        for name in ("none", "relu", "gelu_tanh", "tanh", "sigmoid", "elu", "leaky_relu", "softplus")
    },
    **{f"{name}, Z kept": Case(8192, 4096, 4096, name, z_dtype="bfloat16") for name in ("gelu_exact", "silu")},
    "float32 Z": Case(8192, 4096, 4096, "gelu_exact", z_dtype="float32"),
    "float32 result": Case(8192, 4096, 1024, "silu", out_dtype="float32"),
    "both transposed": Case(4096, 4096, 4096, "gelu_tanh", dtype="float16", trans_a=True, trans_b=True),
    "ragged": Case(200, 208, 784, "relu", z_dtype="bfloat16"),
    "batch": Case(512, 512, 512, "silu", batch=4, bias="m"),
    "few rows": Case(8, 4096, 4096, "gelu_tanh"),
}
COMPILED_GRAD: Mapping[str, GradCase] = {
    **{
        name: GradCase(8192, 4096, name, 0.5) for name in ("relu", "gelu_exact", "gelu_tanh", "tanh", "elu", "softplus")
    },
    "sigmoid from Z": GradCase(8192, 4096, "sigmoid", from_output=False),
    "float32 Z": GradCase(8192, 4096, "gelu_exact", residual_dtype="float32"),
    "wide": GradCase(4096, 11008, "silu"),
    "few columns": GradCase(4096, 512, "gelu_tanh"),
    "ragged": GradCase(200, 208, "relu", dtype="float16", residual_dtype="float16"),
}

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
