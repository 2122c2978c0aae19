"""GEMM epilogue and its gradient in Mosaic GPU's simulator, against float64: right, and without a race."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _compat, _mosaic
from pallas_kernels.gemm_epilogue import backward, forward
from pallas_kernels.gemm_epilogue.cases import QUICK, QUICK_GRAD, SLOW, SLOW_GRAD
from tests.pallas_kernels.gemm_epilogue.functions import FUNCTIONS
from tests.pallas_kernels.simulator import skip_what_it_lacks

#: float32's unit roundoff, and what `activations` says of its formulas.
U32, FORMULA = 2.0**-24, 1e-5

#: No activation here is steeper.
STEEPEST = 1.2


def cases(quick, slow):
    return [
        *(pytest.param(c, id=name) for name, c in quick.items()),
        *(pytest.param(c, id=name, marks=pytest.mark.slow) for name, c in slow.items()),
    ]


def skip_what_is_not_simulated(case):
    skip_what_it_lacks(bounds=case.is_ragged, transposes=getattr(case, "is_transposed", False))
    if getattr(case, "in_place", False) and case.residual_dtype == case.dtype and not _compat.simulates_refs():
        pytest.skip("this jax's simulator does not know an argument that is written to")


def exactly(x):
    return np.asarray(x).astype(np.float64)


def assert_near(got, want, error):
    """Within `error`, and a rounding of the result's type: half a unit, and the smallest number there is."""
    info = jnp.finfo(got.dtype)
    bound = error + float(info.eps) / 2 * np.abs(want) + float(info.smallest_subnormal)
    assert np.all(np.abs(exactly(got) - want) <= bound), np.max(np.abs(exactly(got) - want) / bound)


@pytest.mark.parametrize("case", cases(QUICK, SLOW))
def test_forward(case):
    skip_what_is_not_simulated(case)
    a, b, bias = case.arrays(jax.random.key(0))
    found = forward(a, b, bias, **case.options(), interpret=_mosaic.interpret())
    assert not _mosaic.races_found()
    left, right = exactly(a), exactly(b)
    left = np.swapaxes(left, -1, -2) if case.trans_a else left
    right = np.swapaxes(right, -1, -2) if case.trans_b else right
    addend = 0 if bias is None else exactly(bias) if case.bias == "n" else exactly(bias)[:, None]
    z = left @ right + addend
    # K products and the bias are added up in float32.
    error = (case.k + 1) * U32 * (np.abs(left) @ np.abs(right) + np.abs(addend))
    with jax.enable_x64(True):
        y = np.asarray(FUNCTIONS[case.activation](jnp.asarray(z), case.alpha))
    assert [str(x.dtype) for x in found] == [case.out_dtype or case.dtype, *([case.z_dtype] if case.z_dtype else [])]
    assert_near(found[0], y, STEEPEST * error + FORMULA * (1 + np.abs(z)))
    if case.z_dtype:
        assert_near(found[1], z, error)


@pytest.mark.parametrize("case", cases(QUICK_GRAD, SLOW_GRAD))
def test_backward(case):
    skip_what_is_not_simulated(case)
    residual, dy = case.arrays(jax.random.key(0))
    from_output = case.from_output if case.from_output is not None else case.activation in ("relu", "tanh", "sigmoid")
    f = lambda z: FUNCTIONS[case.activation](z, case.alpha)  # noqa: E731
    if from_output and case.activation != "relu":
        z = residual.astype(jnp.float32)
        residual = f(z).astype(residual.dtype)
    dz, db = backward(residual, dy, **case.options(), interpret=_mosaic.interpret())
    assert not _mosaic.races_found()
    r, t = exactly(residual), exactly(dy)
    with jax.enable_x64(True):
        if case.activation == "relu":
            slope = (r > 0).astype(np.float64)
        elif from_output:
            slope = {"tanh": 1 - r * r, "sigmoid": r * (1 - r)}[case.activation]
        else:
            slope = np.asarray(jax.vmap(jax.vmap(jax.grad(f)))(jnp.asarray(r)))
    want = t * slope
    # A derivative is a sum of two terms, each a product with an exponential of z.
    error = FORMULA * np.abs(t) * (1 + np.abs(r))
    assert_near(dz, want, error)
    assert_near(db, want.sum(0), error.sum(0) + case.m * U32 * np.abs(want).sum(0))


@pytest.mark.slow
def test_sums_are_the_same_bits_on_every_run():
    residual, dy = QUICK_GRAD["whole blocks"].arrays(jax.random.key(1))
    runs = [backward(residual, dy, **QUICK_GRAD["whole blocks"].options(), interpret=_mosaic.interpret()) for _ in "ab"]
    assert all(np.array_equal(exactly(x), exactly(y)) for x, y in zip(*runs, strict=True))
