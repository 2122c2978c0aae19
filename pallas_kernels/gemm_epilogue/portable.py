"""``Y = act(A @ B + b)`` and its activation's gradient through Triton, for GPUs of Ampere and Ada.

Any M, N and K: what lies beyond the arrays is masked. Read: A and B once for each tile of the result that needs them,
b once a tile; written: Y, and Z if asked for. Backward: dY and the residual once, dZ once; groups of rows are summed
apart in float32 and added up in their order: the same bits on every run.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _mosaic, _triton
from pallas_kernels._arguments import expect
from pallas_kernels.gemm_epilogue.activations import ACTIVATIONS
from pallas_kernels.gemm_epilogue.arguments import cheapest, checked, product

_MODULE = "pallas_kernels.gemm_epilogue.triton_kernels"

#: Elements of one matrix: offsets in it are 32-bit numbers.
MOST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """How `forward` cuts its work.

    Attributes:
      block_m, block_n: the block of the result that one CTA makes.
      block_k: depth of one load.
      stages: loads in flight.
      warps: of a CTA.
      group: rows of tiles that are made before the next ones, for reuse in L2.

    Raises:
      ValueError: naming the attribute, what was expected, what was found.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 32
    stages: int = 4
    warps: int = 4
    group: int = 8

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k"):
            _triton.expect_power_of_two(self, name, 16, 256)
        _triton.expect_power_of_two(self, "warps", 1, 16)
        for name in ("stages", "group"):
            if getattr(self, name) < 1:
                raise ValueError(f"TileConfig({name}=...): expected at least 1, found {getattr(self, name)!r}")


@dataclasses.dataclass(frozen=True)
class StripeConfig:
    """How `backward` cuts its work: each CTA owns a stripe of columns of one group of rows.

    Attributes:
      block_m, block_n: rows and columns at a time; `block_n` is the width of a stripe.
      groups: of rows.
      warps: of a CTA.

    Raises:
      ValueError: naming the attribute, what was expected, what was found.
    """

    block_m: int = 32
    block_n: int = 64
    groups: int = 1
    warps: int = 4

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n"):
            _triton.expect_power_of_two(self, name, 1, 256)
        _triton.expect_power_of_two(self, "warps", 1, 16)
        if self.groups < 1:
            raise ValueError(f"StripeConfig(groups=...): expected at least 1, found {self.groups!r}")


#: Tiles with their warps, from the largest on: at most half the registers of a thread are the accumulator's.
_TILES = ((128, 256, 8), (128, 128, 8), (128, 64, 4), (64, 128, 4), (64, 64, 4), (32, 64, 4), (16, 64, 2))


def default_tiles(batch: int, m: int, n: int, sm_count: int | None = None) -> TileConfig:
    """By shape."""
    block_m, block_n, warps = cheapest(_TILES, batch, m, n, sm_count)
    return TileConfig(block_m, block_n, 32, 3 if block_n == 256 else 4, warps)


def default_stripes(m: int, n: int, sm_count: int | None = None) -> StripeConfig:
    """By shape: four CTAs for each multiprocessor where there are as many blocks of 32 rows."""
    stripes = math.ceil(n / 64)
    groups = max(1, min(math.ceil(4 * _mosaic.sm_count(sm_count) / stripes), math.ceil(m / 128)))
    return StripeConfig(32, 64, groups)


def forward(
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: str = "none",
    alpha: float = 0.0,
    trans_a: bool = False,
    trans_b: bool = False,
    bias_along: str = "n",
    out_dtype: Any = None,
    z_dtype: Any = None,
    config: TileConfig | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """``(Y,)`` or ``(Y, Z)``, accumulated, biased and activated in float32.

    Arguments as those of `pallas_kernels.gemm_epilogue.forward`, with no limits on M, N and K but that a matrix has at
    most `MOST` elements. `interpret`: by Triton's interpreter, on the CPU.

    Raises:
      ValueError: naming the argument, what was expected, what was found.
    """
    found = product(a, b, bias, activation=activation, trans_a=trans_a, trans_b=trans_b, bias_along=bias_along)
    m, n, k, shape = found.m, found.n, found.k, found.shape
    largest = max(m * k, k * n, m * n)
    expect("forward", "a", largest <= MOST, f"matrices of at most {MOST} elements", (m, n, k))
    batch = found.batch or 1
    c = config or default_tiles(batch, m, n)
    results = _triton.call(
        _MODULE,
        "gemm_epilogue",
        {"a": a, "b": b, "bias": bias},
        {
            "y": jax.ShapeDtypeStruct(shape, out_dtype or a.dtype),
            "z": None if z_dtype is None else jax.ShapeDtypeStruct(shape, z_dtype),
        },
        (math.ceil(m / c.block_m) * math.ceil(n / c.block_n), batch),
        constants={
            **{"m": m, "n": n, "k": k, "trans_a": trans_a, "trans_b": trans_b, "bias_along": bias_along},
            **{"activation": activation, "alpha": float(alpha)},
            **{"block_m": c.block_m, "block_n": c.block_n, "block_k": c.block_k, "group": c.group},
        },
        num_warps=c.warps,
        num_stages=c.stages,
        products=("a", "b"),
        interpret=interpret,
    )
    return tuple(results[name] for name in ("y", "z") if name in results)


def backward(
    residual: jax.Array,
    dy: jax.Array,
    *,
    activation: str,
    alpha: float = 0.0,
    from_output: bool | None = None,
    dz_dtype: Any = None,
    db_dtype: Any = None,
    config: StripeConfig | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """``dZ = dY * act'(.)`` and ``db = sum(dZ)`` over the rows, in float32.

    Arguments as those of `pallas_kernels.gemm_epilogue.backward`, with any M and N. `interpret`: as for `forward`.

    Raises:
      ValueError: naming the argument, what was expected, what was found.
    """
    is_output = checked(residual, dy, activation, from_output)
    expect("backward", "dy", 0 < dy.size <= MOST, f"1 to {MOST} elements", dy.shape)
    m, n = dy.shape
    dz, db = (jnp.dtype(d or dy.dtype) for d in (dz_dtype, db_dtype))
    c = config or default_stripes(m, n)
    steps = math.ceil(m / (c.groups * c.block_m))
    groups = math.ceil(m / (steps * c.block_m))
    summed = db if groups == 1 else jnp.dtype("float32")
    found = _triton.call(
        _MODULE,
        "gemm_epilogue_grad",
        {"residual": residual, "dy": dy},
        {"dz": jax.ShapeDtypeStruct((m, n), dz), "sums": jax.ShapeDtypeStruct((groups, n), summed)},
        (math.ceil(n / c.block_n), groups),
        constants={
            **{
                "m": m,
                "n": n,
                "activation": activation,
                "alpha": float(alpha),
                "activate": ACTIVATIONS[activation].from_output and not is_output,
            },
            **{"block_m": c.block_m, "block_n": c.block_n, "steps": steps},
        },
        num_warps=c.warps,
        interpret=interpret,
    )
    sums = found["sums"]
    return found["dz"], sums[0] if groups == 1 else jnp.sum(sums, 0).astype(db)
