"""The arguments that forward and backward take, whatever they run as, and the shape of tiles for them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeVar

from pallas_kernels import _mosaic
from pallas_kernels._arguments import expect
from pallas_kernels.gemm_epilogue.activations import ACTIVATIONS

Tile = TypeVar("Tile", bound=tuple[Any, ...])


@dataclasses.dataclass(frozen=True)
class Product:
    """``[batch, m, k] @ [batch, k, n]``; `batch` is None without one."""

    batch: int | None
    m: int
    n: int
    k: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result."""
        return (self.m, self.n) if self.batch is None else (self.batch, self.m, self.n)


def product(a: Any, b: Any, bias: Any, *, activation: str, trans_a: bool, trans_b: bool, bias_along: str) -> Product:
    """What `forward` multiplies. Raises ValueError for arguments that no kernel takes."""

    def check(name: str, ok: bool, expected: str, found: object) -> None:
        expect("forward", name, ok, expected, found)

    check("a", str(a.dtype) in ("bfloat16", "float16"), "bfloat16 or float16", str(a.dtype))
    check("b", b.dtype == a.dtype, f"a's dtype {a.dtype}", str(b.dtype))
    check("a", a.ndim in (2, 3), "two dimensions, or three with a batch", a.shape)
    check("b", b.ndim == a.ndim and b.shape[:-2] == a.shape[:-2], f"the batch of a, {a.shape[:-2]}", b.shape)
    check("activation", activation in ACTIVATIONS, f"one of {', '.join(ACTIVATIONS)}", activation)
    check("bias_along", bias_along in ("n", "m"), "'n' or 'm'", bias_along)
    m, k = a.shape[-2:][::-1] if trans_a else a.shape[-2:]
    k2, n = b.shape[-2:][::-1] if trans_b else b.shape[-2:]
    check("b", k2 == k, f"a contracted dimension of {k}", b.shape)
    along = {"n": n, "m": m}[bias_along]
    check("bias", bias is None or bias.shape == (along,), f"shape ({along},)", None if bias is None else bias.shape)
    check("a", 0 not in (*a.shape, *b.shape), "no empty dimension", a.shape)
    return Product(a.shape[0] if a.ndim == 3 else None, m, n, k)


def checked(residual: Any, dy: Any, activation: str, from_output: bool | None) -> bool:
    """Whether the residual of `backward` is Y. Raises ValueError for arguments that no kernel takes."""

    def check(name: str, ok: bool, expected: str, found: object) -> None:
        expect("backward", name, ok, expected, found)

    check("residual", residual.ndim == 2, "two dimensions", residual.shape)
    check("dy", dy.shape == residual.shape, f"the residual's shape {residual.shape}", dy.shape)
    check("activation", activation in ACTIVATIONS, f"one of {', '.join(ACTIVATIONS)}", activation)
    known = ACTIVATIONS[activation].from_output
    found = known if from_output is None else from_output
    check("from_output", known or not found, f"False for {activation}", found)
    return found


def cheapest(tiles: Sequence[Tile], batch: int, m: int, n: int, sm_count: int | None) -> Tile:
    """Of tiles ``(rows, columns, ...)`` the one in which a result takes least time.

    Waves of CTAs times the time of a tile, where a tile costs what it multiplies or what it loads, whichever is more.
    """
    sms = _mosaic.sm_count(sm_count)

    def cost(tile: Tile) -> float:
        rows, columns = tile[:2]
        waves = math.ceil(batch * math.ceil(m / rows) * math.ceil(n / columns) / sms)
        return waves * max(rows * columns, 96 * (rows + columns))

    return min(tiles, key=cost)
