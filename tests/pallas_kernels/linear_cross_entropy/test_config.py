"""Configurations check themselves, defaults fit the device, and arguments that do not fit are refused by name."""

import jax.numpy as jnp
import pytest

from pallas_kernels import _mosaic
from pallas_kernels.linear_cross_entropy import BackwardConfig, ForwardConfig, backward, forward
from pallas_kernels.linear_cross_entropy.config import BLOCK_BYTES, cdiv, default_backward, default_forward


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ForwardConfig, {"tile_v": 96}),
        (ForwardConfig, {"tile_v": 320}),
        (ForwardConfig, {"stages": 1}),
        (ForwardConfig, {"splits": 0}),
        (BackwardConfig, {"tile_v": 0}),
        (BackwardConfig, {"stages": 1}),
        (BackwardConfig, {"block": 384}),
        (BackwardConfig, {"group": 0}),
        (BackwardConfig, {"store_v": 48}),
        (BackwardConfig, {"sm_count": 0}),
    ],
)
def test_a_configuration_that_cannot_run_cannot_be_built(kind, options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"{kind.__name__}\({name}=...\): expected .*, found"):
        kind(**options)


@pytest.mark.parametrize("rows", [1, 8, 100, 2048, 8192, 65536])
@pytest.mark.parametrize("classes", [1, 5, 257, 32000, 50257, 128256])
@pytest.mark.parametrize("depth", [16, 768, 8192])
def test_defaults_fit_the_device_and_leave_no_part_empty(rows, classes, depth):
    for plain in (True, False):
        config = default_forward(rows, classes, depth, plain)
        tiles = cdiv(classes, config.tile_v)
        assert config.smem_bytes() <= _mosaic.HOPPER_SMEM_BYTES
        assert (config.splits - 1) * cdiv(tiles, config.splits) < tiles
    config = default_backward(rows, classes)
    assert config.smem_bytes() <= _mosaic.HOPPER_SMEM_BYTES
    assert config.block * rows * 2 <= max(BLOCK_BYTES, 1024 * rows * 2)


X, W, LABELS = jnp.zeros((24, 32), jnp.bfloat16), jnp.zeros((32, 48), jnp.bfloat16), jnp.zeros((24,), jnp.int32)
ROWS = (jnp.zeros((24,)),) * 3
WRONG = [
    ("x", (X.astype(jnp.float32), W, LABELS), {}),
    ("w", (X, W.astype(jnp.float16), LABELS), {}),
    ("x", (X[0], W, LABELS), {}),
    ("x", (X[:0], W, LABELS[:0]), {}),
    ("w", (X, W[None], LABELS), {}),
    ("w", (X, W[:16], LABELS), {}),
    ("w", (X, W, LABELS), {"trans_w": True}),
    ("labels", (X, W, LABELS[:3]), {}),
    ("labels", (X, W, LABELS.astype(jnp.float32)), {}),
    ("scale", (X, W, LABELS), {"scale": -1.0}),
    ("softcap", (X, W, LABELS), {"softcap": 0.0}),
    ("base", (X, W, LABELS), {"base": 0.0}),
]


@pytest.mark.parametrize(("name", "args", "options"), WRONG)
def test_arguments_that_do_not_fit_are_refused_by_name(name, args, options):
    for f, more in ((forward, ()), (backward, ROWS)):
        with pytest.raises(ValueError, match=rf"{f.__name__}\({name}=...\): expected .*, found"):
            f(*args, *more, **options)


def test_backward_refuses_numbers_of_other_rows_and_nothing_to_do():
    with pytest.raises(ValueError, match=r"backward\(dl=...\): expected shape"):
        backward(X, W, LABELS, ROWS[0], ROWS[1][:3], ROWS[2])
    with pytest.raises(ValueError, match=r"backward\(wanted=...\): expected"):
        backward(X, W, LABELS, *ROWS, wanted=(False, False))
