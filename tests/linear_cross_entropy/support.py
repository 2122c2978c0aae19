"""The small head whose losses are fused, how values and gradients are compared, and which cases are slow."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aicf_jax
from tests.linear_cross_entropy.spellings import CLASSES
from tests.support import quick_jit

RAISE = aicf_jax.Policy(on_failure="raise")
KERNEL = "streamed_linear_cross_entropy"

#: Compiled twice each: all but these are slow tests.
QUICK = {"by_optax", "log_of_softmax_at_label", "smoothed_by_hand", "one_hot_classes_left_out"}


def rest_slow(names, quick=QUICK):
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def normal(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


H, W = normal(0, 4, 12, 5), normal(1, 5, CLASSES)
LABELS = jnp.asarray(np.random.default_rng(2).integers(0, CLASSES, (4, 12)), jnp.int32)


def head(loss):
    """``loss(h @ w)``."""

    def f(h, w, labels):
        return loss(h @ w, labels)

    return f


def weighted(f):
    """A scalar that weighs every result differently."""

    def g(*args):
        out = f(*args)
        return jnp.sum(out * normal(9, *out.shape, dtype=str(out.dtype)))

    return g


def gradients(f, args, argnums=(0, 1)):
    return quick_jit(jax.value_and_grad(weighted(f), argnums=argnums))(*args)


def assert_close(found, expected, dtype=None, terms=64):
    """Sums of 5, 37 or 48 products in another order: each is off by at most `terms` roundings of its largest term.

    Losses are about 4, and weighted sums of them up to 8 before they cancel.
    """
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        roundoff = float(jnp.finfo(dtype or b.dtype).eps) / 2
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = max(8.0, float(np.max(np.abs(b), initial=0.0, where=np.isfinite(b))))
        np.testing.assert_allclose(a, b, rtol=0, atol=2 * terms * roundoff * scale)


def only(report):
    (fusion,) = (x for x in report.fusions if x.op == "linear_cross_entropy")
    return fusion
