"""What jax's simulator of Mosaic GPU lacks before 0.11: tests of it are skipped by name there."""

import pytest

from pallas_kernels import _compat


def skip_what_it_lacks(*, bounds=True, transposes=True):
    """Skips the test where it wants `bounds`, or products of `transposes`, that this jax's simulator has not."""
    if bounds and not _compat.simulates_bounds():
        pytest.skip("this jax's simulator neither fills nor clips what TMA moves beyond an array")
    if transposes and not _compat.simulates_transposes():
        pytest.skip("this jax's simulator cannot multiply a transposed ref")
