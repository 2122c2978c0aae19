"""Configurations check themselves, defaults fit the device, and arguments that do not fit are refused by name."""

import jax.numpy as jnp
import pytest

from pallas_kernels import _mosaic
from pallas_kernels.attention import ForwardConfig, forward
from pallas_kernels.attention.config import HEAD_DIMS, default_forward


@pytest.mark.parametrize("options", [{"block_k": 96}, {"block_k": 256}, {"stages": 0}])
def test_a_configuration_that_cannot_run_cannot_be_built(options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"ForwardConfig\({name}=...\): expected .*, found"):
        ForwardConfig(**options)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_defaults_fit_the_device(head_dim):
    config = default_forward(head_dim)
    assert config.stages >= 2 and config.smem_bytes(head_dim) <= _mosaic.HOPPER_SMEM_BYTES


Q, K = jnp.zeros((2, 48, 4, 64), jnp.bfloat16), jnp.zeros((2, 80, 2, 64), jnp.bfloat16)


@pytest.mark.parametrize(
    ("name", "args", "options"),
    [
        ("q", (Q.astype(jnp.float32), K, K), {}),
        ("k", (Q, K.astype(jnp.float16), K), {}),
        ("v", (Q, K, K.astype(jnp.float16)), {}),
        ("q", (Q[0], K[0], K[0]), {}),
        ("q", (Q[..., :32], K[..., :32], K[..., :32]), {}),
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
    ],
)
def test_forward_refuses_by_name(name, args, options):
    with pytest.raises(ValueError, match=rf"forward\({name}=...\): expected .*, found"):
        forward(*args, **options)
