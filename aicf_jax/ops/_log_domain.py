"""Arithmetic on scores and logits that attention and cross entropy share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

#: Low precision accumulates in float32.
ACCUMULATE = {"bfloat16": "float32", "float16": "float32"}


def wide(x: Any, mask: Any) -> Any:
    """X in float32 or wider, -inf where a mask leaves it out."""
    x = x.astype(ACCUMULATE.get(str(x.dtype), x.dtype))
    return x if mask is None else jnp.where(mask, x, -jnp.inf)


def finite(m: Any) -> Any:
    """A maximum, 0 where it is infinite or NaN."""
    return jnp.where(jnp.isfinite(m), m, 0)


@jax.custom_jvp
def capped(x: Any, m: Any) -> Any:
    """x, which is computed anew, rounded otherwise perhaps, and no larger than its maximum m all the same."""
    return jnp.minimum(x, m)


@capped.defjvp
def _capped_jvp(primals: Any, tangents: Any) -> Any:
    # Not that of a minimum, which would split the tangent where x = m.
    return capped(*primals), tangents[0]
