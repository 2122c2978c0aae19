"""What the kernels of the backward do with a tile of scores, whichever way round it lies, and which tiles they visit.

A row of a tile is a query and a column a key, or with the band turned over (`turned`) a row is a key.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _mosaic

LOG2_E = math.log2(math.e)


class Band(NamedTuple):
    """The columns a row sees: ``lower <= column - row <= upper``. None: no limit."""

    lower: int | None
    upper: int | None

    @property
    def turned(self) -> Band:
        """The rows that a column is seen by."""
        return Band(*(None if x is None else -x for x in (self.upper, self.lower)))


class Blocks(NamedTuple):
    """Blocks of columns that some rows visit: from `first` to `stop`.

    Those in ``full <= block < ragged`` are seen by all the rows as a whole.
    """

    first: Any
    full: Any
    ragged: Any
    stop: Any

    @property
    def visited(self) -> Any:
        return self.stop - self.first


def blocks(band: Band, first_row: Any, last_row: Any, columns: int, width: int, tail_is_full: bool) -> Blocks:
    """The blocks of `width` columns that rows from `first_row` to `last_row` visit.

    `tail_is_full`: what lies beyond the last column need not be hidden.
    """

    def ends_in(n: Any) -> Any:
        return jax.lax.div(jnp.maximum(n, 0) + (width - 1), jnp.int32(width))

    def begins_in(n: Any) -> Any:
        return jax.lax.div(jnp.maximum(n, 0), jnp.int32(width))

    whole = -(-columns // width)
    first, stop = jnp.int32(0), jnp.int32(whole)
    full, ragged = jnp.int32(0), jnp.int32(whole if tail_is_full else columns // width)
    if band.lower is not None:
        first = jnp.minimum(begins_in(first_row + band.lower), whole)
        full = ends_in(last_row + band.lower)
    if band.upper is not None:
        stop = jnp.minimum(stop, ends_in(last_row + band.upper + 1))
        ragged = jnp.minimum(ragged, begins_in(first_row + band.upper + 1))
    stop = jnp.maximum(stop, first)
    full = jnp.minimum(jnp.maximum(full, first), stop)
    return Blocks(first, full, jnp.minimum(jnp.maximum(ragged, full), stop), stop)


def all_if(condition: Any, found: Blocks, columns: int, width: int) -> Blocks:
    """All blocks, of which limits hide some scores, or those that were found."""
    whole = -(-columns // width)
    return Blocks(*(jnp.where(condition, x, y) for x, y in zip((0, 0, 0, whole), found, strict=True)))


def sweep(found: Blocks, band: Band, has_tail: bool, step: Callable[..., Any], carry: Any, in_one: bool = False) -> Any:
    """``step(masked, block, carry)`` for every block that is visited, in order.

    `in_one`: one loop that masks wherever some block needs it. A carry that fills the registers is not handed over from
    loop to loop without more of them.
    """
    if in_one and (band != Band(None, None) or has_tail):
        return jax.lax.fori_loop(found.first, found.stop, functools.partial(step, True), carry)
    if band.lower is not None:
        carry = jax.lax.fori_loop(found.first, found.full, functools.partial(step, True), carry)
    carry = jax.lax.fori_loop(found.full, found.ragged, functools.partial(step, False), carry)
    if band != Band(None, None) or has_tail:
        carry = jax.lax.fori_loop(found.ragged, found.stop, functools.partial(step, True), carry)
    return carry


def seen(band: Band, shape: tuple[int, int], first_row: Any, first_column: Any, columns: int | None) -> Any:
    """Which elements of a tile are in the band, and before the last column where `columns` is given; None: all.

    Limits are one number a row, of which a compiler does not know that only `first_column` changes in a loop. It would
    solve for it otherwise, and keep the result for each element and limit in a register. What is compared with the
    limits is, of the column of an element, a constant of the program: what depends on the thread lies below 8.
    """
    if band == Band(None, None) and columns is None:
        return None  # and nothing that is not used: for what nothing constrains Mosaic tries all layouts
    rows = jax.lax.broadcasted_iota(jnp.int32, shape[:1], 0) + (first_row - first_column)
    most = None if band.upper is None else rows + band.upper
    if columns is not None:
        # A number a row also where the last column alone is a limit: Mosaic searches long for where to keep a constant.
        most = jnp.minimum(rows + columns if most is None else most, columns - 1 - first_column)
    least = None if band.lower is None else rows + band.lower
    column = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    low, high = column & 7, column & ~7

    def limit(x: Any) -> Any:
        return jax.lax.broadcast_in_dim(jax.lax.optimization_barrier(x), shape, (0,)) - low

    conditions = []
    if most is not None:
        conditions.append(high <= limit(most))
    if least is not None:
        conditions.append(high >= limit(least))
    return functools.reduce(jnp.logical_and, conditions) if conditions else None


def multiply(*pairs: tuple[Any, Any]) -> tuple[Any, ...]:
    """Products of refs in shared memory, one behind the other on the tensor cores."""
    pl, gpu = _mosaic.mosaic().pl, _mosaic.mosaic().gpu

    def products(*accumulators: Any) -> tuple[Any, ...]:
        for acc, (a, b) in zip(accumulators, pairs, strict=True):
            gpu.wgmma(acc, a, b)
        return tuple(acc[...] for acc in accumulators)

    kinds = [gpu.ACC((a.shape[0], b.shape[1]), jnp.float32) for a, b in pairs]
    return tuple(pl.run_scoped(products, *kinds))


def add_products(totals: tuple[Any, ...], pairs: tuple[tuple[Any, Any], ...], staging: Any) -> tuple[Any, ...]:
    """Each total (None: 0) plus the product of an array in registers, or a ref, and a ref.

    `staging`: None on a GPU. The simulator knows no product of registers and no accumulator that starts with a value:
    there a ref through which arrays go.
    """
    pl, gpu = _mosaic.mosaic().pl, _mosaic.mosaic().gpu
    if staging is None:

        def add(accumulators: Any) -> None:
            for acc, (a, b) in zip(accumulators, pairs, strict=True):
                gpu.wgmma(acc, a, b)

        starts = [
            jnp.zeros((a.shape[0], b.shape[1]), jnp.float32) if t is None else t
            for t, (a, b) in zip(totals, pairs, strict=True)
        ]
        return tuple(pl.run_state(add)(tuple(map(gpu.ACC.init, starts))))
    found = []
    for total, (a, b) in zip(totals, pairs, strict=True):
        if isinstance(a, jax.Array):
            staging[...] = a
            gpu.commit_smem()
            a = staging
        (product,) = multiply((a, b))
        found.append(product if total is None else total + product)
    return tuple(found)
