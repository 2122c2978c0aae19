"""Configurations check themselves, defaults fit the device, and arguments that do not fit are refused by name."""

import jax.numpy as jnp
import pytest

from pallas_kernels import _mosaic
from pallas_kernels.attention import BackwardConfig, ForwardConfig, forward
from pallas_kernels.attention.config import default_forward, head_swizzle, is_head_dim
from pallas_kernels.attention.gradient_problem import default_backward


@pytest.mark.parametrize(
    "options", [{"block_k": 96}, {"block_k": 256}, {"stages": 0}, {"warpgroups": 3}, {"splits": 0}]
)
def test_a_configuration_that_cannot_run_cannot_be_built(options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"ForwardConfig\({name}=...\): expected .*, found"):
        ForwardConfig(**options)


@pytest.mark.parametrize("options", [{"block_k": 96}, {"block_q": 16}, {"stages": 1}])
def test_nor_one_of_the_backward(options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"BackwardConfig\({name}=...\): expected .*, found"):
        BackwardConfig(**options)


def test_turns_are_taken_by_two():
    with pytest.raises(ValueError, match=r"ping_pong=...\): expected False for one warpgroup"):
        ForwardConfig(warpgroups=1)


@pytest.mark.parametrize("head_dim", range(16, 257, 16))
@pytest.mark.parametrize(("per_score", "per_key"), [(0, 0), (0, 12), (1, 4), (5, 4)])
@pytest.mark.parametrize("ctas", [1, 1000])
def test_defaults_fit_the_device(head_dim, per_score, per_key, ctas):
    assert is_head_dim(head_dim) and head_dim * 2 % head_swizzle(head_dim) == 0
    config = default_forward(head_dim, per_score, per_key, ctas, queries=1, keys=4096, sm_count=132)
    assert config.smem_bytes(head_dim, per_score, per_key) <= _mosaic.HOPPER_SMEM_BYTES
    # Long heads leave room for one block only, beside blocks of a bias or sums in float32.
    assert config.stages >= 2 or head_dim > (176 if per_score > 1 else 240)


@pytest.mark.parametrize("head_dim", range(16, 257, 16))
@pytest.mark.parametrize("is_plain", [True, False])
def test_defaults_of_the_backward_fit_the_device(head_dim, is_plain):
    config = default_backward(head_dim, is_plain)
    assert config.smem_bytes(head_dim) <= _mosaic.HOPPER_SMEM_BYTES
    # Two sums of whole rows are as many registers of a thread as a head is long.
    assert config.split_sums == (head_dim > 128)


@pytest.mark.parametrize(
    ("ctas", "queries", "keys", "splits"),
    [
        (4, 1, 4096, 16),  # parts of 256 keys
        (4, 1, 65536, 33),  # one CTA for each multiprocessor
        (66, 1, 65536, 2),
        (67, 1, 65536, 1),  # which keep more than half of them busy
        (4, 1, 300, 1),
        (4, 65, 65536, 1),  # not few
    ],
)
def test_keys_are_split_where_queries_are_few(ctas, queries, keys, splits):
    assert default_forward(64, 0, 0, ctas, queries, keys, 132).splits == splits


def ids(*shape, dtype=jnp.int32):
    return jnp.zeros(shape, dtype)


Q, K = jnp.zeros((2, 48, 4, 64), jnp.bfloat16), jnp.zeros((2, 80, 2, 64), jnp.bfloat16)


@pytest.mark.parametrize(
    ("name", "args", "options"),
    [
        ("q", (Q.astype(jnp.float32), K, K), {}),
        ("k", (Q, K.astype(jnp.float16), K), {}),
        ("v", (Q, K, K.astype(jnp.float16)), {}),
        ("q", (Q[0], K[0], K[0]), {}),
        ("q", (Q[..., :40], K[..., :40], K[..., :40]), {}),
        ("q", (Q[:, :0], K, K), {}),
        ("k", (Q, K[:1], K[:1]), {}),
        ("k", (Q[:, :, :3], K, K), {}),
        ("v", (Q, K, K[:, :40]), {}),
        ("layouts", (Q, K, K), {"layouts": ("bshd",) * 3}),
        ("layouts", (Q, K, K), {"layouts": ("sbhd",) * 4}),
        ("scale", (Q, K, K), {"scale": -1.0}),
        ("softcap", (Q, K, K), {"softcap": 0.0}),
        ("upper", (Q, K, K), {"upper": -1}),
        ("lower", (Q, K, K), {"lower": 60}),
        ("upper", (Q, K, K), {"lower": 3, "upper": 2}),
        ("segments", (Q, K, K), {"segments": [(ids(2, 1, 48), None)]}),
        ("segments", (Q, K, K), {"segments": [(ids(2, 1, 48), ids(2, 1, 48))]}),
        ("segments", (Q, K, K), {"segments": [(None, ids(2, 1, 80, dtype=jnp.float32))]}),
        ("segments", (Q, K, K), {"segments": [(None, ids(2, 2, 80))]}),
        ("mask", (Q, K, K), {"mask": ids(2, 1, 48, 80)}),
        ("mask", (Q, K, K), {"mask": ids(2, 1, 1, 80, dtype=bool)}),
        ("bias", (Q, K, K), {"bias": ids(2, 4, 48, 80)}),
        ("bias", (Q, K, K), {"bias": ids(4, 48, 80, dtype=jnp.float32)}),
        ("bias_factor", (Q, K, K), {"bias_factor": 0.0}),
        ("key_bias", (Q, K, K), {"key_bias": ids(2, 4, 48, dtype=jnp.float32)}),
        ("fill", (Q, K, K), {"fill": -100.0}),
    ],
)
def test_forward_refuses_by_name(name, args, options):
    with pytest.raises(ValueError, match=rf"forward\({name}=...\): expected .*, found"):
        forward(*args, **options)
