"""Shapes and spellings of a matrix product with an epilogue.

Odd, empty and one-sized axes, flattened leading axes, batch axes, transposed operands, einsum, biases with two axes.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import aicf_jax
from tests.support import ACTIVATION_ROUNDINGS, normal
from tests.transformations import assert_fused_same


def check(f, args, longest_sum, names=("vjp", "jvp", "vmap_everything")):
    """Values, cotangents, tangents and batches of fused and unfused agree; all in one compiled program.

    Tolerance: unit roundoff x (longest sum in the forward or backward products + activation) x two passes.
    """
    assert_fused_same(f, args, names, roundings=longest_sum + ACTIVATION_ROUNDINGS)


# m, k, n of [m, k] @ [k, n] + [n]
SIZES = [
    (0, 4, 3),
    (5, 0, 3),
    (5, 4, 0),
    (0, 0, 0),  # empty rows, sum, columns: an empty sum is zero
    (1, 1, 1),
    (1, 7, 1),
    (7, 1, 5),
    (1, 5, 7),  # ones, where a broadcast is easily mistaken for a bias
    (13, 17, 11),
    (3, 31, 2),  # primes: no tile divides them
]


def matrices(m, k, n):
    return normal(1, m, k), normal(2, k, n), normal(3, n)


@pytest.mark.parametrize("m, k, n", SIZES)
def test_matrix_sizes(m, k, n):
    check(lambda x, w, b: jax.nn.gelu(x @ w + b), matrices(m, k, n), max(m, k, n))


@pytest.mark.parametrize("m, k, n", [(0, 4, 3), (5, 0, 3), (1, 1, 1), (13, 17, 11)])
def test_matrix_sizes_in_eager_calls(m, k, n):
    for names in ("value", "grad"):
        check(lambda x, w, b: jax.nn.relu(x @ w + b), matrices(m, k, n), max(m, k, n), names)


@pytest.mark.parametrize("leading", [(), (1,), (3,), (2, 3), (2, 1, 3), (2, 0), (2, 3, 2, 1)], ids=str)
@pytest.mark.parametrize("activation", [jax.nn.silu, None], ids=["silu", "none"])
def test_leading_axes(leading, activation):
    def f(x, w, b):
        z = x @ w + b
        return activation(z) if activation else z

    check(f, (normal(1, *leading, 5), normal(2, 5, 4), normal(3, 4)), 12)  # dw sums over the 12 rows at most


def contract(lhs, rhs):
    return lambda x, w: lax.dot_general(x, w, ((lhs, rhs), ((), ())))


# name: (product, shape of x, shape of w, shape of b); each is one GEMM after flattening
SPELLINGS = {
    "x @ w.T": (lambda x, w: x @ w.T, (6, 5), (4, 5), (4,)),
    "x.T @ w": (lambda x, w: x.T @ w, (5, 6), (5, 4), (4,)),
    "x.T @ w.T": (lambda x, w: x.T @ w.T, (5, 6), (4, 5), (4,)),
    "(w.T @ x.T).T": (lambda x, w: (w.T @ x.T).T, (6, 5), (5, 4), (4,)),
    "jnp.dot": (jnp.dot, (2, 3, 5), (5, 4), (4,)),
    "jnp.matmul": (jnp.matmul, (2, 3, 5), (5, 4), (4,)),
    "tensordot": (lambda x, w: jnp.tensordot(x, w, 1), (2, 3, 5), (5, 4), (4,)),
    "tensordot of two axes": (lambda x, w: jnp.tensordot(x, w, 2), (2, 3, 5), (3, 5, 4), (4,)),
    "dot_general, lhs axis 0": (contract([0], [0]), (5, 6), (5, 4), (4,)),
    "dot_general, rhs axis 1": (contract([1], [1]), (6, 5), (4, 5), (4,)),
    "dot_general, two axes": (contract([1, 2], [0, 1]), (6, 2, 5), (2, 5, 4), (4,)),
    "einsum md,df->mf": (lambda x, w: jnp.einsum("md,df->mf", x, w), (6, 5), (5, 4), (4,)),
    "einsum bsd,df->bsf": (lambda x, w: jnp.einsum("bsd,df->bsf", x, w), (2, 3, 5), (5, 4), (4,)),
    "einsum bsd,fd->bsf": (lambda x, w: jnp.einsum("bsd,fd->bsf", x, w), (2, 3, 5), (4, 5), (4,)),
    "einsum bds,df->bsf": (lambda x, w: jnp.einsum("bds,df->bsf", x, w), (2, 5, 3), (5, 4), (4,)),
    "einsum df,bsd->bsf": (lambda x, w: jnp.einsum("df,bsd->bsf", w, x), (2, 3, 5), (5, 4), (4,)),
    "einsum bsd,dhk->bshk": (lambda x, w: jnp.einsum("bsd,dhk->bshk", x, w), (2, 3, 5), (5, 2, 4), (2, 4)),
    "einsum bshk,hkd->bsd": (lambda x, w: jnp.einsum("bshk,hkd->bsd", x, w), (2, 3, 2, 5), (2, 5, 4), (4,)),
    "reshape, matmul, reshape": (lambda x, w: (x.reshape(6, 5) @ w).reshape(2, 3, 4), (2, 3, 5), (5, 4), (4,)),
}


def epilogue(product):
    return lambda x, w, b: jax.nn.gelu(product(x, w) + b)


def spelling_args(x, w, b):
    return normal(1, *x), normal(2, *w), normal(3, *b)


@pytest.mark.parametrize("product, x, w, b", SPELLINGS.values(), ids=SPELLINGS)
def test_spellings_of_a_gemm(product, x, w, b):
    check(epilogue(product), spelling_args(x, w, b), 15)  # two contracted axes of 3 and 5


@pytest.mark.parametrize("product, x, w, b", SPELLINGS.values(), ids=SPELLINGS)
def test_every_spelling_of_a_gemm_is_recognized(product, x, w, b):
    report = aicf_jax.explain(epilogue(product), *spelling_args(x, w, b))
    assert report.count("gemm_epilogue") == 1, str(report)


# name: (product, shape of x, shape of w, shape of b); not a plain GEMM: only the results are specified
BATCHED = {
    "bmm": (jnp.matmul, (3, 4, 5), (3, 5, 2), (2,)),
    "bmm, bias per batch": (jnp.matmul, (3, 4, 5), (3, 5, 2), (3, 1, 2)),
    "broadcast batch": (jnp.matmul, (4, 5), (3, 5, 2), (2,)),
    "two batch axes": (jnp.matmul, (2, 3, 4, 5), (2, 3, 5, 2), (2,)),
    "einsum bmd,bdf->bmf": (lambda x, w: jnp.einsum("bmd,bdf->bmf", x, w), (3, 4, 5), (3, 5, 2), (2,)),
    "einsum mbd,bdf->mbf": (lambda x, w: jnp.einsum("mbd,bdf->mbf", x, w), (4, 3, 5), (3, 5, 2), (3, 2)),
    "einsum ted,edf->tef": (lambda x, w: jnp.einsum("ted,edf->tef", x, w), (4, 3, 5), (3, 5, 2), (3, 2)),
    "einsum bqhd,bkhd->bhqk": (lambda x, w: jnp.einsum("bqhd,bkhd->bhqk", x, w), (2, 3, 2, 5), (2, 4, 2, 5), (4,)),
    "einsum with a sum, bsd,df->bf": (lambda x, w: jnp.einsum("bsd,df->bf", x, w), (2, 3, 5), (5, 4), (4,)),
    "einsum with a diagonal, bb,bf->bf": (lambda x, w: jnp.einsum("bb,bf->bf", x, w), (3, 3), (3, 4), (4,)),
    "outer product": (jnp.outer, (5,), (4,), (4,)),
    "inner product of vectors": (jnp.dot, (5,), (5,), ()),
    "vector @ matrix": (jnp.matmul, (5,), (5, 4), (4,)),
    "matrix @ vector": (jnp.matmul, (4, 5), (5,), (4,)),
    "no contracted axis": (contract([], []), (3,), (4,), (4,)),
}


@pytest.mark.parametrize("product, x, w, b", BATCHED.values(), ids=BATCHED)
def test_batch_axes_vectors_and_other_products(product, x, w, b):
    check(epilogue(product), spelling_args(x, w, b), 24)


# what is added to a [2, 3, 4] product: only the first two are a bias over the columns
ADDENDS = {
    "column": (4,),
    "column with unit axes": (1, 1, 4),
    "scalar": (),
    "unit": (1,),
    "row": (3, 1),
    "row and column": (3, 4),
    "batch": (2, 1, 1),
    "full": (2, 3, 4),
    "widening": (5, 2, 3, 4),
}


@pytest.mark.parametrize("shape", ADDENDS.values(), ids=ADDENDS)
def test_shapes_of_the_addend(shape):
    def f(x, w, b):
        return jax.nn.gelu(x @ w + b)

    check(f, (normal(1, 2, 3, 5), normal(2, 5, 4), normal(3, *shape)), 30)


@pytest.mark.parametrize(
    "combine", [lambda z, b: b + z, lambda z, b: z - b, lambda z, b: b - z], ids=["b + z", "z - b", "b - z"]
)
def test_sides_and_signs_of_the_bias(combine):
    check(lambda x, w, b: jax.nn.silu(combine(x @ w, b)), matrices(5, 4, 3), 5)


def test_a_bias_over_two_axes_as_dense_general_has_it():
    def f(x, w, b):
        z = lax.dot_general(x, w, (((2,), (0,)), ((), ())))
        return jax.nn.relu(z + jnp.expand_dims(b, (0, 1)))

    args = normal(1, 2, 3, 5), normal(2, 5, 2, 4), normal(3, 2, 4)
    check(f, args, 6)
    assert aicf_jax.explain(f, *args).count("gemm_epilogue") == 1


def test_the_same_operand_on_both_sides():
    check(lambda x, b: jax.nn.tanh(x @ x.T + b), (normal(1, 4, 5), normal(2, 4)), 5)


def test_operands_that_are_computed():
    """A cast, a slice, a concatenation, a gather or a reshape before the product is not part of the epilogue."""

    def f(x, w, b):
        h = jnp.concatenate([x[:, ::2], jnp.cos(x[:, 1:3])], axis=1)
        return jax.nn.silu(h.reshape(2, -1, 5) @ jnp.flip(w, 0)[jnp.asarray([0, 2, 1, 4, 3])] + b[::-1])

    check(f, (normal(1, 4, 6), normal(2, 5, 4), normal(3, 4)), 5)
