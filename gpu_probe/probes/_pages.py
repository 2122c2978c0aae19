"""Memory in large pages, so that what is measured is a cache and not where small pages happen to lie."""

from __future__ import annotations

import contextlib
import mmap

import jax
import jax.numpy as jnp
import numpy as np

#: Bytes of a large page of x86-64 and of the usual tables of Arm.
LARGE_PAGE = 2 << 20


def in_large_pages(x: np.ndarray) -> jax.Array:
    """A copy of `x` as an array of jax in pages of 2 MiB, where the system gives them; else in those it has.

    A cache finds a line by its physical address: pages of 4 KiB, wherever they lie, fill some of its sets twice and
    leave others empty, so that it looks smaller than it is, by another factor in every run.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return jnp.asarray(x)
    room = -(-max(x.nbytes, 1) // LARGE_PAGE) * LARGE_PAGE
    # Shared memory, which `mmap` makes unless told otherwise, is kept in small pages.
    memory = mmap.mmap(-1, room + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # of systems that were built without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(memory, np.uint8)
    begin = -raw.ctypes.data % LARGE_PAGE
    found = raw[begin : begin + x.nbytes].view(x.dtype).reshape(x.shape)
    found[...] = x
    return jax.dlpack.from_dlpack(found)
