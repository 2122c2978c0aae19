"""What the program does to Q, K and V before their products: part of attention where it is cheaper tile by tile."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import aicf_jax

B, S, H, D = 2, 37, 3, 4
Q, K, V = (jnp.asarray(np.random.default_rng(n).normal(size=(B, S, H, D)), jnp.float32) for n in range(3))
HEADS_FIRST = (0, 2, 1, 3)


def attention(q, k, v):
    x = jnp.einsum("bihd,bjhd->bhij", q, k)
    seen = jnp.arange(S)[:, None] >= jnp.arange(S)
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(jnp.where(seen, x, -jnp.inf)), v)


def by_hand(q, k, v):
    """Heads first, as many models have it."""
    q, k, v = (x.transpose(HEADS_FIRST) for x in (q, k, v))
    return (jax.nn.softmax(q * D**-0.5 @ k.swapaxes(-1, -2)) @ v).transpose(HEADS_FIRST)


def of_one_array(q, k, v):
    return by_hand(q, q, q)


#: Nothing but the operation is left of these.
TAKEN = {
    "times a number": lambda q, k, v: attention(q * 0.5, k, v),
    "a number times": lambda q, k, v: attention(0.5 * q, k, v),
    "divided by a root": lambda q, k, v: attention(q / jnp.sqrt(D), k, v),
    "keys": lambda q, k, v: attention(q, k / jnp.sqrt(D), v),
    "both": lambda q, k, v: attention(q * D**-0.25, k * D**-0.25, v),
    "twice": lambda q, k, v: attention(q * 0.5 / 3, k, v),
    "flax": lambda q, k, v: linen.dot_product_attention(q, k, v),
    "transposed by hand": by_hand,
    "one array": of_one_array,
    "scaled, then transposed": lambda q, k, v: by_hand(q / 3, k, v),
}


def turned_and_returned(q, k, v):
    turned = k.transpose(HEADS_FIRST)
    return jax.nn.softmax(q.transpose(HEADS_FIRST) @ turned.swapaxes(-1, -2)) @ v.transpose(HEADS_FIRST), turned


def both_operands(q, k, v):
    x = q * 0.5
    return attention(x, x, v)


#: With the operations that are left outside, in the order of the program.
LEFT = {
    # 37 positions of rows that are hidden times something infinite would be NaN, where loops leave them out.
    "a number above one": (lambda q, k, v: attention(q * 3.0, k, v), ["mul"]),
    "divided by less than one": (lambda q, k, v: attention(q / 0.25, k, v), ["div"]),
    "negative": (lambda q, k, v: attention(q * -0.5, k, v), ["mul"]),
    "nothing": (lambda q, k, v: attention(q * 0.0, k, v), ["mul"]),
    "a number by the array": (lambda q, k, v: attention(2.0 / (q * q + 4.0), k, v), ["mul", "add", "div"]),
    "a learned number": (lambda q, k, v: attention(q * V[0, 0, 0, 0], k, v), ["mul"]),
    "one for each head": (lambda q, k, v: attention(q * jnp.array([0.5, 0.25, 0.125])[:, None], k, v), ["mul"]),
    "values": (lambda q, k, v: attention(q, k, v * 0.5), ["mul"]),
    "queries and keys at once": (both_operands, ["mul"]),
    "constant queries": (lambda q, k, v: attention(jnp.full_like(q, 2.0) * 0.5, k, v), []),
    "used elsewhere": (lambda q, k, v: (attention(x := q * 0.5, k, v), x), ["mul"]),
    "transposed and used elsewhere": (turned_and_returned, ["transpose"]),
    "shifted": (lambda q, k, v: attention((q + 1) * 0.5, k, v), ["add"]),
}
CASES = {**TAKEN, **{name: f for name, (f, _) in LEFT.items()}}


def outside(f):
    found = [e.primitive.name for e in jax.make_jaxpr(aicf_jax.fuse(f))(Q, K, V).eqns]
    return [name for name in found if name not in ("fused", "broadcast_in_dim", "squeeze", "slice")]


def loss(f):
    return lambda *args: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(*args)))


def assert_close(found, want, eps=2**-24):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        # sums of 37 terms, twice, of values up to about 4
        np.testing.assert_allclose(a, b, rtol=0, atol=512 * eps * max(1.0, float(np.max(np.abs(b)))))


@pytest.mark.parametrize("name", TAKEN)
def test_nothing_is_left_outside(name):
    (fusion,) = aicf_jax.explain(TAKEN[name], Q, K, V).fusions
    assert (fusion.op, fusion.kernel) == ("attention", "streamed_attention")
    assert "Q" in fusion.backward and "dQ" in fusion.backward
    assert [e.primitive.name for e in jax.make_jaxpr(aicf_jax.fuse(TAKEN[name]))(Q, K, V).eqns] == ["fused"]


@pytest.mark.parametrize("name", LEFT)
def test_what_stays_outside(name):
    f, left = LEFT[name]
    assert [x.op for x in aicf_jax.explain(f, Q, K, V).fusions] == ["attention"]
    assert outside(f) == left


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    f = CASES[name]
    found, want = (jax.jit(lambda *a, f=f: (f(*a), jax.grad(loss(f), (0, 1, 2))(*a))) for f in (aicf_jax.fuse(f), f))
    assert_close(found(Q, K, V), want(Q, K, V))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["flax", "transposed by hand"])
def test_types(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        args = [x.astype(dtype) for x in (Q, K, V)]
        found = jax.jit(jax.value_and_grad(loss(aicf_jax.fuse(TAKEN[name])), (0, 1, 2)))(*args)
        wide = [x.astype("float64" if dtype == "float64" else "float32") for x in args]
        _, exact = jax.jit(jax.value_and_grad(loss(TAKEN[name]), (0, 1, 2)))(*wide)
        assert [g.dtype for g in found[1]] == [dtype] * 3
        assert_close(found[1], [x.astype(dtype) for x in exact], 0.25 * float(jnp.finfo(dtype).eps))


TRANSFORMS = {
    "vmap": lambda f: jax.vmap(f)(*(jnp.stack([x, 2 * x]) for x in (Q, K, V))),
    "vmap over queries only": lambda f: jax.vmap(lambda q: f(q, K, V), -1, 1)(jnp.stack([Q, 2 * Q], -1)),
    "jvp": lambda f: jax.jvp(f, (Q, K, V), (K, V, Q)),
    "jvp of grad": lambda f: jax.jvp(jax.grad(lambda q: loss(f)(q, K, V)), (Q,), (K,)),
    "grad of scan": lambda f: jax.grad(
        lambda q: jax.lax.scan(lambda c, _: (f(c, K, V), None), q, None, length=2)[0].sum()
    )(Q),
    "remat": lambda f: jax.grad(lambda q: loss(jax.checkpoint(f))(q, K, V))(Q),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", ["both", "transposed by hand"])
def test_transforms(name, transform):
    f, apply = TAKEN[name], TRANSFORMS[transform]
    assert_close(jax.jit(lambda: apply(aicf_jax.fuse(f)))(), jax.jit(lambda: apply(f))())


@pytest.mark.parametrize("value", [np.inf, np.nan, 3e38])
@pytest.mark.parametrize("where", [0, 1], ids=["q", "k"])
def test_places_of_nan_under_a_mask(where, value):
    """A hidden block is left out where its numbers are finite, scaled ones too."""
    args = [Q, K, V]
    args[where] = args[where].at[0, 3, 1, 2].set(value)
    f = TAKEN["both"]
    for g in (lambda f: f, lambda f: jax.grad(loss(f), (0, 1, 2))):
        found, want = jax.jit(g(aicf_jax.fuse(f)))(*args), jax.jit(g(f))(*args)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(np.isnan(a), np.isnan(b))


def test_no_array_is_transposed_as_a_whole_forward_and_backward():
    step = jax.value_and_grad(loss(aicf_jax.fuse(by_hand)), (0, 1, 2))
    text = jax.jit(step).lower(Q, K, V).as_text()
    shapes = re.findall(r"stablehlo\.transpose [^\n]*: \(tensor<([\dx]+)xf32>\)", text)
    assert shapes, "tiles are"
    assert [s for s in shapes if np.prod([int(n) for n in s.split("x")]) >= B * S * H * D] == []


def test_gradients_are_scaled_where_they_are_added_up():
    """No array of them is kept to be scaled afterwards."""
    (fusion,) = aicf_jax.explain(TAKEN["flax"], Q, K, V).fusions
    temporaries = [line for line in fusion.backward_program.splitlines() if line.startswith("temporary")]
    assert temporaries == ["temporary total: float32[b, h, i]"]
