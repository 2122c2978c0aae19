"""The interpreter against float64 NumPy formulas that know no tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mcir.text import parse
from tests.mcir.programs import attention, backward, draw, moments, qkv, reference, reference_gradient, sizes

# Unit roundoff of float32 times the length of the longest sum (13, and 4 to make a score) and a few operations; scores
# are of magnitude 5, which exp turns from absolute into relative error.
TOLERANCE = 2.0**-24 * 13 * 8


def close(found, expected, scale=1.0):
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE * scale)


SHAPES = [
    pytest.param({}, id="ragged"),
    pytest.param(dict(i=12, j=8, bi=4, bj=4), id="even"),
    pytest.param(dict(bi=13, bj=11, bh=2), id="one block"),
    pytest.param(dict(bi=1, bj=1), id="blocks of one"),
    pytest.param(dict(h=1, i=1, j=1, d=1, e=1, bi=1, bj=1), id="size one"),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fill", [None, -1e30, -np.inf])
def test_attention_forward(shape, fill):
    program = attention(fill, **shape).verify()
    q, k, v = qkv(**sizes(**shape))
    for found, expected in zip(program.run(q, k, v), reference(q, k, v, fill), strict=True):
        close(found, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_backward(shape):
    program = backward(-1e30, **shape).verify()
    q, k, v = qkv(**sizes(**shape))
    out, lse = reference(q, k, v, -1e30)
    dout = draw(3, *out.shape)
    found = program.run(q, k, v, out.astype(np.float32), lse.astype(np.float32), dout)
    for a, b in zip(found, reference_gradient(q, k, v, dout, -1e30), strict=True):
        close(a, b, scale=10)


def test_rows_that_see_nothing_are_uniform_under_a_finite_fill():
    """Rows 0 to 5 are masked everywhere: their blocks are skipped at first and then visited."""
    q, k, v = qkv()
    out, lse = attention(-1e30, late=6).verify().run(q, k, v)
    expected = reference(q, k, v, -1e30, late=6)
    close(out, expected[0])
    close(out[:, :6], np.broadcast_to(v.mean(1, keepdims=True), out[:, :6].shape))
    close(lse, expected[1])


def test_gradient_of_rows_that_see_nothing():
    q, k, v = qkv()
    out, lse = reference(q, k, v, -1e30, late=6)
    dout = draw(3, *out.shape)
    # float32 rounds the log-sum-exp of a masked row to the fill itself, so that its weights are 1 and not 1/11: this is
    # what such a program computes, tiled or not.
    found = backward(-1e30, late=6).verify().run(q, k, v, out.astype(np.float32), lse.astype(np.float32), dout)
    whole = backward(-1e30, late=6, bi=13, bj=11).run(q, k, v, out.astype(np.float32), lse.astype(np.float32), dout)
    assert np.abs(found[2]).min() > 0  # the last keys have gradients from masked rows only
    for a, b in zip(found, whole, strict=True):
        close(a, b, scale=10)


def test_rows_that_see_nothing_are_nan_under_minus_infinity():
    q, k, v = qkv()
    out, lse = attention(-np.inf, late=6).verify().run(q, k, v)
    assert np.isnan(out[:, :6]).all()
    assert (lse[:, :6] == -np.inf).all()
    close(out[:, 6:], reference(q, k, v, -np.inf, late=6)[0][:, 6:])


def test_a_fill_that_is_not_far_below_the_scores_is_not_skipped():
    """Masked scores of -3 have weights that count."""
    q, k, v = qkv()
    close(attention(-3.0).verify().run(q, k, v)[0], reference(q, k, v, -3.0)[0])


def test_what_is_skipped_is_not_computed():
    """A NaN among the values of keys that no query of a tile sees would show: 0 times NaN."""
    q, k, v = qkv()
    v[:, 8:] = np.nan
    out, _ = attention(-1e30).run(q, k, v)
    assert np.isfinite(out[:, :5]).all()
    assert np.isnan(out[:, 10:]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_that_are_not_finite(value):
    q, k, v = qkv()
    k[0, 5, :] = value
    q[:] = np.abs(q)
    found, expected = attention(-1e30).run(q, k, v), reference(q, k, v, -1e30)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        np.testing.assert_array_equal(np.isposinf(a), np.isposinf(b))
    close(found[0][1], expected[0][1])


@pytest.mark.parametrize("shape", [{}, dict(r=1, c=1, br=1, bc=1), dict(r=4, c=12), dict(br=5, bc=13)])
def test_moments(shape):
    program = moments(**shape).verify()
    x = draw(0, *(program.axis(a).size for a in "rc")) + 10
    y, mean = program.run(x)
    wide = x.astype(np.float64)
    close(mean, wide.mean(1))
    # The mean of values near 10 is off by a few units of 2^-24 * 10, and so are the deviations from it.
    np.testing.assert_allclose(
        y,
        (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 0.001),
        atol=TOLERANCE * 10 * 31.7,
    )


def test_reduction_over_two_streams():
    program = parse("""
program total
axis a = 5 block 2
axis b = 7 block 3
input x: float32[a, b]
output y: float32[]
tile:
  reduction t = sum over a, b: float32[]
  stream a:
    stream b:
      x1 = load x: float32[a, b]
      t <- sum(x1)
  store y = t
""").verify()
    x = draw(0, 5, 7)
    close(program.run(x)[0], x.sum(dtype=np.float64), scale=4)


def test_random_bits_are_those_of_jax():
    program = parse("""
program bits
axis a = 3 block 2
axis b = 5 block 2
input key: uint32[]
output y: uint32[a, b]
tile a, b:
  k = load key: uint32[]
  r = bits(k) axes=(b, "", a) shape=(5, 1, 3): uint32[a, b]
  store y = r
""").verify()
    key = jax.random.key(7)
    expected = jax.random.bits(key, (5, 1, 3), jnp.uint32)[:, 0].T
    np.testing.assert_array_equal(program.run(jax.random.key_data(key))[0], expected)


def test_low_precision_accumulates_in_the_type_of_the_statement():
    program = parse("""
program mean
axis a = 1024 block 16
input x: bfloat16[a]
output y: float32[]
tile:
  reduction t = sum over a: float32[]
  stream a:
    x1 = load x: bfloat16[a]
    t <- sum(x1, x1)
  store y = t
""").verify()
    assert program.run(np.ones(1024, jnp.bfloat16))[0] == 1024  # bfloat16 sums stop at 256


@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param(lambda q, k, v: (q, k), id="number"),
        pytest.param(lambda q, k, v: (q, k, v[:, :-1]), id="shape"),
        pytest.param(lambda q, k, v: (q, k, v.astype(np.float64)), id="dtype"),
    ],
)
def test_inputs_must_fit(inputs):
    with pytest.raises(TypeError, match="attention: expected"):
        attention().run(*inputs(*qkv()))
