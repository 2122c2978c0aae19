"""Configurations check themselves, defaults fit the device, and arguments that do not fit are refused by name."""

import jax.numpy as jnp
import pytest

from pallas_kernels import _mosaic
from pallas_kernels.gemm_epilogue import BackwardConfig, ForwardConfig, backward, forward
from pallas_kernels.gemm_epilogue.config import default_backward, default_forward, swizzle_of


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (ForwardConfig, {"tile_m": 96}),
        (ForwardConfig, {"tile_m": 64}),  # 32 rows for each warpgroup
        (ForwardConfig, {"tile_m": 256}),  # too many registers
        (ForwardConfig, {"tile_n": 320}),
        (ForwardConfig, {"tile_k": 32}),
        (ForwardConfig, {"stages": 1}),
        (ForwardConfig, {"split": "k"}),
        (ForwardConfig, {"group": 0}),
        (ForwardConfig, {"store_n": 48}),
        (ForwardConfig, {"sm_count": 0}),
        (BackwardConfig, {"block_m": 32}),
        (BackwardConfig, {"block_n": 16}),
        (BackwardConfig, {"warpgroups": 5}),
        (BackwardConfig, {"stages": 0}),
        (BackwardConfig, {"groups": 0}),
    ],
)
def test_a_configuration_that_cannot_run_cannot_be_built(config, options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"{config.__name__}\({name}=...\): expected .*, found"):
        config(**options)


SHAPES = [(1, 8192, 4096), (1, 8, 4096), (1, 72, 144), (64, 512, 512), (1, 65536, 16)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stored", [(2,), (2, 4), (4, 4)])
def test_defaults_fit_the_device(shape, stored):
    assert default_forward(shape, 2, stored).smem_bytes(2, stored) <= _mosaic.HOPPER_SMEM_BYTES
    _, m, n = shape
    grad = default_backward(m, n, (stored[-1], 2), stored[0])
    assert grad.smem_bytes((stored[-1], 2), stored[0]) <= _mosaic.HOPPER_SMEM_BYTES


def test_defaults_go_by_the_shape():
    assert default_forward((1, 8192, 4096), 2, (2,)).tile_n == 256
    assert default_forward((1, 8, 4096), 2, (2,)).tile_n == 64  # as many CTAs as there can be
    assert default_backward(8192, 4096, (2, 2), 2).groups == 1  # enough stripes for all multiprocessors
    assert default_backward(8192, 512, (2, 2), 2).groups > 1


def test_swizzles_divide_all_rows():
    assert [swizzle_of(2, *n) for n in ((64, 128), (96,), (64, 80), (24,))] == [128, 64, 32, None]


A, B = jnp.zeros((64, 64), jnp.bfloat16), jnp.zeros((64, 128), jnp.bfloat16)


@pytest.mark.parametrize(
    ("name", "args", "options"),
    [
        ("a", (A.astype(jnp.float32), B), {}),
        ("b", (A, B.astype(jnp.float16)), {}),
        ("b", (A[:, :48], B), {}),
        ("a", (A[:60], B), {}),
        ("a", (A[:, :56], B[:56]), {}),
        ("b", (A, B[:, :40]), {}),
        ("a", (A[:0], B), {}),
        ("a", (A[None, None], B), {}),
        ("bias", (A, B, jnp.zeros(64)), {}),
        ("activation", (A, B), {"activation": "mish"}),
        ("bias_along", (A, B), {"bias_along": "k"}),
    ],
)
def test_forward_refuses_by_name(name, args, options):
    with pytest.raises(ValueError, match=rf"forward\({name}=...\): expected .*, found"):
        forward(*args, **options)


@pytest.mark.parametrize(
    ("name", "args", "options"),
    [
        ("residual", (A[0], A[0]), {"activation": "relu"}),
        ("dy", (A, B), {"activation": "relu"}),
        ("dy", (A[:60], A[:60]), {"activation": "relu"}),
        ("dy", (A[:, :40], A[:, :40]), {"activation": "relu"}),
        ("activation", (A, A), {"activation": "mish"}),
        ("from_output", (A, A), {"activation": "silu", "from_output": True}),
    ],
)
def test_backward_refuses_by_name(name, args, options):
    with pytest.raises(ValueError, match=rf"backward\({name}=...\): expected .*, found"):
        backward(*args, **options)
