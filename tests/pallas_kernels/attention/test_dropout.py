"""What is kept of the weights, element by element as jax draws it, without a kernel around it; what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mcir.operations import random_bits
from pallas_kernels.attention import Bernoulli, backward, dropout, forward

QUICK = [0.9, 1 - 2.0**-23, 2.0**-24]
SLOW = [0.5, 0.1, 1 - 2.0**-24, 2.0**-23, 3e-7, 1 / 3, 1.0]
PROBABILITIES = [*QUICK, *(pytest.param(p, marks=pytest.mark.slow) for p in SLOW)]


@pytest.mark.parametrize("probability", PROBABILITIES)
def test_bits_are_compared_as_uniform_numbers_are(probability):
    """All 2^23 numbers that `jax.random.uniform` may give; the 9 bits that it does not use make no difference."""
    mantissa = np.arange(2**23, dtype=np.uint32)
    kept = mantissa.astype(np.float32) * np.float32(2.0**-23) < np.float32(probability)
    last = dropout.last_kept(probability)
    for rest in (0, 511):
        assert np.array_equal((mantissa << 9 | np.uint32(rest)) <= np.uint32(last), kept)


def reader(keep, place, queries, keys, turned=False):
    described = dropout.described(keep, 1.0)
    return dropout.reader(described, {"words": keep.words}, tuple(map(jnp.int32, place)), (queries, keys), turned)


SHAPES = [(2, 3, 40, 72), *(pytest.param((b, h, 40, 72), marks=pytest.mark.slow) for b, h in ((1, 3), (2, 1), (1, 1)))]


@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_are_what_jax_draws_either_way_round(shape):
    key, place, (row, column) = jax.random.key(3), (1, 2), (7, 21)
    whole = jax.random.bernoulli(key, 0.9, shape)
    mine = whole[place[0] % shape[0] if shape[0] > 1 else 0, place[1] if shape[1] > 1 else 0]
    want = np.asarray(mine[row : row + 16, column : column + 32])
    keep = Bernoulli(key, 0.9, shape)
    at = jnp.int32(row), jnp.int32(column)
    assert np.array_equal(reader(keep, place, 40, 72)(*at, (16, 32), None), want)
    assert np.array_equal(reader(keep, place, 40, 72, turned=True)(*at[::-1], (32, 16), None), want.T)


@pytest.mark.slow
def test_positions_up_to_2_to_the_32():
    words, shape = jax.random.key_data(jax.random.key(9)), (64, 64, 1000, 1000)
    found = reader(Bernoulli(words, 0.5, shape), (63, 63), 1000, 1000)(jnp.int32(990), jnp.int32(992), (10, 8), None)
    positions = ((63 * 64 + 63) * 1000 + 990 + np.arange(10)[:, None]) * 1000 + 992 + np.arange(8)
    want = random_bits(words, jnp.asarray(positions, jnp.uint32)) <= np.uint32(dropout.last_kept(0.5))
    assert np.array_equal(found, want)


Q, K = jnp.zeros((2, 48, 4, 64), jnp.bfloat16), jnp.zeros((2, 80, 2, 64), jnp.bfloat16)
M = jnp.zeros((2, 4, 48), jnp.float32)
KEY = jax.random.key(0)


@pytest.mark.parametrize(
    ("name", "keep", "factor"),
    [
        ("keep", jnp.zeros((2, 4, 48, 80), jnp.int8), 1.0),
        ("keep", jnp.zeros((2, 2, 48, 80), bool), 1.0),
        ("keep", jnp.zeros((48, 80), bool), 1.0),
        ("keep", Bernoulli(KEY, 0.9, (2, 4, 80, 48)), 1.0),
        ("keep", Bernoulli(jax.random.key(0, impl="rbg"), 0.9, (2, 4, 48, 80)), 1.0),
        ("keep", Bernoulli(jax.random.split(KEY), 0.9, (2, 4, 48, 80)), 1.0),
        ("keep_factor", jnp.zeros((1, 1, 48, 80), bool), float("inf")),
    ],
)
def test_refused_by_name(name, keep, factor):
    with pytest.raises(ValueError, match=rf"forward\({name}=...\): expected .*, found"):
        forward(Q, K, K, keep=keep, keep_factor=factor)
    with pytest.raises(ValueError, match=rf"backward\({name}=...\): expected .*, found"):
        backward(Q, K, K, Q, M, M, Q, keep=keep, keep_factor=factor)


@pytest.mark.parametrize(
    ("name", "probability", "shape"),
    [
        ("probability", 0.0, (1, 1, 8, 8)),
        ("probability", 1e-50, (1, 1, 8, 8)),
        ("probability", 1.5, (1, 1, 8, 8)),
        ("shape", 0.9, (64, 64, 1024, 1024)),
        ("shape", 0.9, (0, 1, 8, 8)),
    ],
)
def test_what_cannot_be_drawn_cannot_be_described(name, probability, shape):
    with pytest.raises(ValueError, match=rf"Bernoulli\({name}=...\): expected .*, found"):
        Bernoulli(KEY, probability, shape)


def test_it_is_a_pytree_of_its_key():
    keep = Bernoulli(KEY, 0.9, (1, 1, 8, 8))
    found = jax.jit(lambda keep: keep)(keep)
    assert found.shape == keep.shape and found.probability == keep.probability
    assert np.array_equal(found.words, keep.words)
