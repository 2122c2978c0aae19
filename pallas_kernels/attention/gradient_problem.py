"""What the kernels of the backward are specialized on, their tiles, and how blocks come into shared memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _mosaic
from pallas_kernels._arguments import expect_attribute
from pallas_kernels.attention.arguments import Sizes
from pallas_kernels.attention.scores import Band
from pallas_kernels.attention.sides import Sides

#: Rows of a warpgroup: one wgmma is 64 high.
ROWS = 64

#: Warpgroups. There is none that only loads: sums and tiles take more than two thirds of the registers.
WARPGROUPS = 2

#: Queries or keys that a CTA owns.
CTA_ROWS = ROWS * WARPGROUPS

#: Lengths are padded to multiples of it: a TMA descriptor tiles arrays by atoms of shared memory of so many rows.
ATOM_ROWS = 8

#: The longest head whose sums of dK and dV fit in the registers of one warpgroup, and whose rows of Q, O and dO fit in
#: shared memory at once.
LONGEST_WHOLE = 128


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """How `backward` cuts its work.

    Attributes:
      block_k: keys that the kernel of dQ multiplies at a time.
      block_q: queries that the kernel of dK and dV multiplies at a time.
      stages: blocks in flight.
      split_sums: whether one warpgroup sums dK and the other one dV, of the same 64 keys; else each sums both, of 64
        keys of its own. Half as many registers, five products instead of four.

    Raises:
      ValueError: naming the attribute, what was expected, what was found.
    """

    block_k: int = 64
    block_q: int = 64
    stages: int = 2
    split_sums: bool = False

    def __post_init__(self) -> None:
        # Two float32 tiles, of P and dP, take a register of each thread for each column.
        expect_attribute(self, "block_k", self.block_k in (32, 64, 128), "32, 64 or 128")
        expect_attribute(self, "block_q", self.block_q in (32, 64, 128), "32, 64 or 128")
        expect_attribute(self, "stages", self.stages >= 2, "at least 2")

    @property
    def key_rows(self) -> int:
        """Keys of a CTA of the kernel of dK and dV."""
        return ROWS if self.split_sums else CTA_ROWS

    def smem_bytes(self, head_dim: int, per_score: int = 0, per_column: int = 0) -> int:
        """Shared memory of the kernel that takes more of it, with barriers and what aligns blocks.

        `per_score`, `per_column`: bytes of the arrays beside the scores.
        """
        row = head_dim * 2
        owned = (2 if head_dim > LONGEST_WHOLE else 3) * CTA_ROWS * row
        key, query = (2 * row + rows * per_score + per_column for rows in (CTA_ROWS, self.key_rows))
        queries = owned + 5 * CTA_ROWS * 4 + self.stages * self.block_k * key
        keys = 2 * self.key_rows * row + self.stages * self.block_q * (query + 12)
        return 4096 + max(queries, keys)


def default_backward(
    head_dim: int, is_plain: bool, per_score: int = 0, per_column: int = 0, is_drawn: bool = False
) -> BackwardConfig:
    """A configuration for heads of this length: as many blocks in flight as there is shared memory for, at most 4.

    Tiles as large as registers allow, beside sums. `is_plain`: no softcap, whose slope is one more tile. `per_score`,
    `per_column`: bytes of what is beside the scores. `is_drawn`: whether dropout is, whose numbers are two more tiles.
    """
    # How much room is taken beside the sums and the tiles of P and dP: arrays of one kind take less than of several.
    beside = 2 * is_drawn + (not is_plain)
    beside += sum((n > 0) + (n not in (0, 1, 2, 4)) for n in (per_score, per_column))
    if head_dim <= 64:
        is_split, most = False, 4
        block_q = 32 if is_drawn else 64
        block_k = 128 if not beside else 32 if is_drawn and beside > 3 else 64
    elif head_dim <= LONGEST_WHOLE:
        is_split = beside > (2 if head_dim <= 96 else 1)
        block_q = 64 if head_dim <= 96 and not beside else 32
        block_k = 32 if is_drawn else 64
        # A slot among three takes a division, and so registers, which tiles beside the scores leave none of.
        most = 2 if per_score else 3 if is_drawn else 4
    else:
        is_split, most = True, 3 if is_drawn else 4
        block_q = 64 if head_dim <= 192 and not is_drawn else 32
        block_k = 32 if beside else 64
    found = [BackwardConfig(n, block_q, s, is_split) for n in (block_k, 32) for s in (4, 3, 2) if s <= most]
    fitting = (c for c in found if c.smem_bytes(head_dim, per_score, per_column) <= _mosaic.HOPPER_SMEM_BYTES)
    return next(fitting, found[-1])


@dataclasses.dataclass(frozen=True)
class Problem(Sizes):
    """Everything the kernels are specialized on.

    `band`: the keys that a query sees. `sides`: what lies beside tiles whose rows are queries; `turned`: beside those
    whose rows are keys. `of_keys`: whether the gradient of a bias of keys is wanted.
    """

    dtype: Any
    layouts: tuple[str, ...]
    scale: float
    band: Band
    softcap: float | None
    config: BackwardConfig
    simulated: bool
    sides: Sides
    turned: Sides
    of_keys: bool

    @property
    def may_see_all(self) -> bool:
        """Whether rows that have seen nothing but the fill give weights to keys outside of the band."""
        return self.sides.fill != -math.inf and self.band != Band(None, None)

    @property
    def numbers(self) -> int:
        """Float32 numbers of each query between the kernels."""
        return 3 if self.sides.is_exact else 2

    def like(self, layout: str, heads: int, length: int) -> Any:
        """The type of an array with padded rows."""
        sizes = {"b": self.batch, "h": heads, "s": length + -length % ATOM_ROWS, "d": self.head_dim}
        return jax.ShapeDtypeStruct(tuple(sizes[d] for d in layout), self.dtype)

    def row_numbers(self) -> Any:
        """The type of float32 numbers of each query, for whole CTAs."""
        rows = -(-self.queries // CTA_ROWS) * CTA_ROWS
        return jax.ShapeDtypeStruct((self.batch, self.heads, rows), jnp.float32)

    @property
    def is_long(self) -> bool:
        """Whether rows of Q come where those of O have been, and sums leave registers for one loop only."""
        return self.head_dim > LONGEST_WHOLE

    def tiles(self, count: int, rows: int, block: int, columns: int | None = None) -> Any:
        """Shared memory for 16-bit tiles that are multiplied, in sums over a head and over `block` rows.

        Both are whole numbers of atoms.
        """
        gpu, width = _mosaic.mosaic().gpu, math.gcd(64, self.head_dim, block)
        transforms = gpu.TilingTransform((ATOM_ROWS, width)), gpu.SwizzleTransform(2 * width)
        return gpu.SMEM((count, rows, columns or self.head_dim), self.dtype, transforms=transforms)

    def staging(self, columns: int) -> dict[str, Any]:
        """Shared memory that the simulator wants for operands that are in registers elsewhere."""
        return {"staging": self.tiles(WARPGROUPS, ROWS, columns, columns)} if self.simulated else {}


def kernel(
    p: Problem, name: str, body: Callable[..., None], grid: tuple[int, ...], out_type: Any, interpret: Any
) -> Any:
    """A kernel of two warpgroups over a grid of ``(head, block, batch)``."""
    gpu = _mosaic.mosaic().gpu
    return gpu.kernel(
        body,
        out_type=out_type,
        grid=grid,
        grid_names=("head", "block", "batch"),
        num_threads=WARPGROUPS,
        thread_name="wg",
        compiler_params=gpu.CompilerParams(approx_math=True, lowering_semantics=gpu.LoweringSemantics.Warpgroup),
        kernel_name=name,
        interpret=interpret,
    )


def at(ref: Any, layout: str, batch: Any, head: Any, rows: Any) -> Any:
    """Some rows of one head."""
    return ref.at[batch, rows, head] if layout == "bshd" else ref.at[batch, head, rows]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Blocks in flight: loaded by the first warpgroup, used by all.

    Attributes:
      stages: slots.
      total: steps.
      load: ``load(step, slot, barrier)`` starts the copies of a step.
      loaded: a barrier for each slot.
      used: likewise, at which all warpgroups arrive.
    """

    stages: int
    total: Any
    load: Callable[[Any, Any, Any], None]
    loaded: Any
    used: Any

    def slot(self, step: Any) -> Any:
        return jax.lax.rem(step, jnp.int32(self.stages))

    def _start(self, step: Any) -> None:
        slot = self.slot(step)
        self.load(step, slot, self.loaded.at[slot])

    def start(self) -> None:
        """The first steps, into slots that are free."""
        pl = _mosaic.mosaic().pl

        @pl.when(_is_first())
        def _fill() -> None:
            pl.loop(jnp.int32(0), jnp.minimum(self.total, self.stages))(self._start)

    def refill(self, step: Any) -> None:
        """What comes into the slot of the step before, once all are done with it. Called amid each step."""
        pl, gpu = _mosaic.mosaic().pl, _mosaic.mosaic().gpu
        coming = step - 1 + self.stages

        @pl.when(_is_first() & (step > 0) & (coming < self.total))
        def _next() -> None:
            gpu.barrier_wait(self.used.at[self.slot(coming)])
            self._start(coming)

    def finish(self) -> None:
        """What is released for good is waited for too, so that each phase of a barrier has been seen."""
        pl, gpu = _mosaic.mosaic().pl, _mosaic.mosaic().gpu

        @pl.when(_is_first())
        def _rest() -> None:
            @pl.loop(jnp.maximum(self.total - self.stages, 0), self.total)
            def _step(step: Any) -> None:
                gpu.barrier_wait(self.used.at[self.slot(step)])


def _is_first() -> Any:
    return jax.lax.axis_index("wg") == 0
