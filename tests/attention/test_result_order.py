"""The order of the result's dimensions: attention writes what the program transposes it to, and nothing else."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aicf_jax

B, S, H, D = 2, 37, 3, 4
Q, K, V = (jnp.asarray(np.random.default_rng(n).normal(size=(B, S, H, D)), jnp.float32) for n in range(3))


def weights(q, k):
    return jax.nn.softmax(jnp.einsum("bihd,bjhd->bhij", q, k) / 2)


def einsum_to(order):
    return lambda q, k, v: jnp.einsum(f"bhij,bjhd->{order}", weights(q, k), v)


def late(q, k, v):
    x = jnp.einsum("bihd,bjhd->bhij", q, k) / 2
    e = jnp.exp(x - jnp.max(x, -1, keepdims=True))
    return (jnp.einsum("bhij,bjhd->bhid", e, v) / jnp.sum(e, -1, keepdims=True)).swapaxes(1, 2)


def heads_merged(q, k, v):
    return einsum_to("bihd")(q, k, v).reshape(B, S, H * D)


def queries_split(q, k, v):
    """As windows of an image: their positions become rows and columns."""
    return einsum_to("bihd")(q[:, :36], k, v).reshape(B, 6, 6, H * D)


def queries_split_at_once(q, k, v):
    return einsum_to("bhid")(q[:, :36], k, v).reshape(B, H, 6, 6, D)


def both_orders(q, k, v):
    y = einsum_to("bhid")(q, k, v)
    return y, y.swapaxes(1, 2)


def turned_twice(q, k, v):
    """The second transposition follows a use of the first one's result."""
    y = einsum_to("bihd")(q, k, v)
    return jnp.tanh(y), y.swapaxes(0, 1)


#: With the number of transpositions of the result that are left outside of the operation.
CASES = {
    "as flax and jax.nn have it": (einsum_to("bihd"), 0),
    "positions first": (einsum_to("ibhd"), 0),
    "positions last": (einsum_to("bhdi"), 0),
    "as the product gives it": (einsum_to("bhid"), 0),
    "normalized after the product": (late, 0),
    "heads merged": (heads_merged, 0),
    "queries split": (queries_split, 0),
    "queries split at once": (queries_split_at_once, 0),
    "both orders": (both_orders, 1),
    "turned twice": (turned_twice, 1),
}


def loss(f):
    return lambda *args: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(*args)))


@pytest.mark.parametrize("name", CASES)
def test_the_transposition_is_part_of_the_operation(name):
    f, left = CASES[name]
    assert [x.kernel for x in aicf_jax.explain(f, Q, K, V).fusions] == ["streamed_attention"]
    outside = [e for e in jax.make_jaxpr(aicf_jax.fuse(f))(Q, K, V).eqns if e.primitive.name == "transpose"]
    assert len(outside) == left


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    f, _ = CASES[name]
    found, want = (jax.jit(lambda *a, f=f: (f(*a), jax.grad(loss(f), (0, 1, 2))(*a))) for f in (aicf_jax.fuse(f), f))
    for a, b in zip(jax.tree.leaves(found(Q, K, V)), jax.tree.leaves(want(Q, K, V)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        # sums of 37 terms, twice, of values up to about 4
        np.testing.assert_allclose(a, b, rtol=0, atol=512 * 2**-24 * max(1.0, float(jnp.max(jnp.abs(b)))))


def test_no_array_is_transposed_as_a_whole_forward_and_backward():
    """Loops take tiles out of arrays as they lie; with the transposition outside, result and cotangent would not be."""
    step = jax.value_and_grad(loss(aicf_jax.fuse(einsum_to("bihd"))), (0, 1, 2))
    text = jax.jit(step).lower(Q, K, V).as_text()
    shapes = re.findall(r"stablehlo\.transpose [^\n]*: \(tensor<([\dx]+)xf32>\)", text)
    assert shapes, "tiles are"
    assert [s for s in shapes if np.prod([int(n) for n in s.split("x")]) >= B * S * H * D] == []
