"""The gradient of a product by one operand: as a product of matrices, with the value it has as jax writes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aicf_jax
from tests.support import normal

# (einsum, shapes of x and w): rows of several dimensions, features of several, either operand transposed or first.
MATRICES = {
    "dense": ("bsk,kn->bsn", (2, 5, 4), (4, 3)),
    "heads": ("bsk,khd->bshd", (2, 5, 4), (4, 2, 3)),
    "out of heads": ("bshd,hdn->bsn", (2, 5, 2, 3), (2, 3, 4)),
    "transposed weight": ("bsk,nk->bsn", (2, 5, 4), (3, 4)),
    "contracted first": ("kbs,kn->bsn", (4, 2, 5), (4, 3)),
    "weight first": ("nk,kbs->nbs", (3, 4), (4, 2, 5)),
    "three of rows": ("abck,kn->abcn", (2, 1, 3, 4), (4, 3)),
    "one row": ("bsk,kn->bsn", (1, 1, 4), (4, 3)),
    "no row": ("bsk,kn->bsn", (2, 0, 4), (4, 3)),
    "nothing summed": ("bsk,kn->bsn", (2, 5, 0), (0, 3)),
}
# Rows that are one dimension, a batch, and dimensions that are not side by side, are written as jax does.
AS_WRITTEN = {
    "one of rows": ("sk,kn->sn", (5, 4), (4, 3)),
    "batch": ("bsk,bkn->bsn", (2, 5, 4), (2, 4, 3)),
    "apart": ("bksl,kln->bsn", (2, 4, 5, 3), (4, 3, 2)),
}


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """The tests have eight, over which rows may be split."""
    monkeypatch.setattr(jax, "device_count", lambda *args: 1)
    aicf_jax.clear_caches()
    yield
    aicf_jax.clear_caches()


def loss(formula, dtype=None):
    def f(x, w, b):
        return jnp.einsum(formula, x, w, preferred_element_type=dtype) + b

    return f


def arguments(formula, x, w, dtype):
    shape = jax.eval_shape(loss(formula), jnp.ones(x), jnp.ones(w), jnp.float32(0)).shape
    return normal(1, *x, dtype=dtype), normal(2, *w, dtype=dtype), normal(3, *shape[-1:], dtype=dtype)


@pytest.mark.parametrize("name", [*MATRICES, *AS_WRITTEN])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_are_those_of_jax(name, dtype):
    formula, *shapes = {**MATRICES, **AS_WRITTEN}[name]
    args, f = arguments(formula, *shapes, dtype), loss(formula)
    ct = normal(4, *f(*args).shape, dtype=dtype)
    found, expected = (jax.vjp(g, *args)[1](ct) for g in (aicf_jax.fuse(f), f))
    tolerance = 16 * float(jnp.finfo(dtype).eps)
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(*(np.asarray(x, np.float64) for x in (a, b)), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", MATRICES)
def test_precision_and_type_of_the_sum_are_those_of_the_product(name):
    formula, *shapes = MATRICES[name]
    args, f = arguments(formula, *shapes, "bfloat16"), loss(formula, jnp.float32)
    found, expected = (jax.grad(lambda *a, g=g: g(*a).sum(), (0, 1))(*args) for g in (aicf_jax.fuse(f), f))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(*(np.asarray(x, np.float64) for x in (a, b)), rtol=2**-6, atol=2**-6)


def last_product(name):
    """The text of the product that a weight's gradient is."""
    formula, *shapes = {**MATRICES, **AS_WRITTEN}[name]
    f = aicf_jax.fuse(loss(formula))
    args = arguments(formula, *shapes, "float32")
    lines = jax.jit(jax.grad(lambda *a: (f(*a) ** 2).sum(), 1)).lower(*args).as_text().splitlines()
    return [line for line in lines if "stablehlo.dot_general" in line][-1]


def test_rows_of_several_dimensions_are_merged():
    for name in ("dense", "heads", "three of rows"):
        assert "contracting_dims = [0] x [0]" in last_product(name), name
    assert "batching_dims = [0] x [0]" in last_product("batch")


def test_a_weight_with_several_dimensions_of_rows_is_one_matrix():
    """Of heads and their features: XLA transposed such a weight when the program starts, and kept the copy."""
    formula, *shapes = MATRICES["out of heads"]
    f, args = aicf_jax.fuse(loss(formula)), arguments(formula, *shapes, "float32")
    text = jax.jit(jax.grad(lambda *a: (f(*a) ** 2).sum(), 0)).lower(*args).as_text()
    (*_, last) = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert "tensor<6x4xf32>" in last and "tensor<2x3x4xf32>" not in last


def test_on_several_devices_rows_are_not_merged(monkeypatch):
    """Batch and positions may each be split over devices."""
    monkeypatch.setattr(jax, "device_count", lambda *args: 8)
    assert "contracting_dims = [0, 1] x [0, 1]" in last_product("dense")


@pytest.mark.parametrize("unit", ["glu", "two layers"])
def test_gates_and_chains_take_it_too(unit):
    x, w, v = normal(1, 2, 5, 4), normal(2, 4, 3), normal(3, 4, 3)
    f = {
        "glu": lambda x, w, v: jax.nn.silu(x @ w) * (x @ v),
        "two layers": lambda x, w, v: jax.nn.gelu(x @ w) @ v.T,
    }[unit]
    found, expected = (jax.grad(lambda *a, g=g: (g(*a) ** 2).sum(), (0, 1, 2))(x, w, v) for g in (aicf_jax.fuse(f), f))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    again = jax.vmap(jax.grad(lambda w: (aicf_jax.fuse(f)(x, w, v) ** 2).sum()))(jnp.stack([w, 2 * w]))
    np.testing.assert_allclose(again[0], expected[1], rtol=2e-5, atol=2e-5)
