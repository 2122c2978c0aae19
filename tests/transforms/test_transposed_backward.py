"""The transpose of a backward, which is linear in the cotangent: the tangent map, as of the unfused program."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aicf_jax
from tests.support import normal

RAISE = aicf_jax.Policy(on_failure="raise")
SCALE, BIAS, W = normal(1, 64), normal(2, 64), normal(3, 64, 64)


def norm(module, **params):
    return lambda x: module.apply({"params": params}, x)


def dense(activation):
    return lambda x: activation(x @ W + BIAS)


FUNCTIONS = {
    "layer_norm": norm(nn.LayerNorm(), scale=SCALE, bias=BIAS),
    "layer_norm of a sum": lambda x: norm(nn.LayerNorm(), scale=SCALE, bias=BIAS)(x + jnp.sin(x)),
    "rms_norm": norm(nn.RMSNorm(), scale=SCALE),
    "product and bias": dense(lambda z: z),
    "glu": lambda x: nn.silu(x @ W) * (x @ W.T),
    **{f.__name__: dense(f) for f in (nn.gelu, nn.silu, nn.softplus, nn.elu, nn.relu, nn.sigmoid, jnp.tanh)},
}


def transposed(f, x, u):
    """The transpose at u of the map from cotangents of f(x) to cotangents of x."""
    back = jax.vjp(f, x)[1]
    return jax.linear_transpose(lambda ct: back(ct)[0], f(x))(u)[0]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("rows", [1, 9, 4096], ids=["a row", "kept", "1 MiB, computed again"])
def test_is_the_tangent(name, rows):
    f = FUNCTIONS[name]
    fused = aicf_jax.fuse(f, policy=RAISE)
    assert aicf_jax.explain(f, jnp.ones((rows, 64))).fusions
    x, u = normal(4, rows, 64), normal(5, rows, 64)
    want = jax.jvp(f, (x,), (u,))[1]
    # sums of 64 products, twice
    tolerance = 128 * 2**-23 * float(jnp.abs(want).max())
    np.testing.assert_allclose(transposed(fused, x, u), want, rtol=0, atol=tolerance)
    np.testing.assert_allclose(jax.jit(lambda u: transposed(fused, x, u))(u), want, rtol=0, atol=tolerance)


# Not a norm of 1 MiB: jax 0.10 compiles such a transpose wrongly for the second of a batch, without this package too.
@pytest.mark.parametrize(("name", "rows"), [("layer_norm", 9), ("gelu", 4096)])
def test_of_a_batch(name, rows):
    f, x, u = aicf_jax.fuse(FUNCTIONS[name], policy=RAISE), normal(4, rows, 64), normal(5, 2, rows, 64)
    found = jax.vmap(lambda u: transposed(f, x, u))(u)
    want = jnp.stack([jax.jvp(FUNCTIONS[name], (x,), (v,))[1] for v in u])
    np.testing.assert_allclose(found, want, rtol=0, atol=128 * 2**-23 * float(jnp.abs(want).max()))
