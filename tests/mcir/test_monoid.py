"""The laws of the monoids, and that they say what the unfused formula says of NaN and infinities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mcir.monoid import Moments, Rescaled, Simple

ROUNDOFF = 2.0**-24
LENGTH = 12
KINDS = ["sum", "max", "min"]


def floats(bound):
    bound = float(np.float32(bound))
    return st.floats(-bound, bound, width=32, allow_subnormal=False)


def sequences(elements, rows=2):
    """``[rows, LENGTH]``: one length, so that the examples share compiled programs."""
    return hnp.arrays(np.float32, (rows, LENGTH), elements=elements)


CUTS = st.tuples(st.sampled_from([3, 5]), st.sampled_from([6, 9]))
SCORES = floats(80.0) | st.just(-np.inf)


def parts(x, cuts):
    return np.split(x, cuts, axis=-1)


def assert_close(found, expected, magnitude, roundings=4 * LENGTH):
    """Equal but for the order of the additions: `magnitude` is the sum of what was added, without signs."""
    bound = roundings * ROUNDOFF * np.asarray(magnitude, np.float64) + np.finfo(np.float32).tiny
    np.testing.assert_array_less(np.abs(np.asarray(found, np.float64) - expected), np.broadcast_to(bound, found.shape))


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


# -- sum, max, min --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
@pytest.mark.parametrize("kind", KINDS)
def test_simple_identity(kind, dtype):
    monoid, x = Simple(kind), jnp.asarray([[0, 1, 1]], dtype)
    state, empty = monoid.lift(x, 1), monoid.empty((1,), dtype)
    assert empty[0].dtype == dtype
    assert_same(monoid.combine(empty, state), state)
    assert_same(monoid.combine(state, empty), state)


@pytest.mark.parametrize("kind", KINDS)
@given(x=sequences(floats(1e30)), cuts=CUTS)
def test_simple_laws(kind, x, cuts):
    monoid = Simple(kind)
    a, b, c = (monoid.lift(p, -1) for p in parts(x, cuts))
    left, right = monoid.combine(monoid.combine(a, b), c), monoid.combine(a, monoid.combine(b, c))
    all_at_once = monoid.lift(x, -1)
    if kind != "sum":
        assert_same(left, all_at_once)
        assert_same(right, all_at_once)
    else:
        for found in (left, right, all_at_once):
            assert_close(found[0], x.sum(-1, dtype=np.float64), np.abs(x).sum(-1, dtype=np.float64))


# -- relative to a running maximum ----------------------------------------------------------------------------------


def rescaled_reference(x, w, base=1.0):
    """Maximum, and relative to it in float64: the denominator, the weighted sum, and both without signs."""
    m = x.max(-1)
    safe = np.where(np.isfinite(m), m, 0).astype(np.float64)
    p = np.exp(base * (x.astype(np.float64) - safe[:, None]))
    return m, p.sum(-1), (p * w).sum(-1), (p * np.abs(w)).sum(-1)


@given(x=sequences(SCORES), w=sequences(floats(10.0)), cuts=CUTS, base=st.sampled_from([1.0, 0.5, float(np.log(2))]))
def test_rescaled_laws(x, w, cuts, base):
    monoid = Rescaled(base)
    a, b, c = (monoid.lift(p, jnp.ones_like(p), q) for p, q in zip(parts(x, cuts), parts(w, cuts), strict=True))
    empty = monoid.empty((2,), ((), ()), jnp.float32)
    m, l, s, magnitude = rescaled_reference(x, w, base)
    # A difference of scores up to 160 is rounded once, which exp turns into a relative error of 160 roundoffs.
    for state in (
        monoid.combine(monoid.combine(a, b), c),
        monoid.combine(a, monoid.combine(b, c)),
        monoid.combine(empty, monoid.lift(x, jnp.ones_like(x), w)),
        monoid.combine(monoid.lift(x, jnp.ones_like(x), w), empty),
    ):
        np.testing.assert_array_equal(state[0], m)
        assert_close(state[1], l, l, roundings=4 * 160)
        assert_close(state[2], s, magnitude, roundings=4 * 160)


def test_rescaled_matrix_weights():
    monoid, rng = Rescaled(), np.random.default_rng(0)
    x, w = rng.standard_normal((2, 6)).astype(np.float32), rng.standard_normal((2, 6, 3)).astype(np.float32)
    a, b = monoid.lift(x[:, :4], w[:, :4]), monoid.lift(x[:, 4:], w[:, 4:])
    m, out = monoid.combine(a, b)
    expected = np.einsum("rj,rje->re", np.exp(x.astype(np.float64) - x.max(-1, keepdims=True)), w)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    assert_same(monoid.combine(monoid.empty((2,), ((3,),), jnp.float32), (m, out)), (m, out))


def test_states_that_saw_only_minus_infinity_combine_without_nan():
    monoid = Rescaled()
    nothing = monoid.lift(jnp.full((1, 3), -jnp.inf), jnp.ones((1, 3)))
    empty = monoid.empty((1,), ((),), jnp.float32)
    something = monoid.lift(jnp.asarray([[1.0, 2.0]]), jnp.ones((1, 2)))
    for a, b in ((nothing, nothing), (nothing, empty), (empty, empty)):
        assert_same(monoid.combine(a, b), (np.full(1, -np.inf), np.zeros(1)))
    assert_same(monoid.combine(nothing, something), something)
    assert_same(monoid.combine(something, nothing), something)


@given(
    x=sequences(st.sampled_from([-np.inf, -1.0, 0.0, 3.0, np.inf, np.nan]), rows=4),
    w=sequences(floats(1.0), rows=4),
    cuts=CUTS,
)
def test_what_is_not_finite_propagates_as_unfused(x, w, cuts):
    monoid = Rescaled()
    states = [monoid.lift(p, jnp.ones_like(p), q) for p, q in zip(parts(x, cuts), parts(w, cuts), strict=True)]
    m, l, s = monoid.combine(monoid.combine(states[0], states[1]), states[2])
    unfused = np.asarray(jax.nn.logsumexp(jnp.asarray(x), axis=-1))
    fused = np.asarray(m + jnp.log(l))
    np.testing.assert_array_equal(np.isnan(fused), np.isnan(unfused))
    np.testing.assert_array_equal(np.isinf(fused) * np.sign(fused), np.isinf(unfused) * np.sign(unfused))
    weighted = np.asarray(jnp.sum(jax.nn.softmax(jnp.asarray(x), axis=-1) * w, axis=-1))
    np.testing.assert_array_equal(np.isnan(np.asarray(s / l)), np.isnan(weighted))


# -- moments --------------------------------------------------------------------------------------------------------


def assert_moments(state, x):
    """Against float64: deviations are off by roundings of the largest value, and M2 by that times their sum."""
    wide = x.astype(np.float64)
    mean, largest = wide.mean(-1), np.abs(wide).max(-1)
    m2 = ((wide - mean[:, None]) ** 2).sum(-1)
    np.testing.assert_array_equal(state[0], x.shape[-1])
    assert_close(state[1], mean, largest)
    off = 4 * LENGTH * ROUNDOFF * largest
    np.testing.assert_array_less(np.abs(state[2] - m2), 4 * LENGTH * (off * np.sqrt(m2) + off**2) + 1e-30)


@given(x=sequences(floats(1e6)), cuts=CUTS)
def test_moments_laws(x, cuts):
    monoid = Moments()
    a, b, c = (monoid.lift(jnp.asarray(p), 1) for p in parts(x, cuts))
    assert_moments(monoid.combine(monoid.combine(a, b), c), x)
    assert_moments(monoid.combine(a, monoid.combine(b, c)), x)


@given(x=sequences(floats(1e37)))
def test_moments_identity(x):
    monoid = Moments()
    state, empty = monoid.lift(jnp.asarray(x), 1), monoid.empty((2,), jnp.float32)
    assert_same(monoid.combine(empty, state), state)
    assert_same(monoid.combine(state, empty), state)
    assert_same(monoid.combine(empty, empty), empty)


def test_moments_of_valid_elements():
    x = jnp.asarray([[1.0, 5.0, jnp.nan, 3.0]])
    n, mean, m2 = Moments().lift(x, 1, jnp.asarray([[True, True, False, True]]))
    assert (n, mean, m2) == (3, 3, 8)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 3])
def test_moments_of_what_is_not_finite(value, at):
    """The variance is NaN, as unfused; the mean is not finite (where an infinity comes first, NaN)."""
    x = np.ones((1, 4), np.float32)
    x[0, at] = value
    monoid = Moments()
    _, mean, m2 = monoid.combine(monoid.lift(jnp.asarray(x[:, :2]), 1), monoid.lift(jnp.asarray(x[:, 2:]), 1))
    assert np.isnan(m2).all()
    assert not np.isfinite(mean).any()
