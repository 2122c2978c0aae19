"""Arrays and equations that the tests of attention share, and how close results must come."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

LENGTH, HEADS, WIDTH = 37, 4, 8


def normal(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


Q, K, V = (normal(i, 2, LENGTH, HEADS, WIDTH) for i in range(3))
FEW_K, FEW_V = K[:, :, :2], V[:, :, :2]
library = jax.nn.dot_product_attention
causal = functools.partial(library, is_causal=True)


def scores(q, k):
    return jnp.einsum("bihd,bjhd->bhij", q, k) / 8**0.5


def values(x, v):
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(x, -1), v)


def loss(f):
    return lambda *args: jnp.sum(jnp.square(f(*args).astype(jnp.float32)))


def assert_close(found, expected, roundings=64.0):
    """Up to `roundings` roundings of the largest value: sums of 37 terms, twice, in another order."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = max(1.0, float(np.max(np.abs(b), initial=0.0, where=np.isfinite(b))))
        dtype = jax.tree.leaves(expected)[0].dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=roundings * float(jnp.finfo(dtype).eps) * scale)
