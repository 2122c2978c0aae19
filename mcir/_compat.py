"""The only file of this package that depends on the version of jax; tried on jax 0.10.2, 0.11.2 and 0.12.0.1."""

from __future__ import annotations

import jax


def rows_of_products() -> int:
    """How many rows a product in a CPU's tiles should have.

    Before jax 0.11 XLA runs one of fewer than 512 on one core, whatever batch it has; since then batches are spread
    over cores.
    """
    return 512 if jax.__version_info__ < (0, 11) else 256
