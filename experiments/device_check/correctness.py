"""Is a kernel right: its results beside those in float64, on the device, and the same bits on every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.device_case import DeviceCase

#: Runs that must give the same bits: what a race changes, it seldom changes every time.
REPEATS = 3


def arrays_of(case: DeviceCase, seed: int) -> tuple[Any, ...]:
    """The arguments of a case, on the device."""
    return jax.block_until_ready(jax.jit(case.arrays)(jax.random.key(seed)))


def check(case: DeviceCase, kernel: Callable[..., Any], args: Sequence[Any]) -> dict[str, Any]:
    """``{errors, tolerances, repeats, correct}``; errors are relative to the largest magnitude of each result."""
    got = kernel(*args)
    repeats = all(_same_bits(got, kernel(*args)) for _ in range(REPEATS - 1))
    with jax.enable_x64(True):
        found = jax.jit(lambda args, got: _errors(case.reference(*args), got))(tuple(args), tuple(got))
        errors = [float(e) for e in found]
    if len(errors) != len(case.tolerances):
        raise ValueError(f"{case.name}: {len(case.tolerances)} tolerances for {len(errors)} results")
    close = all(e <= t for e, t in zip(errors, case.tolerances, strict=True))
    # JSON has no NaN: None is a result that is not a number where it should be, or the reverse
    return {
        "errors": [e if e == e and e != float("inf") else None for e in errors],
        "tolerances": list(case.tolerances),
        "repeats": repeats,
        "correct": close and repeats,
    }


def _errors(expected: Sequence[Any], got: Sequence[Any]) -> list[Any]:
    if len(expected) != len(got) or any(e.shape != g.shape for e, g in zip(expected, got, strict=True)):
        shapes = [[x.shape for x in xs] for xs in (expected, got)]
        raise ValueError(f"expected results of the shapes {shapes[0]}, found {shapes[1]}")
    return [
        jnp.max(jnp.abs(g.astype(jnp.float64) - e)) / jnp.maximum(jnp.max(jnp.abs(e)), 1e-30)
        for e, g in zip(expected, got, strict=True)
    ]


def _same_bits(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return all(bool(jnp.array_equal(_bits(x), _bits(y))) for x, y in zip(a, b, strict=True))


def _bits(x: Any) -> Any:
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
