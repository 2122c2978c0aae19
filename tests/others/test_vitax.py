"""The vision transformer of vitax (nnx), which drops out unless it is told not to."""

import jax.numpy as jnp
import pytest
from flax import nnx

from tests.others.checks import check, float64, functional, library, path_roundings, quick_initialization
from tests.support import normal

pytestmark = [pytest.mark.others, pytest.mark.filterwarnings("ignore")]

LAYERS, WIDTH, HIDDEN = 2, 32, 64

# Two norms a layer and the last; the patches are a convolution with a bias. A layer has six products with a bias, the
# classifier is one. Two of them are scaled after it: the query, and in training what dropout keeps.
EXPECTED = {"conv_epilogue": 1, "layer_norm": 5, "attention": 2, "gemm_epilogue": 13}


@pytest.mark.parametrize("train", [False, True])
def test_vision_transformer(train):
    library("vitax", "vitax==0.0.10", "--no-deps")
    from vitax.models.vit import VisionTransformer

    with quick_initialization():
        model = VisionTransformer(
            num_classes=10,
            img_size=16,
            patch_size=4,
            num_layers=LAYERS,
            num_heads=4,
            mlp_dim=HIDDEN,
            hidden_size=WIDTH,
            fsdp=False,
            rngs=nnx.Rngs(0),
        )
    model.train() if train else model.eval()

    check(
        model,
        functional,
        float64(nnx.state(model, nnx.Param)),
        normal(1, 2, 16, 16, 3, dtype=jnp.float64),
        expected=EXPECTED,
        roundings=path_roundings(LAYERS, HIDDEN),
    )
