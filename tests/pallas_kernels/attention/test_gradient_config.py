"""Configurations of the backward check themselves and fit the device; arguments that do not fit are refused by name."""

import itertools

import jax.numpy as jnp
import pytest

from pallas_kernels import _mosaic
from pallas_kernels.attention import BackwardConfig, backward
from pallas_kernels.attention.gradient_problem import LONGEST_BESIDE_WIDE, default_backward


@pytest.mark.parametrize("options", [{"block_k": 96}, {"block_q": 256}, {"stages": 1}])
def test_a_configuration_that_cannot_run_cannot_be_built(options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"BackwardConfig\({name}=...\): expected .*, found"):
        BackwardConfig(**options)


@pytest.mark.parametrize(("per_score", "per_column"), [(0, 0), (0, 12), (1, 4), (3, 12), (4, 0), (5, 12)])
def test_defaults_fit_the_device(per_score, per_column):
    longest = LONGEST_BESIDE_WIDE if per_score > 3 else 256
    for head_dim, is_plain in itertools.product(range(16, longest + 1, 16), (True, False)):
        config = default_backward(head_dim, is_plain, per_score, per_column)
        assert config.smem_bytes(head_dim, per_score, per_column) <= _mosaic.HOPPER_SMEM_BYTES, head_dim


def ids(*shape, dtype=jnp.int32):
    return jnp.zeros(shape, dtype)


Q, K = jnp.zeros((2, 48, 4, 64), jnp.bfloat16), jnp.zeros((2, 80, 2, 64), jnp.bfloat16)
ROWS = jnp.zeros((2, 4, 48), jnp.float32)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("segments", {"segments": [(ids(2, 1, 48), None)]}),
        ("segments", {"segments": [(None, ids(2, 2, 80))]}),
        ("mask", {"mask": ids(2, 1, 48, 80)}),
        ("bias", {"bias": ids(4, 48, 80, dtype=jnp.float32)}),
        ("bias_factor", {"bias_factor": 0.0}),
        ("key_bias", {"key_bias": ids(2, 4, 48, dtype=jnp.float32)}),
        ("fill", {"fill": -100.0}),
        ("wanted", {"wanted": ("bias",)}),
        ("wanted", {"wanted": ("mask",), "mask": ids(2, 1, 48, 80, dtype=bool)}),
    ],
)
def test_backward_refuses_by_name(name, options):
    with pytest.raises(ValueError, match=rf"backward\({name}=...\): expected .*, found"):
        backward(Q, K, K, Q, ROWS, ROWS, Q, **options)


def test_a_wide_bias_beside_the_longest_heads_is_refused():
    q, k = (jnp.zeros((1, n, 1, 240), jnp.bfloat16) for n in (8, 16))
    rows, bias = jnp.zeros((1, 1, 8)), jnp.zeros((1, 1, 8, 16), jnp.float32)
    with pytest.raises(ValueError, match=r"bias=...\): expected 16 bits beside heads longer than 224, found 240"):
        backward(q, k, k, q, rows, rows, q, bias=bias)
