"""The function, and the arguments, that tests of calling conventions call."""

import jax

import aicf_jax
from tests.support import ACTIVATION_ROUNDINGS, assert_same, dense_args

K = 8
# tolerance of every comparison: unit roundoff x (one or two products of 8 terms with activations), forward and backward
ROUNDINGS = 4 * (K + ACTIVATION_ROUNDINGS)
X, W, B = dense_args(m=5, k=K, n=K)


def net(x, w, b=None, *, act="gelu", scale=1.0):
    """Doc of net."""
    z = x @ w if b is None else x @ w + b
    return getattr(jax.nn, act)(z) * scale


def check(f, *args, **kwargs):
    assert_same(aicf_jax.fuse(f)(*args, **kwargs), f(*args, **kwargs), roundings=ROUNDINGS)
