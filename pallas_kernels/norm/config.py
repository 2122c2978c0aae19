"""How rows are laid over threads and blocks, and how a row of any length is cut into vectors."""

from __future__ import annotations

import dataclasses

#: Lanes of a warp and threads of the one warpgroup that a block has.
LANES, THREADS = 32, 128

#: Elements of a row that a thread may hold in registers.
MAX_ELEMENTS = 64

#: The longest row one block can hold.
MAX_LENGTH = THREADS * MAX_ELEMENTS

#: Rows of at most this many elements are given to one warp each.
_SHORT = 1024


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """One launch.

    Attributes:
      rows: rows that a block has in registers at once: 1, over all four warps, or 4, one for each warp.
      blocks: size of the grid. Each block takes every `blocks`-th group of rows.
      lean: for long rows, with no register to spare: the next rows are not read ahead, and the backward computes
        again what it would hold, and adds up the gradients of scale and bias in shared memory.

    Raises:
      ValueError: naming the attribute, what was expected, what was found.
    """

    rows: int
    blocks: int
    lean: bool = False

    def __post_init__(self) -> None:
        if self.rows not in (1, 4):
            raise ValueError(f"NormConfig(rows=...): expected 1 or 4, found {self.rows!r}")
        if self.blocks < 1:
            raise ValueError(f"NormConfig(blocks=...): expected at least 1, found {self.blocks!r}")

    @property
    def threads(self) -> int:
        """Threads that share one row."""
        return THREADS // self.rows

    def check(self, count: int, length: int) -> None:
        """Raises ValueError unless this is a launch for `count` rows of `length` elements."""
        if count % self.rows:
            raise ValueError(f"NormConfig(rows={self.rows}): expected a multiple of it as rows, found {count}")
        if self.blocks > count // self.rows:
            raise ValueError(
                f"NormConfig(blocks={self.blocks}): expected at most one for {self.rows} row(s), found {count} rows"
            )
        if length > self.threads * MAX_ELEMENTS:
            raise ValueError(
                f"NormConfig(rows={self.rows}): expected rows of at most {self.threads * MAX_ELEMENTS} elements, "
                f"found {length}"
            )


def default_rows(count: int, length: int) -> int:
    """Rows a block works on at once."""
    return 4 if length <= _SHORT and count % 4 == 0 else 1


def default(count: int, length: int, itemsize: int, sm_count: int, backward: bool = False) -> NormConfig:
    """The launch for `count` rows of `length` elements of `itemsize` bytes.

    As many blocks as keep some 32 KiB of each array in flight on a multiprocessor; two in the backward, where each
    block writes sums as long as a row.
    """
    rows = default_rows(count, length)
    elements = max(1, length * rows // THREADS)
    resident = max(2, min(2 if backward else 16, 128 // elements))
    lean = elements * itemsize > (64 if backward else 128)
    return NormConfig(rows, min(count // rows, sm_count * resident), lean)


def padded_length(count: int, length: int) -> int:
    """The length rows have in memory: no shorter than the threads that share one by default."""
    return padded(length, THREADS // default_rows(count, length))


def partial_bytes(count: int, length: int, itemsize: int, sm_count: int = 132) -> int:
    """Bytes written and read for one sum over rows, by default."""
    return 8 * length * default(count, length, itemsize, sm_count, backward=True).blocks


@dataclasses.dataclass(frozen=True)
class Segment:
    """Columns ``start … start + width - 1``, `vector` neighbours in each thread's access.

    Of them the first `first` belong to the segment before as well, and those from `last` on are padding: neither is
    counted in sums along the row.
    """

    start: int
    width: int
    vector: int
    first: int
    last: int

    @property
    def is_whole(self) -> bool:
        return self.first == 0 and self.last == self.width


def padded(length: int, threads: int) -> int:
    """The length that rows must have in memory: no shorter than the threads that share one."""
    return max(length, threads)


def segments(length: int, threads: int, vector: int) -> tuple[Segment, ...]:
    """A row cut into accesses that are as wide as its alignment allows, and at most `vector` elements.

    A remainder shorter than `threads` is read with the elements before it, which are there already.
    """
    if length <= threads:
        return (Segment(0, threads, 1, 0, length),)
    found: list[Segment] = []
    start = 0
    while vector:
        count = (length - start) // (threads * vector) if length % vector == 0 else 0
        if count:
            width = count * threads * vector
            found.append(Segment(start, width, vector, 0, width))
            start += width
        vector //= 2
    if start < length:
        found.append(Segment(length - threads, threads, 1, threads - (length - start), threads))
    return tuple(found)
