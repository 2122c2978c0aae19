"""Forward and backward of the norms in Mosaic GPU's simulator, against float64: right, and without a race."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _mosaic
from pallas_kernels.norm import NormConfig, backward, forward, reference
from pallas_kernels.norm.cases import QUICK, SLOW, Case

EPS = 1e-5
CASES = [pytest.param(c, id=n) for n, c in QUICK.items()]
CASES += [pytest.param(c, id=n, marks=pytest.mark.slow) for n, c in SLOW.items()]

#: float32's unit roundoff.
U32 = 2.0**-24


def unit_roundoff(dtype):
    return float(jnp.finfo(dtype).eps) / 2


def exactly(x):
    return None if x is None else np.asarray(x).astype(np.float64)


def float64(f, *args, **options):
    """A reference in float64, as numpy arrays."""
    with jax.enable_x64(True):
        found = f(*(None if a is None else jnp.asarray(exactly(a)) for a in args), dtype=jnp.float64, **options)
        return type(found)(*(None if a is None else np.asarray(a) for a in found))


def additions(case: Case):
    """How many additions an element of a row goes through in a sum over it: those of one thread, then of all."""
    return case.length / 32 + 8


def assert_near(got, want, terms, roundings, dtype=jnp.float32):
    """Within `roundings` of the terms that were added or multiplied, in float32, and one of the result's type."""
    got = exactly(got)
    bound = roundings * U32 * terms + unit_roundoff(dtype) * np.abs(want)
    assert np.all(np.abs(got - want) <= bound + np.finfo(np.float32).tiny), np.max(np.abs(got - want) / bound)


def summed(case, arrays):
    """S as an addition gives it, rounded to the type of its operands."""
    return arrays["x"] if not case.residual else arrays["x"] + arrays["residual"]


def run_forward(case, arrays, **options):
    found = forward(
        *(arrays[n] for n in ("x", "scale", "bias", "residual")),
        eps=EPS,
        variance=case.variance,
        clamped=case.clamped,
        with_sum=case.with_sum,
        config=case.config,
        interpret=_mosaic.interpret(),
        **options,
    )
    assert not _mosaic.races_found()
    return found


@pytest.mark.parametrize("case", CASES)
def test_forward(case):
    arrays = case.arrays(jax.random.key(0))
    found = run_forward(case, arrays, with_statistics=True)
    s = summed(case, arrays)
    want = float64(
        reference.forward, s, arrays["scale"], arrays["bias"], eps=EPS, variance=case.variance, clamped=case.clamped
    )
    assert found.y.dtype == jnp.dtype(case.dtype)
    assert (found.sum is not None) == (case.residual and case.with_sum)
    if found.sum is not None:
        np.testing.assert_array_equal(found.sum, s)
    size = np.abs(exactly(s)).max()
    n = additions(case)
    if want.mean is not None:
        assert_near(found.mean, want.mean, size, n)
    assert (found.mean is None) == (want.mean is None)
    # Of the variance: a relative error of 2 n roundings of the mean square, halved by the root, times what the root
    # of a smaller variance amplifies (eps bounds that).
    v = 1 / want.rstd**2
    lost = 1 + np.mean(exactly(s) ** 2, axis=-1) / v
    assert_near(found.rstd, want.rstd, want.rstd * lost, 2 * n)
    if case.clamped:
        np.testing.assert_array_equal(found.slope, want.slope)
    factor = 1.0 if arrays["scale"] is None else np.abs(exactly(arrays["scale"])).max()
    terms = (2 * size * want.rstd * lost * factor)[:, None] + np.abs(want.y)
    assert_near(found.y, want.y, terms, 2 * n + 4, case.dtype)


@pytest.mark.parametrize("case", CASES)
def test_backward(case):
    arrays = case.arrays(jax.random.key(1))
    s = summed(case, arrays)
    kept = reference.forward(s, eps=EPS, variance=case.variance, clamped=case.clamped)
    x, residual = (s, None) if case.with_sum or not case.residual else (arrays["x"], arrays["residual"])
    given = (arrays["dy"], x, kept.rstd, kept.mean, kept.slope, arrays["scale"], residual, arrays["dsum"])
    wanted = {"dscale": jnp.float32, "dbias": jnp.bfloat16}
    found = backward(*given, **wanted, config=case.config, interpret=_mosaic.interpret())
    assert not _mosaic.races_found()
    # The addition of two arrays is rounded before it is normalized: the reference gets its result.
    want = float64(reference.backward, *given[:1], s, *given[2:6], None, given[7])
    assert (found.dx.dtype, found.dscale.dtype, found.dbias.dtype) == (case.dtype, *wanted.values())
    dy, rstd = exactly(arrays["dy"]), exactly(kept.rstd)[:, None]
    centered = exactly(s) - (0 if kept.mean is None else exactly(kept.mean)[:, None])
    n = np.abs(centered * rstd)
    # s - mean is rounded relative to what it is computed from.
    slack = np.abs(exactly(s)) * rstd + n
    g = np.abs(dy) * (1.0 if arrays["scale"] is None else np.abs(exactly(arrays["scale"])))
    mean_g, mean_gn = np.mean(g, axis=-1, keepdims=True), np.mean(g * slack, axis=-1, keepdims=True)
    terms = rstd * (g + slack * mean_gn + mean_g) + np.abs(want.dx)
    assert_near(found.dx, want.dx, terms, 2 * additions(case) + 8, case.dtype)
    rows = case.count + 4
    assert_near(found.dscale, want.dscale, np.sum(np.abs(dy) * slack, axis=0), rows + 3)
    assert_near(found.dbias, want.dbias, np.sum(np.abs(dy), axis=0), rows, jnp.bfloat16)


def test_only_what_is_asked_for():
    case = QUICK["four rows a block, residual"]
    arrays = case.arrays(jax.random.key(2))
    kept = reference.forward(arrays["x"], eps=EPS)
    given = (arrays["dy"], arrays["x"], kept.rstd, kept.mean)
    found = backward(*given, with_dx=False, dbias=jnp.float32, config=case.config, interpret=_mosaic.interpret())
    assert found.dx is None and found.dscale is None
    np.testing.assert_allclose(found.dbias, np.sum(exactly(arrays["dy"]), axis=0), rtol=case.count * U32, atol=1e-6)


@pytest.mark.slow
def test_values_that_are_not_finite_stay_where_they_are():
    x = jax.random.normal(jax.random.key(3), (4, 130)).at[1, 3].set(jnp.inf).at[2, 129].set(jnp.nan)
    found = forward(x, eps=EPS, config=NormConfig(1, 2), with_statistics=True, interpret=_mosaic.interpret())
    want = reference.forward(x, eps=EPS)
    for got, expected in ((found.y, want.y), (found.mean, want.mean), (found.rstd, want.rstd)):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
        np.testing.assert_array_equal(np.isinf(got), np.isinf(expected))


@pytest.mark.slow
def test_64_bit_types_may_be_on():
    with jax.enable_x64(True):
        case = QUICK["odd length, lean"]
        arrays = case.arrays(jax.random.key(4))
        found = run_forward(case, arrays, with_statistics=True)
        given = (arrays["dy"], arrays["x"], found.rstd, found.mean, found.slope, arrays["scale"])
        back = backward(*given, dscale=jnp.float32, config=case.config, interpret=_mosaic.interpret())
    assert {a.dtype for a in (*found, *back) if a is not None} == {jnp.dtype("float32")}
