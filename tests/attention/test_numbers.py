"""Attention's numbers: types, rows that see nothing, huge scores, and derivatives against finite differences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest

import aicf_jax
from tests.attention.equations import HEADS, LENGTH, K, Q, V, assert_close, causal, loss, normal, scores, values


def test_check_grads_of_order_two():
    """The library's attention keeps float32 scores whatever it is given: too coarse for differences of differences."""

    def f(q, k, v):
        positions = jnp.arange(18)
        return values(jnp.where(positions[:, None] >= positions, scores(q, k), -jnp.inf), v)

    with jax.enable_x64(True):
        args = [normal(i, 1, 18, 1, 2, dtype="float64") for i in range(3)]
        jax.test_util.check_grads(jax.jit(aicf_jax.fuse(f)), args, order=2, modes=("fwd", "rev"))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("length", [1, pytest.param(2, marks=pytest.mark.slow), 33])
def test_dtypes_and_lengths_against_float64(dtype, length):
    """Within 16 roundings of the dtype: scores, weights, sum and result each round, of values up to about 4."""

    def f(q, k, v):
        x = jnp.einsum("bihd,bjhd->bhij", q, k) / 2
        positions = jnp.arange(length)
        return values(jnp.where(positions[:, None] >= positions, x, -jnp.inf), v)

    with jax.enable_x64(True):
        args = [normal(i, 1, length, 2, 4, dtype="float64").astype(dtype) for i in range(3)]
        fused, unfused = jax.jit(aicf_jax.fuse(f))(*args), jax.jit(f)(*args)
        exact = f(*(x.astype("float64") for x in args))
        assert fused.dtype == unfused.dtype
        eps = float(jnp.finfo(dtype).eps)
        assert float(jnp.max(jnp.abs(fused.astype("float64") - exact))) <= 16 * eps


def test_float64_weighted_by_a_softmax_in_float32():
    """As `jax.nn` has it. Forward and backward within 64 roundings of float32: 33 terms of a sum, and a softmax."""

    def f(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    def gradients(g, args):
        return jax.jit(jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(g(*a))), (0, 1, 2)))(*args)

    with jax.enable_x64(True):
        args = [normal(i, 1, 33, 2, 4, dtype="float64") for i in range(3)]
        assert aicf_jax.explain(f, *args).count("attention") == 1
        found, want = (jax.tree.leaves(gradients(g, args)) for g in (aicf_jax.fuse(f), f))
    for a, b in zip(found, want, strict=True):
        assert a.dtype == b.dtype == "float64"
        np.testing.assert_allclose(a, b, rtol=0, atol=64 * 2.0**-24 * max(1.0, float(np.max(np.abs(b)))))


@pytest.mark.parametrize("fill", [-jnp.inf, -1e9, float(jnp.finfo(jnp.float32).min)])
def test_fully_masked_rows(fill):
    """NaN behind -inf, uniform over all keys behind a finite fill: as unfused, also where whole blocks are masked."""

    def f(q, k, v):
        visible = jnp.arange(LENGTH)[:, None] >= jnp.arange(LENGTH) + 20  # the first 20 queries see nothing
        return values(jnp.where(visible, scores(q, k), fill), v)

    found, expected = aicf_jax.fuse(f)(Q, K, V), f(Q, K, V)
    np.testing.assert_array_equal(jnp.isnan(found), jnp.isnan(expected))
    assert_close(jnp.nan_to_num(found), jnp.nan_to_num(expected))
    gradient = jax.grad(lambda *a: jnp.sum(aicf_jax.fuse(f)(*a)[:, 20:]), (0, 1, 2))(Q, K, V)
    unfused = jax.grad(lambda *a: jnp.sum(f(*a)[:, 20:]), (0, 1, 2))(Q, K, V)
    for a, b in zip(gradient, unfused, strict=True):
        np.testing.assert_array_equal(jnp.isnan(a), jnp.isnan(b))
        assert_close(jnp.nan_to_num(a), jnp.nan_to_num(b), 512.0)


def test_a_choice_behind_the_softmax_of_rows_without_elements():
    """0/0 that is not chosen is not in any gradient."""
    seen = jnp.arange(LENGTH)[:, None] >= jnp.arange(LENGTH) + 3  # the first 3 queries see nothing

    def f(q, k, v):
        p = jax.nn.softmax(jnp.where(seen, scores(q, k), -jnp.inf))
        return jnp.einsum("bhij,bjhd->bihd", jnp.where(seen, p, 0), v)

    found, expected = (jax.grad(lambda *a, f=f: jnp.sum(f(*a)), (0, 1, 2))(Q, K, V) for f in (aicf_jax.fuse(f), f))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(jnp.isnan(a), jnp.isnan(b))
        assert_close(jnp.nan_to_num(a), jnp.nan_to_num(b), 512.0)
    assert not bool(jnp.isnan(found[2]).any())


def test_huge_logits():
    assert_close(jax.jit(aicf_jax.fuse(causal))(1e4 * Q, K, V), jax.jit(causal)(1e4 * Q, K, V), 1e5)
    assert bool(jnp.isfinite(aicf_jax.fuse(causal)(1e15 * Q, 1e15 * K, V)).all())


def test_products_with_an_algorithm_for_both_operands():
    """`jax.nn.dot_product_attention` asks for BF16_BF16_F32 where its operands are bfloat16."""
    q, k, v = (normal(i, 1, 20, 2, 8).astype(jnp.bfloat16) for i in range(3))

    def f(q, k, v):
        return jnp.sum(jax.nn.dot_product_attention(q, k, v, is_causal=True).astype(jnp.float32) ** 2)

    (fusion,) = aicf_jax.explain(f, q, k, v).fusions
    assert fusion.kernel == "streamed_attention"
    for found, want in zip(
        jax.grad(aicf_jax.fuse(f), (0, 1, 2))(q, k, v), jax.grad(f, (0, 1, 2))(q, k, v), strict=True
    ):
        # weights, products and results are rounded to bfloat16 in both, some eight times
        close = jnp.abs(found.astype(jnp.float32) - want.astype(jnp.float32)) <= 8 * 2**-8 * jnp.abs(want).max()
        assert bool(close.all())


@pytest.mark.parametrize("shape", [(2, HEADS, 1, 1), (1, HEADS, 1, 1), (2, 1, 1, 1), (2, HEADS, LENGTH, 1)], ids=str)
def test_narrow_gradients_of_a_bias_that_is_summed_over_queries_and_keys(shape):
    """Summed in float32 over both, then rounded once, beside gradients of other arrays that vary along one of them."""

    def f(q, k, v, bias):
        return values(scores(q, k) + bias, v)

    q, k, v, bias = (x.astype("float16") for x in (Q, K, V, normal(3, *shape)))

    def gradients(g, *args):
        return jax.jit(jax.grad(loss(g), (0, 1, 2, 3)))(*args)

    policy = aicf_jax.Policy(on_failure="raise")
    found = gradients(aicf_jax.fuse(f, policy=policy), q, k, v, bias)
    exact = gradients(f, *(x.astype("float32") for x in (q, k, v, bias)))
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == "float16"
        # Scores, weights, results and their gradients are each rounded to 11 bits; what is summed is as large as a
        # result's gradient, so that a gradient that comes out near 0 keeps the error of its terms.
        np.testing.assert_allclose(a.astype("float32"), b, rtol=0, atol=64 * 2**-11 * max(1.0, float(jnp.abs(b).max())))
