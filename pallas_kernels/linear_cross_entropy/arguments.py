"""The arguments that forward and backward take, checked, and laid out as TMA wants them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels._arguments import expect
from pallas_kernels._padding import padded
from pallas_kernels.gemm_epilogue.config import ATOM_ROWS
from pallas_kernels.linear_cross_entropy._products import Logits
from pallas_kernels.linear_cross_entropy.config import ATOM_COLUMNS, TILE_ROWS


def logits(
    function: str, x: Any, w: Any, labels: Any, trans_w: bool, scale: float, softcap: float | None, base: float,
    simulated: bool,
) -> Logits:  # fmt: skip
    """The product, whose tiles are still to be chosen. Raises ValueError for arguments that no kernel takes."""

    def check(name: str, ok: bool, expected: str, found: object) -> None:
        expect(function, name, ok, expected, found)

    check("x", str(x.dtype) in ("bfloat16", "float16"), "bfloat16 or float16", str(x.dtype))
    check("w", w.dtype == x.dtype, f"x's dtype {x.dtype}", str(w.dtype))
    check("x", x.ndim == 2 and 0 not in x.shape, "two dimensions that are not empty", x.shape)
    check("w", w.ndim == 2 and 0 not in w.shape, "two dimensions that are not empty", w.shape)
    classes, depth = w.shape if trans_w else w.shape[::-1]
    check("w", depth == x.shape[1], f"a depth of {x.shape[1]}", w.shape)
    check("labels", labels.shape == x.shape[:1], f"shape {x.shape[:1]}", labels.shape)
    check("labels", jnp.issubdtype(labels.dtype, jnp.integer), "integers", str(labels.dtype))
    check("scale", 0 < scale < 1e6, "a positive number", scale)
    check("softcap", softcap is None or 0 < softcap < 1e6, "None or a positive number", softcap)
    check("base", 0 < base < 1e6, "a positive number", base)
    return Logits(
        x.shape[0], classes, depth, trans_w, jnp.dtype(x.dtype), float(scale), softcap, float(base), simulated
    )


def aligned(*matrices: Any) -> tuple[Any, ...]:
    """Matrices with zeros at the end of dimensions that TMA could not move."""
    return tuple(padded(padded(x, 0, ATOM_ROWS), 1, ATOM_COLUMNS) for x in matrices)


def labels_of(labels: Any, classes: int) -> Any:
    """Labels of whole blocks of rows; -1 where there is no such class."""
    inside = (labels >= 0) & (labels < classes)
    return rows_of(jnp.where(inside, labels, 0).astype(jnp.int32) - (~inside).astype(jnp.int32))


def rows_of(numbers: Any) -> Any:
    """Numbers of rows, with zeros for those that blocks of rows have beyond the last one."""
    return padded(numbers, numbers.ndim - 1, TILE_ROWS)
