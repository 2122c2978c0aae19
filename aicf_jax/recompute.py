"""Recomputation that stays one.

A backward that computes something again, from the little that is kept, keeps it after all when the compiler sees that
the forward computed the same: then the value lives from the one to the other. `jax.checkpoint` meets the same trouble
with the same means.
"""

from __future__ import annotations

from typing import Any

import jax

#: A smaller array stays in a cache whatever is done, and launching what computes it again costs more than keeping it.
SMALLEST_BYTES = 1 << 20


def recomputed(values: Any) -> Any:
    """The same arrays (any tree), such that what is computed from them is not merged with what was computed before."""
    return jax.lax.optimization_barrier(values)
