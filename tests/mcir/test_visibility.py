"""Skipped blocks: never one that matters."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mcir
from mcir.attention import Problem
from mcir.derive import derive_bound
from mcir.interpret import blocks
from mcir.visibility import visible_blocks
from tests.mcir.functions import ROUNDOFF, WORST, blocked, close, scores

N, M = 13, 17

# -- visible_blocks against brute force --------------------------------------------------------------------------------


def masked_program(mask, block_i, block_j):
    def f(x):
        seen = mask(jnp.arange(N)[:, None], jnp.arange(M)[None])
        return jax.nn.logsumexp(jnp.where(seen, x, -jnp.inf), axis=-1)

    program = mcir.derive(f, jax.ShapeDtypeStruct((N, M), "float32"))
    stream = next(s for _, s in program.statements() if isinstance(s, mcir.Stream))
    return program.with_blocks(i=block_i, j=block_j), stream


def by_brute_force(mask, program):
    seen = np.broadcast_to(np.asarray(mask(np.arange(N)[:, None], np.arange(M)[None])), (N, M))
    rows, columns = (blocks(program.axis(a)) for a in "ij")
    return np.array([[seen[slice(*a), slice(*b)].any() for b in columns] for a in rows])


def found_blocks(program, stream):
    found = visible_blocks(program, stream)
    assert found is not None
    tiled, seen = found
    return seen if tiled == ("i",) else np.broadcast_to(seen, (program.axis("i").count, seen.shape[-1]))


small = st.integers(-4, 4)


def affine(a, b, c, i, j):
    return a * i + b * j + c


@st.composite
def index_expressions(draw):
    """Affine in the positions; of two such the larger or smaller, their distance from zero."""
    one, two = (functools.partial(affine, draw(small), draw(small), draw(st.integers(-20, 20))) for _ in range(2))
    kind = draw(st.sampled_from(["affine", "affine", "max", "min", "abs", "product"]))
    return {
        "affine": one,
        "max": lambda i, j: jnp.maximum(one(i, j), two(i, j)),
        "min": lambda i, j: jnp.minimum(one(i, j), two(i, j)),
        "abs": lambda i, j: abs(one(i, j)),
        "product": lambda i, j: one(i, j) * two(i, j),
    }[kind]


@st.composite
def comparisons(draw):
    a, b = draw(index_expressions()), draw(index_expressions())
    op = draw(st.sampled_from(["ge", "gt", "le", "lt", "eq", "ne"]))
    return lambda i, j: getattr(jax.lax, op)(*jnp.broadcast_arrays(a(i, j), b(i, j)))


masks = st.recursive(
    comparisons(),
    lambda inner: st.one_of(
        st.builds(lambda a, b: lambda i, j: a(i, j) & b(i, j), inner, inner),
        st.builds(lambda a, b: lambda i, j: a(i, j) | b(i, j), inner, inner),
        st.builds(lambda a: lambda i, j: ~a(i, j), inner),
    ),
    max_leaves=4,
)


@hypothesis.settings(max_examples=30)
@hypothesis.given(masks, st.integers(1, 8), st.integers(1, 8))
def test_a_visible_block_is_never_hidden(mask, block_i, block_j):
    program, stream = masked_program(mask, block_i, block_j)
    if stream.skip is None:  # a mask that says nothing about keys
        return
    seen, needed = found_blocks(program, stream), by_brute_force(mask, program)
    assert (seen | ~needed).all()


EXACT = {
    "causal": lambda i, j: i >= j,
    "causal, bottom right": lambda i, j: i + (M - N) >= j,
    "anticausal": lambda i, j: i <= j,
    "window": lambda i, j: (i - j <= 3) & (j - i <= 2),
    "causal window": lambda i, j: (j <= i) & (i - j < 4),
    "outside of a window": lambda i, j: (i - j > 5) | (j - i > 5),
    "distance": lambda i, j: abs(i - j) <= 3,
    "first keys": lambda i, j: (j < 4) & (i >= 0),
    "causal or prefix": lambda i, j: (j <= i) | (j < 3),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("block_i, block_j", [(1, 1), (3, 2), (4, 5), (13, 3)])
def test_exact_for_the_usual_masks(name, block_i, block_j):
    program, stream = masked_program(EXACT[name], block_i, block_j)
    if name == "distance" and (block_i, block_j) != (1, 1):
        assert (found_blocks(program, stream) | ~by_brute_force(EXACT[name], program)).all()
        return
    np.testing.assert_array_equal(found_blocks(program, stream), by_brute_force(EXACT[name], program))


# -- proofs ------------------------------------------------------------------------------------------------------------


def softmax(x):
    return jax.nn.softmax(x, axis=-1)


def causal(x, late=0):
    return jnp.arange(x.shape[-2])[:, None] - late >= jnp.arange(x.shape[-1])


def fill_with(number, late=0):
    def f(q, k, v):
        x = scores(q, k)
        return softmax(jnp.where(causal(x, late), x, number)) @ v

    return f


def scaled_after_the_mask(q, k, v):
    x = scores(q, k)
    return softmax(jnp.where(causal(x, 2), x, -1e30) * 0.5) @ v


def added_after_the_mask(q, k, v):
    x = scores(q, k)
    return softmax(jnp.where(causal(x, 2), x, -1e3) + jnp.arange(M) * 1e3) @ v


def additive(q, k, v):
    x = scores(q, k)
    return softmax(x + jnp.where(causal(x, 2), 0.0, -1e30)) @ v


def after_softmax(q, k, v):
    x = scores(q, k)
    return jnp.where(causal(x), softmax(x), 0) @ v


def unmasked_maximum(q, k, v):
    x = scores(q, k)
    p = jnp.exp(jnp.where(causal(x), x, -1e30) - jnp.max(x, axis=-1, keepdims=True))
    return (p / jnp.sum(p, axis=-1, keepdims=True)) @ v


def two_fills(q, k, v):
    x = scores(q, k)
    x = jnp.where(jnp.arange(M) >= 2, jnp.where(causal(x), x, -2.0), -1e30)
    return softmax(x) @ v


def one_product_sees_all(q, k, v):
    x = scores(q, k)
    return softmax(jnp.where(causal(x), x, -1e30)) @ v + x @ v


def low_rows(q, k, v):
    """Scores of the first rows are as low as the fill."""
    x = scores(q, k) - jnp.where(jnp.arange(N) < 4, 1e4, 0.0)[:, None]
    return softmax(jnp.where(causal(x), x, -1e4)) @ v


def base_two(q, k, v):
    x = jnp.where(causal(scores(q, k), 2), scores(q, k), -140.0)
    p = jnp.exp2(x - jnp.max(x, axis=-1, keepdims=True))
    return (p / jnp.sum(p, axis=-1, keepdims=True)) @ v


PROOFS = [
    (fill_with(-jnp.inf), True),
    (fill_with(-1e30), True),
    (fill_with(-1e30, late=3), True),  # rows that see nothing: uniform
    (fill_with(-3.0), True),  # hidden scores count: the check at run time visits all blocks
    (fill_with(-110.0), True),
    (fill_with(0.0), True),
    (low_rows, True),
    (base_two, True),
    (scaled_after_the_mask, False),
    (added_after_the_mask, False),
    (additive, False),
    (after_softmax, False),
    (unmasked_maximum, False),
    (two_fills, None),
    (one_product_sees_all, False),
]


def arrays(seed=0, scale=2.0):
    rng = np.random.default_rng(seed)
    shapes = ((2, N, 4), (2, M, 4), (2, M, 3))
    return [jnp.asarray(scale * rng.standard_normal(s), "float32") for s in shapes]


def skips(derived):
    return [s.skip for _, s in derived.program.statements() if isinstance(s, mcir.Stream) and s.skip is not None]


@pytest.mark.parametrize("function, skipped", PROOFS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_what_is_skipped_does_not_matter(function, skipped):
    derived = blocked(derive_bound(function, *arrays()), 3)
    if skipped is not None:
        assert bool(skips(derived)) == skipped
    (found,) = jax.jit(mcir.lower(derived))(*arrays())
    expected = jax.jit(function)(*arrays())
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    # Products of scores up to 50 in magnitude: absolute errors in them are relative errors of the weights.
    close(np.nan_to_num(found), np.nan_to_num(expected), ROUNDOFF["float32"] * WORST * 4)


def test_rows_that_see_nothing_are_uniform():
    q, k, v = arrays()
    derived = blocked(derive_bound(fill_with(-1e30, late=3), q, k, v), 3)
    (found,) = mcir.lower(derived)(q, k, v)
    close(found[:, :3], np.broadcast_to(v.mean(1, keepdims=True), (2, 3, 3)), ROUNDOFF["float32"] * WORST)


@pytest.mark.parametrize("fill", [-1e30, -jnp.inf])
def test_left_padded_batches(fill):
    """Queries in the padding see nothing, and which they are is data."""

    def f(q, k, v, padding):
        x = scores(q, k)
        seen = causal(x) & (jnp.arange(M) >= padding[:, None, None])
        return softmax(jnp.where(seen, x, fill)) @ v

    q, k, v = arrays()
    padding = jnp.asarray([0, 5], jnp.int32)
    derived = blocked(derive_bound(f, q, k, v, padding), 3)
    assert skips(derived)
    (found,) = jax.jit(mcir.lower(derived))(q, k, v, padding)
    expected = jax.jit(f)(q, k, v, padding)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    close(np.nan_to_num(found), np.nan_to_num(expected), ROUNDOFF["float32"] * WORST * 4)


def test_the_backward_of_rows_that_see_nothing():
    """With m and l apart the weights of a row at the fill are 1/l; m + log l would have lost log l."""
    options = dict(heads=2, q_len=N, kv_len=N - 3, head_dim=4, value_dim=3, causal=True, align="bottom_right")
    problem = Problem(**options, fill=-1e30)
    q, k, v = (x[None] for x in arrays())
    k, v = k[:, :, : N - 3], v[:, :, : N - 3]
    out, m, l = jax.jit(problem.forward(True))(q, k, v)
    dout = jnp.ones_like(out) + out
    assert (l[0, :, :3] == N - 3).all()
    expected = jax.vjp(problem.forward(False), q, k, v)[1](dout)
    derived = blocked(derive_bound(problem.backward(), q, k, v, out, m, l, dout), 3)
    assert [s.rows for s in skips(derived)] == ["m"]
    found = jax.jit(mcir.lower(derived))(q, k, v, out, m, l, dout)
    for a, b in zip(found, expected, strict=True):
        close(a, b, ROUNDOFF["float32"] * WORST * 4)
