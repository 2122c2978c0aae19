"""The portable kernels in Triton's interpreter, against float64.

The interpreter rounds to bfloat16 towards zero, a GPU to the nearest: bfloat16 has twice the error here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gemm_epilogue import portable as gemm
from pallas_kernels.gemm_epilogue import reference as gemm_reference
from pallas_kernels.gemm_epilogue.activations import ACTIVATIONS
from pallas_kernels.norm import portable as norm
from pallas_kernels.norm import reference as norm_reference

pytest.importorskip("triton", reason="needs Triton, which the extra `gpu` installs for Python 3.12 and later")

U = 2.0**-24


def unit(dtype):
    return {"bfloat16": 2.0**-7, "float16": 2.0**-11, "float32": 8 * U}[dtype]


def normal(seed, *shape, dtype="float16"):
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def exactly(f, *arrays, **options):
    """In float64; one compilation."""
    with jax.enable_x64(True):
        found = jax.jit(lambda *xs: f(*xs, dtype=jnp.float64, **options))(*arrays)
        return jax.tree.map(np.asarray, found)


def assert_near(got, want, dtype, terms):
    """Rounding to `dtype`, and a float32 sum of `terms` terms in any order, beside the largest element."""
    size = np.abs(want).max()
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=unit(dtype), atol=size * (terms + 8) * 2 * U)


# -- GEMM epilogue ---------------------------------------------------------------------------------------

TILES = gemm.TileConfig(32, 16, 16, stages=1, warps=1, group=2)
FORWARD = {
    "whole tiles": ((64, 32, 32), {}),
    "ragged": ((40, 23, 25), {"z_dtype": "float32"}),
    "transposed, batch": ((33, 17, 18), {"trans_a": True, "trans_b": True, "batch": 2}),
    "bias along rows": ((20, 16, 16), {"bias_along": "m", "out_dtype": "float32"}),
    "no bias": ((16, 16, 48), {"bias": False}),
    "bfloat16": ((40, 24, 24), {"dtype": "bfloat16", "z_dtype": "bfloat16"}),
    "one element": ((1, 1, 1), {}),
}


@pytest.mark.parametrize("name", FORWARD)
def test_gemm_epilogue(name):
    (m, n, k), options = FORWARD[name]
    options = dict(options)
    dtype, batch = options.pop("dtype", "float16"), options.pop("batch", None)
    lead = () if batch is None else (batch,)
    a = normal(0, *lead, *((k, m) if options.get("trans_a") else (m, k)), dtype=dtype)
    b = normal(1, *lead, *((n, k) if options.get("trans_b") else (k, n)), dtype=dtype)
    along = m if options.get("bias_along") == "m" else n
    bias = normal(2, along, dtype=dtype) if options.pop("bias", True) else None
    found = gemm.forward(a, b, bias, activation="gelu_tanh", config=TILES, interpret=True, **options)
    stored = [options.pop("out_dtype", dtype), options.pop("z_dtype", None)]
    want = exactly(gemm_reference.forward, a, b, bias, activation="gelu_tanh", **options)
    assert len(found) == (1 if stored[1] is None else 2)
    for got, exact, kept in zip(found, want, stored, strict=False):
        assert str(got.dtype) == kept
        assert_near(got, exact, kept, k)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_derivatives(name):
    """Of each number that a product can give, small, large and special; the product is one with 1."""
    special = [0.0, 1e-7, 1e-4, 0.3, 1.0, 3.0, 8.0, 80.0, 6e4, np.inf, np.nan]
    z = np.array([[s * x for x in special for s in (1, -1)]], np.float16)
    y, kept = gemm.forward(
        jnp.ones((1, 1), jnp.float16), jnp.asarray(z), activation=name, alpha=0.3, out_dtype="float32",
        z_dtype="float32", config=TILES, interpret=True,
    )  # fmt: skip
    want, _ = exactly(gemm_reference.forward, np.ones((1, 1), np.float16), z, activation=name, alpha=0.3)
    np.testing.assert_array_equal(kept, z.astype(np.float32))
    # 1e-5: of `erfc`, which cancels nothing but rounds the square of its argument; see `activations`.
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-12)
    r = y if ACTIVATIONS[name].from_output else kept
    dy = jnp.ones(r.shape, jnp.float16)
    options = {"activation": name, "alpha": 0.3}
    dz, _ = gemm.backward(r, dy, dz_dtype="float32", config=gemm.StripeConfig(16, 16), interpret=True, **options)
    want, _ = exactly(gemm_reference.backward, r, dy, **options)
    np.testing.assert_allclose(dz, want, rtol=1e-5, atol=1e-6)  # 1 - tanh^2 cancels, as in float32


@pytest.mark.parametrize(("shape", "groups"), [((32, 16), 1), ((41, 21), 2), ((1, 1), 3)])
def test_gradient_with_its_sum(shape, groups):
    y, dy = np.tanh(normal(0, *shape, dtype="float32")).astype("float16"), normal(1, *shape)
    config = gemm.StripeConfig(16, 16, groups)
    dz, db = gemm.backward(y, dy, activation="tanh", config=config, db_dtype="float32", interpret=True)
    exact, total = exactly(gemm_reference.backward, y, dy, activation="tanh")
    assert_near(dz, exact, "float16", 1)
    assert_near(db, total, "float32", shape[0] * 4)


def test_gradient_from_the_input():
    z, dy = normal(0, 18, 20, dtype="float32"), normal(1, 18, 20)
    dz, _ = gemm.backward(z, dy, activation="sigmoid", from_output=False, interpret=True)
    exact, _ = exactly(gemm_reference.backward, z, dy, activation="sigmoid", from_output=False)
    assert_near(dz, exact, "float16", 1)


# -- norms -----------------------------------------------------------------------------------------------

NORMS = {
    "centered, a sum": ((5, 20), {"residual": True, "with_sum": True}),
    "moments": ((4, 33), {"variance": "moments", "clamped": True}),
    "root mean square": ((3, 16), {"variance": "mean_square", "bias": False}),
    "alone": ((2, 7), {"scale": False, "bias": False}),
    "one element": ((1, 1), {"variance": "moments", "clamped": True}),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(name):
    shape, options = NORMS[name]
    options = dict(options)
    x, dy = normal(0, *shape), normal(1, *shape)
    residual = normal(2, *shape) if options.pop("residual", False) else None
    scale = normal(3, shape[1], dtype="float32") if options.pop("scale", True) else None
    bias = normal(4, shape[1]) if options.pop("bias", True) else None
    with_sum = options.pop("with_sum", False)
    config = norm.RowConfig(2, 1, 2)
    got = norm.forward(
        x, scale, bias, residual, eps=1e-2, with_sum=with_sum, with_statistics=True, config=config, interpret=True,
        **options,
    )  # fmt: skip
    want = exactly(norm_reference.forward, x, scale, bias, residual, eps=1e-2, **options)
    assert (got.sum is None) == (not with_sum)
    for field in ("y", "sum", "mean", "rstd", "slope"):
        if getattr(got, field) is not None:
            dtype = "float16" if field in ("y", "sum") else "float32"
            assert_near(getattr(got, field), getattr(want, field), dtype, shape[1])
    kept = [None if s is None else np.asarray(s, np.float32) for s in (want.rstd, want.mean, want.slope)]
    arrays = (dy, x, *kept, scale, residual, dy if with_sum else None)
    found = norm.backward(*arrays, dscale="float32", dbias="float32", config=config, interpret=True)
    exact = exactly(norm_reference.backward, *arrays)
    assert_near(found.dx, exact.dx, "float16", 4 * shape[1])
    assert_near(found.dscale, exact.dscale, "float32", 4 * shape[0])
    assert_near(found.dbias, exact.dbias, "float32", 4 * shape[0])


def test_only_what_is_wanted_is_computed():
    x, rstd = normal(0, 3, 5), jnp.ones(3, jnp.float32)
    found = norm.backward(x, x, rstd, with_dx=False, dbias="float16", interpret=True)
    assert found.dx is None and found.dscale is None and found.dbias.dtype == jnp.float16
    assert norm.forward(x, eps=0.1, interpret=True)[1:] == (None,) * 4
