"""What the portable kernels of `pallas_kernels` share, in terms of what operations require."""

from __future__ import annotations

#: The machines they are made for.
TARGETS = ("a100", "l4")


def available() -> tuple[str, str] | None:
    """What they need and what there is instead; None where jax-triton works with the installed jax."""
    from pallas_kernels import _triton

    return _triton.unavailable()
