"""Arrays beside the scores: segment ids and masks of keys, read as vectors; masks and biases, read by tiles.

A segment id is a number of each query and each key; a key is seen where both are the same. Padding of keys is the case
where all queries have the id 0. None of it needs an array of queries x keys. What is such an array is read by tiles of
the size that scores are computed in, through TMA, in the order of the blocks of keys.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat, _mosaic
from pallas_kernels.attention.config import QUERY_ROWS

#: Rows of an atom of shared memory; TMA tiles arrays by atoms, so that lengths are padded to whole ones.
ATOM_ROWS = 8

#: Bytes of the narrowest atom.
_ATOM_BYTES = 32


@dataclasses.dataclass(frozen=True)
class Sides:
    """Which arrays there are beside the scores, by their shapes; a dimension of 1 is shared.

    Attributes:
      segments: for each pair ``(of queries or None, of keys)``: ``(B or 1, H or 1)``. None: the id 0 for all queries.
      mask: None, or ``(B or 1, H or 1)``.
      bias: None, or ``(B or 1, H or 1)``.
      bias_dtype: its type in memory.
      bias_factor: what it is multiplied by.
      key_bias: None, or ``(B or 1, H or 1)``: the same for all queries.
      fill: what a hidden score is.
    """

    segments: tuple[tuple[tuple[int, int] | None, tuple[int, int]], ...] = ()
    mask: tuple[int, int] | None = None
    bias: tuple[int, int] | None = None
    bias_dtype: str = "float32"
    bias_factor: float = 1.0
    key_bias: tuple[int, int] | None = None
    fill: float = -math.inf

    @property
    def has_arrays(self) -> bool:
        return bool(self.segments) or self.mask is not None or self.has_bias

    @property
    def has_bias(self) -> bool:
        return self.bias is not None or self.key_bias is not None

    @property
    def is_exact(self) -> bool:
        """Whether scores are kept as they are: fills and biases may be so large that no factor may be put off."""
        return self.has_bias or self.fill != -math.inf

    @property
    def per_score(self) -> int:
        """Bytes read for each score."""
        return (self.mask is not None) + (0 if self.bias is None else jnp.dtype(self.bias_dtype).itemsize)

    @property
    def per_key(self) -> int:
        """Bytes read for each key."""
        return 4 * (len(self.segments) + (self.key_bias is not None))

    def copies(self, warpgroups: int) -> int:
        """TMA copies for each block of keys."""
        tiles = (self.mask is not None) + (self.bias is not None)
        return len(self.segments) + (self.key_bias is not None) + warpgroups * tiles


# -- on the host -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The arrays themselves, as `forward` describes them."""

    segments: tuple[tuple[Any, Any], ...] = ()
    mask: Any = None
    bias: Any = None
    key_bias: Any = None

    def described(self, bias_factor: float, fill: float) -> Sides:
        def shape(x: Any) -> Any:
            return None if x is None else tuple(x.shape[:2])

        return Sides(
            tuple((shape(a), shape(b)) for a, b in self.segments),
            shape(self.mask),
            shape(self.bias),
            "float32" if self.bias is None else str(self.bias.dtype),
            float(bias_factor),
            shape(self.key_bias),
            float(fill),
        )

    def prepared(self, rows: int, columns: int) -> list[Any]:
        """As the kernel reads them: vectors padded to whole blocks (rows, columns), tiles to whole atoms."""
        found = []
        for queries, keys in self.segments:
            if queries is not None:
                found.append(_longer(queries.astype(jnp.int32), 2, rows))
            found.append(_longer(keys.astype(jnp.int32), 2, columns))
        if self.mask is not None:
            found.append(whole_atoms(self.mask.astype(jnp.int8)))
        if self.bias is not None:
            found.append(whole_atoms(self.bias))
        if self.key_bias is not None:
            found.append(_longer(self.key_bias.astype(jnp.float32), 2, columns))
        return found


def whole_atoms(x: Any) -> Any:
    """An array with rows and columns that TMA tiles by atoms of shared memory."""
    width = _ATOM_BYTES // x.dtype.itemsize
    return _longer(_longer(x, 2, x.shape[2] + -x.shape[2] % ATOM_ROWS), 3, x.shape[3] + -x.shape[3] % width)


def _longer(x: Any, dim: int, length: int) -> Any:
    return jnp.pad(x, [(0, length - n if d == dim else 0) for d, n in enumerate(x.shape)])


# -- in the kernel -----------------------------------------------------------------------------------------------------


def named(sides: Sides, refs: Sequence[Any]) -> dict[str, Any]:
    """The kernel's references by name, in the order of `prepared`."""
    names = []
    for i, (queries, _) in enumerate(sides.segments):
        names += [f"query_ids_{i}"] if queries is not None else []
        names.append(f"key_ids_{i}")
    names += ["mask"] if sides.mask is not None else []
    names += ["bias"] if sides.bias is not None else []
    names += ["key_bias"] if sides.key_bias is not None else []
    return dict(zip(names, refs, strict=True))


def allocations(sides: Sides, stages: int, warpgroups: int, block_k: int, refs: Mapping[str, Any]) -> dict[str, Any]:
    """Shared memory for the blocks in flight."""
    gpu = _mosaic.mosaic().gpu
    found = {f"key_ids_{i}": gpu.SMEM((stages, block_k), jnp.int32) for i in range(len(sides.segments))}
    shape = stages, warpgroups, QUERY_ROWS, block_k
    for name, has_tiles in (("mask", sides.mask is not None), ("bias", sides.bias is not None)):
        if has_tiles:
            found[name] = tiles(refs[name], shape)
    if sides.key_bias is not None:
        found["key_bias"] = gpu.SMEM((stages, block_k), jnp.float32)
    return {f"{name}_smem": x for name, x in found.items()}


def tiles(ref: Any, shape: tuple[int, ...]) -> Any:
    """Shared memory of this shape for tiles of an array of queries x keys."""
    gpu, dtype = _mosaic.mosaic().gpu, ref.dtype
    swizzle = _swizzle(ref.shape[3] * dtype.itemsize, shape[-1] * dtype.itemsize)
    tiled = gpu.TilingTransform((ATOM_ROWS, swizzle // dtype.itemsize)), gpu.SwizzleTransform(swizzle)
    return gpu.SMEM(shape, dtype, transforms=tiled)


def _swizzle(row_bytes: int, block_bytes: int) -> int:
    return next(b for b in (128, 64, 32) if row_bytes % b == 0 and block_bytes % b == 0)


def load(sides: Sides, refs: Mapping[str, Any], smem: Any, place: Any, keys: Any, slot: Any, loaded: Any) -> None:
    """Copies what belongs to a block of keys. `place`: batch, head and the first query of each warpgroup."""
    gpu = _mosaic.mosaic().gpu
    batch, head, _ = place
    for i, (_, shape) in enumerate(sides.segments):
        source = refs[f"key_ids_{i}"].at[(*index(shape, batch, head), keys)]
        gpu.copy_gmem_to_smem(source, smem[f"key_ids_{i}_smem"].at[slot], loaded)
    for name, shape in (("mask", sides.mask), ("bias", sides.bias)):
        if shape is not None:
            load_tiles(refs[name], shape, smem[f"{name}_smem"].at[slot], place, keys, loaded)
    if sides.key_bias is not None:
        source = refs["key_bias"].at[(*index(sides.key_bias, batch, head), keys)]
        gpu.copy_gmem_to_smem(source, smem["key_bias_smem"].at[slot], loaded)


def load_tiles(ref: Any, shape: tuple[int, int], smem: Any, place: Any, keys: Any, loaded: Any) -> None:
    """Copies a tile for each warpgroup."""
    batch, head, rows = place
    for wg, queries in enumerate(rows):
        source = ref.at[(*index(shape, batch, head), queries, keys)]
        _mosaic.mosaic().gpu.copy_gmem_to_smem(source, smem.at[wg], loaded)


def index(shape: tuple[int, int], batch: Any, head: Any) -> tuple[Any, Any]:
    """Where an array of ``(B or 1, H or 1)`` has what belongs to a batch and a head."""
    return (batch if shape[0] > 1 else 0), (head if shape[1] > 1 else 0)


def query_ids(sides: Sides, refs: Mapping[str, Any], batch: Any, head: Any, rows: Any, simulated: bool) -> list[Any]:
    """Of the rows of a warpgroup: one number a row for each pair of segment ids, None where all have 0."""
    gpu = _mosaic.mosaic().gpu
    found: list[Any] = []
    for i, (shape, _) in enumerate(sides.segments):
        if shape is None:
            found.append(None)
        else:
            ref = refs[f"query_ids_{i}"].at[(*index(shape, batch, head), rows)]
            found.append(_compat.load(ref, gpu.Layout.WGMMA.reduce(1), simulated))
    return found


def biased(sides: Sides, scores: Any, smem: Any, slot: Any, wg: Any, simulated: bool) -> Any:
    """Scores with what is added to them."""
    if sides.bias is not None:
        bias = tile(smem, "bias", slot, wg, simulated).astype(jnp.float32)
        scores = scores + (bias if sides.bias_factor == 1.0 else bias * sides.bias_factor)
    if sides.key_bias is not None:
        scores = scores + jax.lax.broadcast_in_dim(smem["key_bias_smem"][slot], scores.shape, (1,))
    return scores


def seen(sides: Sides, ids: Sequence[Any], shape: Any, smem: Any, slot: Any, wg: Any, simulated: bool) -> Any:
    """Which of the scores of a tile the arrays leave; None: all."""
    conditions = []
    for i, of_query in enumerate(ids):
        of_key = jax.lax.broadcast_in_dim(smem[f"key_ids_{i}_smem"][slot], shape, (1,))
        conditions.append(of_key == (0 if of_query is None else jax.lax.broadcast_in_dim(of_query, shape, (0,))))
    if sides.mask is not None:
        conditions.append(tile(smem, "mask", slot, wg, simulated) != 0)
    return functools.reduce(jnp.logical_and, conditions) if conditions else None


def tile(smem: Any, name: str, slot: Any, wg: Any, simulated: bool) -> Any:
    """A tile of an array of queries x keys, in registers as the scores are."""
    return _compat.load(smem[f"{name}_smem"].at[slot, wg], _mosaic.mosaic().gpu.Layout.WGMMA, simulated)
