"""`act(x @ w + b)`, fused, under every transformation of jax: the same results as unfused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import aicf_jax
from tests.support import ACTIVATION_ROUNDINGS, ACTIVATIONS, assert_same, dense, dense_args, dyadic, normal
from tests.transformations import TRANSFORMS, assert_fused_same, gradient, transformed

K = 8  # longest sum: x @ w over 8, its transposes over 5 rows and 4 columns
ROUNDINGS = K + ACTIVATION_ROUNDINGS


def first_order(f, args):
    """Value, pulled-back cotangents, pushed-forward tangents: one compiled program."""
    return transformed(("vjp", "jvp"), f, args)


# One activation of each kind of backward (from Y, from Z, linear) runs by default; the others differ from these in
# their formulas only, which the tests below and the derived-backward tests check for every activation.
KINDS = ("relu", "silu", "none")
GRID = [a if a in KINDS else pytest.param(a, marks=pytest.mark.slow) for a in ACTIVATIONS]


@pytest.mark.parametrize("activation", GRID)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transform_of_fused_equals_transform_of_unfused(activation, transform):
    # tolerance: unit roundoff x (sum of 8 products + activation) x passes through f
    assert_fused_same(dense(activation), dense_args(k=K), transform, roundings=ROUNDINGS)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
def test_every_dtype(activation, dtype):
    """The data make z = x @ w + b exact in each dtype, so what is compared is the activation and the backward."""
    f, args = dense(activation), dense_args(k=K, dtype=dtype, draw=dyadic)
    fused = aicf_jax.fuse(f)
    # tolerance: in low precision each sum accumulates in float32 and rounds once, so a pass has about 4 roundings in
    # the low dtype (z, act', dz, output) and the activation's own chain where the unfused program rounds each step
    roundings = ROUNDINGS if dtype == jnp.float32 else 12
    if dtype == jnp.bfloat16:  # op by op, the unfused one rounds after each; compiled, it need not
        assert_same(fused(*args), f(*args), roundings=roundings)
    assert_same(first_order(fused, args), first_order(f, args), roundings=2 * roundings)


@pytest.mark.slow  # every activation passes check_grads in tests/aicf_jax/test_autodiff.py as well
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivatives_against_finite_differences(activation):
    """Forward and reverse mode, first and second order, in float64."""
    with jax.enable_x64(True):

        def away_from_kinks(seed):
            x, w, b = (normal(seed + i, *s, dtype=jnp.float64) for i, s in enumerate([(3, 4), (4, 2), (2,)]))
            return (x, w, b) if np.abs(x @ w + b).min() > 0.1 else None

        args = next(filter(None, map(away_from_kinks, range(0, 3000, 3))))
        # tolerance: check_grads' own for float64 (1e-5 relative, differences with step 1e-5 or so)
        check_grads(aicf_jax.fuse(dense(activation)), args, order=2)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_float64_stays_float64(activation):
    with jax.enable_x64(True):
        f, args = dense(activation), dense_args(k=K, dtype=jnp.float64)
        # tolerance: float64's unit roundoff; a hidden float32 kernel would miss it by nine orders of magnitude
        assert_same(first_order(aicf_jax.fuse(f), args), first_order(f, args), roundings=2 * ROUNDINGS)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "elu"])
def test_the_derivative_on_the_kink_is_the_unfused_one(activation):
    """relu'(0) = 0 by definition in jax; z is exactly 0 here."""
    x, w, b = jnp.zeros((3, 4)), dyadic(1, 4, 2), jnp.zeros(2)
    f = dense(activation)
    # tolerance: sums of 4 products each way; another choice on the kink would differ by half of a slope
    assert_same(first_order(aicf_jax.fuse(f), (x, w, b)), first_order(f, (x, w, b)), roundings=2 * K)


@pytest.mark.parametrize("activation", ["relu", "maximum"])
def test_relu_and_maximum_with_zero_differ_on_the_kink(activation):
    """`maximum(x, 0)` splits the cotangent of a tie in halves: close in spelling, another derivative."""
    act = jax.nn.relu if activation == "relu" else lambda z: jnp.maximum(z, 0)
    f = aicf_jax.fuse(lambda x, w, b: act(x @ w + b))
    slope = jax.grad(lambda b: f(jnp.zeros((1, 2)), jnp.ones((2, 1)), b).sum())(jnp.zeros(1))
    np.testing.assert_array_equal(slope, [0.0 if activation == "relu" else 0.5])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_infinity_flow_as_unfused(activation):
    x, w, b = dense_args(k=K)
    x = x.at[0, 0].set(jnp.nan).at[1, 1].set(jnp.inf).at[2, 2].set(-jnp.inf)
    b = b.at[0].set(3e38)
    f, args = dense(activation), (x, w, b)
    # tolerance: as above for the finite entries; positions of NaN and infinity are compared exactly
    assert_same(first_order(aicf_jax.fuse(f), args), first_order(f, args), roundings=2 * ROUNDINGS)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_and_tiny_pre_activations(activation):
    """Exp overflows for 1e4 and rounds to 1 for 1e-6; silu, softplus, elu and sigmoid must not turn that into NaN."""
    z = jnp.asarray([[1e4, -1e4, 90.0, -90.0, 1e-6, -1e-6, 0.0, -0.0]])
    args = z, jnp.eye(8), jnp.zeros(8)
    f = dense(activation)
    # tolerance: unit roundoff x (8 products, of which 7 are zero, + activation) x two passes
    assert_same(first_order(aicf_jax.fuse(f), args), first_order(f, args), roundings=2 * ROUNDINGS)


MIXED = {
    "bf16_x_f32_parameters": (jnp.bfloat16, jnp.float32, jnp.float32),
    "f32_x_bf16_weights": (jnp.float32, jnp.bfloat16, jnp.float32),
    "bf16_operands_f32_bias": (jnp.bfloat16, jnp.bfloat16, jnp.float32),
}


@pytest.mark.parametrize("activation", ["gelu_exact", "silu", "none"])
@pytest.mark.parametrize("dtypes", MIXED.values(), ids=MIXED)
def test_mixed_dtypes_accumulate_wide_and_each_gradient_has_its_arguments_dtype(activation, dtypes):
    act = ACTIVATIONS[activation]

    def f(x, w, b):
        contract = (((1,), (0,)), ((), ()))
        z = jax.lax.dot_general(x, w, contract, preferred_element_type=jnp.float32)
        return act(z + b)

    args = tuple(normal(i, *s, dtype=d) for i, (s, d) in enumerate(zip([(5, K), (K, 4), (4,)], dtypes, strict=True)))
    # tolerance of values: all arithmetic after the exact bfloat16 inputs is float32
    assert_fused_same(f, args, "value", roundings=ROUNDINGS)
    # tolerance of gradients: those of bfloat16 arguments round once more, to bfloat16, from a rounded cotangent
    assert_fused_same(f, args, "grad", roundings=4, dtype=jnp.bfloat16)


def test_gradient_of_an_argument_used_twice_is_the_sum():
    def f(x, w):
        return jax.nn.silu(x @ w + x[0]) @ w.T

    args = normal(1, 5, K), normal(2, K, K)
    # tolerance: two GEMMs of 8 in a row, each with an activation, in two passes
    assert_same(first_order(aicf_jax.fuse(f), args), first_order(f, args), roundings=4 * ROUNDINGS)


def test_integer_arguments_get_float0_tangents():
    def f(x, w, b, rows):
        return jax.nn.relu(x[rows] @ w + b), rows

    args = (*dense_args(k=K), jnp.asarray([0, 2]))
    # tolerance: unit roundoff x (sum of 8 products + activation) x two passes
    assert_same(first_order(aicf_jax.fuse(f), args), first_order(f, args), roundings=2 * ROUNDINGS)


def test_stop_gradient_and_unused_arguments():
    def f(x, w, b, unused):
        return jax.nn.gelu(jax.lax.stop_gradient(x) @ w + b)

    args = (*dense_args(k=K), normal(9, 3))
    got = gradient(aicf_jax.fuse(f), args)
    # tolerance: forward and backward of one GEMM of 8
    assert_same(got, gradient(f, args), roundings=2 * ROUNDINGS)
    assert not got[0].any() and not got[3].any()
