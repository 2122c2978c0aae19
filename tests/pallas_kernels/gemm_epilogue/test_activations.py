"""The formulas of the epilogue against jax's functions in float64, and where they are NaN and infinite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aicf_jax.ops.epilogue import ACTIVATIONS as NAMES
from pallas_kernels.gemm_epilogue.activations import ACTIVATIONS, erfc, expm1, log1p
from tests.pallas_kernels.gemm_epilogue.functions import FUNCTIONS

ALPHA = 0.25
SMALL = np.logspace(-10, 3, 2000)
POINTS = np.concatenate([np.linspace(-30, 30, 20001), SMALL, -SMALL, [0.0, -0.0]]).astype(np.float32)
SPECIAL = np.array([np.inf, -np.inf, np.nan, 3e38, -3e38, 0, 1, -1], np.float32)

#: As the module says: a few units of float32, 1e-5 for erfc.
FORMULA = 1e-5


def test_every_activation_of_the_operation_has_formulas():
    assert set(ACTIVATIONS) == set(NAMES) == set(FUNCTIONS)


def in_float64(f, points):
    with jax.enable_x64(True):
        return np.asarray(f(jnp.asarray(points, jnp.float64)))


@pytest.mark.parametrize("name", NAMES)
def test_value(name):
    found = np.asarray(ACTIVATIONS[name].value(jnp.asarray(POINTS), ALPHA)).astype(np.float64)
    want = in_float64(lambda z: FUNCTIONS[name](z, ALPHA), POINTS)
    assert np.all(np.abs(found - want) <= FORMULA * np.abs(want) + FORMULA * 1e-2)


@pytest.mark.parametrize("name", NAMES)
def test_derivative(name):
    f, act = (lambda z: FUNCTIONS[name](z, ALPHA)), ACTIVATIONS[name]
    want = in_float64(jax.vmap(jax.grad(f)), POINTS)
    residual = in_float64(f, POINTS).astype(np.float32) if act.from_output else POINTS
    found = np.asarray(act.grad(jnp.asarray(residual), jnp.ones(len(POINTS)), ALPHA)).astype(np.float64)
    assert np.all(np.abs(found - want) <= FORMULA)


@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinity_are_where_they_are_in_jax(name):
    f, act, z = (lambda z: FUNCTIONS[name](z, ALPHA)), ACTIVATIONS[name], jnp.asarray(SPECIAL)
    y, pull = jax.vjp(f, z)
    dz = act.grad(y if act.from_output else z, jnp.ones_like(z), ALPHA)
    for got, want in ((act.value(z, ALPHA), y), (dz, pull(jnp.ones_like(z))[0])):
        assert np.array_equal(np.isnan(got), np.isnan(want)) and np.array_equal(np.isinf(got), np.isinf(want))


@pytest.mark.parametrize(
    ("f", "exact", "points"),
    [
        pytest.param(erfc, jax.scipy.special.erfc, np.linspace(-6, 9, 20001), id="erfc"),
        pytest.param(expm1, jnp.expm1, -SMALL, id="expm1"),
        pytest.param(log1p, jnp.log1p, np.minimum(SMALL, 1), id="log1p"),
    ],
)
def test_relative_error_where_others_cancel(f, exact, points):
    points = points.astype(np.float32)
    found, want = np.asarray(f(jnp.asarray(points))).astype(np.float64), in_float64(exact, points)
    assert np.max(np.abs(found - want) / np.abs(want)) <= FORMULA
