"""Configurations of the backward check themselves and fit the device; arguments that do not fit are refused by name."""

import jax.numpy as jnp
import pytest

from pallas_kernels import _mosaic
from pallas_kernels.attention import BackwardConfig, backward
from pallas_kernels.attention.gradient_problem import default_backward


@pytest.mark.parametrize("options", [{"block_k": 96}, {"block_q": 256}, {"stages": 1}])
def test_a_configuration_that_cannot_run_cannot_be_built(options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"BackwardConfig\({name}=...\): expected .*, found"):
        BackwardConfig(**options)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 112, 128])
@pytest.mark.parametrize(("is_plain", "is_drawn"), [(True, False), (False, False), (True, True), (False, True)])
@pytest.mark.parametrize(("per_score", "per_column"), [(0, 0), (0, 12), (1, 4), (4, 0), (5, 12), (6, 16)])
def test_defaults_fit_the_device(head_dim, is_plain, is_drawn, per_score, per_column):
    config = default_backward(head_dim, is_plain, per_score, per_column, is_drawn)
    assert config.smem_bytes(head_dim, per_score, per_column) <= _mosaic.HOPPER_SMEM_BYTES
    assert config.stages >= (2 if per_score > 5 or (head_dim > 64 and (is_drawn or per_score)) else 3)


@pytest.mark.parametrize(
    ("head_dim", "beside", "is_split"),
    [
        (128, {}, False),
        (128, {"is_plain": False}, False),
        (128, {"per_score": 4}, False),
        (128, {"per_column": 4}, False),
        (128, {"is_plain": False, "per_score": 1}, True),
        (128, {"per_score": 5}, True),
        (128, {"per_score": 4, "per_column": 1}, True),
        (128, {"per_column": 8}, True),
        (128, {"is_drawn": True}, True),
        (96, {"is_drawn": True}, False),
        (96, {"is_drawn": True, "is_plain": False}, True),
        (64, {"is_drawn": True, "is_plain": False, "per_score": 5, "per_column": 8}, False),
        (144, {}, True),
    ],
)
def test_sums_are_split_where_what_is_beside_them_leaves_no_registers(head_dim, beside, is_split):
    assert default_backward(head_dim, **{"is_plain": True} | beside).split_sums == is_split


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


def test_backward_refuses_more_beside_the_scores_than_there_is_shared_memory_for():
    x = jnp.zeros((1, 48, 1, 256), jnp.bfloat16)
    rows, bias = jnp.zeros((1, 1, 48)), jnp.zeros((1, 1, 48, 48))
    with pytest.raises(
        ValueError, match=r"backward\(config=...\): expected at most 232448 bytes of shared memory, found"
    ):
        backward(x, x, x, x, rows, rows, x, bias=bias)
