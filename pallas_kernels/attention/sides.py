"""Arrays beside the scores: segment ids and masks of keys, read as vectors; masks, biases and dropout, by tiles.

A segment id is a number of each query and each key; a key is seen where both are the same. Padding of keys is the case
where all queries have the id 0. None of it needs an array of queries x keys. What is such an array is read by tiles of
the size that scores are computed in, through TMA, in the order of the blocks of keys.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat, _mosaic
from pallas_kernels.attention import dropout
from pallas_kernels.attention.config import QUERY_ROWS
from pallas_kernels.attention.dropout import Bernoulli, Keep

#: Rows of an atom of shared memory; TMA tiles arrays by atoms, so that lengths are padded to whole ones.
ATOM_ROWS = 8

#: Bytes of the narrowest atom.
_ATOM_BYTES = 32


Shared = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Sides:
    """Which arrays there are beside a tile of scores, by their shapes; a dimension of 1 is shared.

    A row of a tile is a query and a column a key, or the other way round.

    Attributes:
      segments: for each pair of ids, of rows and of columns: ``(B or 1, H or 1)``. None: the id 0 for all of them.
      mask: None, or ``(B or 1, H or 1)``.
      bias: None, or ``(B or 1, H or 1)``.
      bias_dtype: its type in memory.
      bias_factor: what it is multiplied by.
      row_bias: None, or ``(B or 1, H or 1)``: the same for all columns.
      column_bias: None, or ``(B or 1, H or 1)``: the same for all rows.
      fill: what a hidden score is.
      keep: dropout of the weights, which the scores know nothing of.
    """

    segments: tuple[tuple[Shared | None, Shared | None], ...] = ()
    mask: Shared | None = None
    bias: Shared | None = None
    bias_dtype: str = "float32"
    bias_factor: float = 1.0
    row_bias: Shared | None = None
    column_bias: Shared | None = None
    fill: float = -math.inf
    keep: Keep | None = None

    @property
    def rows(self) -> dict[str, Shared]:
        """What there is of each row, by name."""
        return _there({**{f"row_ids_{i}": a for i, (a, _) in enumerate(self.segments)}, "row_bias": self.row_bias})

    @property
    def columns(self) -> dict[str, Shared]:
        """What there is of each column."""
        ids = {f"column_ids_{i}": b for i, (_, b) in enumerate(self.segments)}
        return _there({**ids, "column_bias": self.column_bias})

    @property
    def tiles(self) -> dict[str, Shared]:
        """What there is of each score."""
        keep = self.keep.shape if self.keep is not None and self.keep.is_read else None
        return _there({"mask": self.mask, "bias": self.bias, "keep": keep})

    @property
    def has_arrays(self) -> bool:
        """Whether there are any of the scores."""
        return bool(self.segments) or self.mask is not None or self.has_bias

    @property
    def has_bias(self) -> bool:
        return any(x is not None for x in (self.bias, self.row_bias, self.column_bias))

    @property
    def is_exact(self) -> bool:
        """Whether scores are kept as they are: fills and biases may be so large that no factor may be put off."""
        return self.has_bias or self.fill != -math.inf

    @property
    def per_score(self) -> int:
        """Bytes read for each score."""
        return sum(1 if name != "bias" else jnp.dtype(self.bias_dtype).itemsize for name in self.tiles)

    @property
    def per_column(self) -> int:
        """Bytes read for each column."""
        return 4 * len(self.columns)

    def copies(self, warpgroups: int) -> int:
        """TMA copies for each block of columns."""
        return len(self.columns) + warpgroups * len(self.tiles)


def _there(found: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in found.items() if x is not None}


# -- on the host -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The arrays themselves, as `forward` describes them."""

    segments: tuple[tuple[Any, Any], ...] = ()
    mask: Any = None
    bias: Any = None
    key_bias: Any = None
    keep: Any = None

    @property
    def has_tiles(self) -> bool:
        """Whether some are of each score."""
        return any(x is not None for x in (self.mask, self.bias, self.keep))

    def described(self, bias_factor: float, fill: float, keep_factor: float, turned: bool = False) -> Sides:
        """`turned`: for tiles whose rows are keys."""

        def shape(x: Any) -> Any:
            return None if x is None else tuple(x.shape[:2])

        pairs = tuple((shape(a), shape(b)) for a, b in self.segments)
        return Sides(
            tuple((b, a) for a, b in pairs) if turned else pairs,
            shape(self.mask),
            shape(self.bias),
            "float32" if self.bias is None else str(self.bias.dtype),
            float(bias_factor),
            shape(self.key_bias) if turned else None,
            None if turned else shape(self.key_bias),
            float(fill),
            dropout.described(self.keep, keep_factor),
        )

    def prepared(self, rows: int, columns: int, turned: bool = False) -> list[Any]:
        """As the kernel reads them: vectors padded to whole blocks (rows, columns), tiles to whole atoms."""
        pairs = [pair[::-1] if turned else pair for pair in self.segments]
        of_rows, of_columns = ([pair[i].astype(jnp.int32) for pair in pairs if pair[i] is not None] for i in (0, 1))
        if self.key_bias is not None:
            (of_rows if turned else of_columns).append(self.key_bias.astype(jnp.float32))
        is_drawn = isinstance(self.keep, Bernoulli)
        mask, keep = (None if x is None else x.astype(jnp.int8) for x in (self.mask, None if is_drawn else self.keep))
        tiles = [x for x in (mask, self.bias, keep) if x is not None]
        return [
            *(_longer(x, 2, rows) for x in of_rows),
            *(_longer(x, 2, columns) for x in of_columns),
            *(_whole_atoms(x.swapaxes(2, 3) if turned else x) for x in tiles),
            *([self.keep.words] if is_drawn else []),
        ]


def _whole_atoms(x: Any) -> Any:
    width = _ATOM_BYTES // x.dtype.itemsize
    return _longer(_longer(x, 2, x.shape[2] + -x.shape[2] % ATOM_ROWS), 3, x.shape[3] + -x.shape[3] % width)


def _longer(x: Any, dim: int, length: int) -> Any:
    return jnp.pad(x, [(0, length - n if d == dim else 0) for d, n in enumerate(x.shape)])


# -- in the kernel -----------------------------------------------------------------------------------------------------


def named(sides: Sides, refs: Sequence[Any]) -> dict[str, Any]:
    """The kernel's references by name, in the order of `prepared`."""
    words = ["words"] if sides.keep is not None and not sides.keep.is_read else []
    return dict(zip((*sides.rows, *sides.columns, *sides.tiles, *words), refs, strict=True))


def allocations(sides: Sides, stages: int, warpgroups: int, width: int, refs: Mapping[str, Any]) -> dict[str, Any]:
    """Shared memory for the blocks in flight, of `width` columns."""
    gpu = _mosaic.mosaic().gpu
    found = {f"{name}_smem": gpu.SMEM((stages, width), refs[name].dtype) for name in sides.columns}
    for name in sides.tiles:
        dtype = refs[name].dtype
        swizzle = _swizzle(refs[name].shape[3] * dtype.itemsize, width * dtype.itemsize)
        tiled = gpu.TilingTransform((ATOM_ROWS, swizzle // dtype.itemsize)), gpu.SwizzleTransform(swizzle)
        found[f"{name}_smem"] = gpu.SMEM((stages, warpgroups, QUERY_ROWS, width), dtype, transforms=tiled)
    return found


def _swizzle(row_bytes: int, block_bytes: int) -> int:
    return next(b for b in (128, 64, 32) if row_bytes % b == 0 and block_bytes % b == 0)


def load(sides: Sides, refs: Mapping[str, Any], smem: Any, place: Any, columns: Any, slot: Any, loaded: Any) -> None:
    """Copies what belongs to a block of columns. `place`: batch, head and the rows of each warpgroup."""
    gpu = _mosaic.mosaic().gpu
    batch, head, rows = place
    for name, shape in sides.columns.items():
        source = refs[name].at[(*_index(shape, batch, head), columns)]
        gpu.copy_gmem_to_smem(source, smem[f"{name}_smem"].at[slot], loaded)
    for name, shape in sides.tiles.items():
        for wg, mine in enumerate(rows):
            source = refs[name].at[(*_index(shape, batch, head), mine, columns)]
            gpu.copy_gmem_to_smem(source, smem[f"{name}_smem"].at[slot, wg], loaded)


def _index(shape: Shared, batch: Any, head: Any) -> tuple[Any, Any]:
    return (batch if shape[0] > 1 else 0), (head if shape[1] > 1 else 0)


def of_rows(sides: Sides, refs: Mapping[str, Any], batch: Any, head: Any, rows: Any, simulated: bool) -> dict[str, Any]:
    """What there is of the rows of a warpgroup, a number a row."""
    layout = _mosaic.mosaic().gpu.Layout.WGMMA.reduce(1)
    return {
        name: _compat.load(refs[name].at[(*_index(shape, batch, head), rows)], layout, simulated)
        for name, shape in sides.rows.items()
    }


def biased(sides: Sides, mine: Mapping[str, Any], scores: Any, smem: Any, slot: Any, wg: Any, simulated: bool) -> Any:
    """Scores with what is added to them. `mine`: `of_rows`, and the tile of the bias where it is at hand."""
    if sides.bias is not None:
        bias = mine["bias"] if "bias" in mine else tile(smem, "bias", slot, wg, simulated).astype(jnp.float32)
        scores = scores + (bias if sides.bias_factor == 1.0 else bias * sides.bias_factor)
    if sides.row_bias is not None:
        scores = scores + jax.lax.broadcast_in_dim(mine["row_bias"], scores.shape, (0,))
    if sides.column_bias is not None:
        scores = scores + jax.lax.broadcast_in_dim(smem["column_bias_smem"][slot], scores.shape, (1,))
    return scores


def seen(
    sides: Sides, mine: Mapping[str, Any], shape: Any, smem: Any, slot: Any, wg: Any, simulated: bool
) -> list[Any]:
    """Which of the scores of a tile the arrays leave: conditions."""
    conditions = []
    for i, (of_row, of_column) in enumerate(sides.segments):
        row = 0 if of_row is None else jax.lax.broadcast_in_dim(mine[f"row_ids_{i}"], shape, (0,))
        column = 0 if of_column is None else jax.lax.broadcast_in_dim(smem[f"column_ids_{i}_smem"][slot], shape, (1,))
        conditions.append(column == row)
    if sides.mask is not None:
        conditions.append(tile(smem, "mask", slot, wg, simulated) != 0)
    return conditions


def tile(smem: Any, name: str, slot: Any, wg: Any, simulated: bool) -> Any:
    """What there is of each score of a block, in registers as the scores are."""
    return _compat.load(smem[f"{name}_smem"].at[slot, wg], _mosaic.mosaic().gpu.Layout.WGMMA, simulated)
