"""The language models of dantinox (nnx): one class, many kinds of attention, norm and MLP."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.others.checks import check, float64, functional, library, path_roundings, quick_initialization

pytestmark = [pytest.mark.others, pytest.mark.filterwarnings("ignore")]

LAYERS, WIDTH, LENGTH = 2, 32, 12
HIDDEN = 4 * WIDTH  # of its MLP

MODELS = {
    # RMSNorm, rotary positions, SwiGLU from one projection that is cut in two; both outputs have a bias.
    "mha": ({}, {"attention": 2, "rms_norm": 5, "glu": 2, "gemm_epilogue": 4}),
    # LayerNorm, grouped queries, gelu, learned positions, dropout, a head of its own; dropout scales two
    # of the products with a bias.
    "gqa": (
        {
            "attention": "gqa",
            "kv_heads": 2,
            "norm": "layernorm",
            "use_swiglu": False,
            "pos_encoding": "learned",
            "dropout": 0.1,
            "weight_tying": False,
        },
        {"attention": 2, "layer_norm": 5, "gemm_epilogue": 7},
    ),
    # Latent attention: queries, keys and values through a narrow product, two of them normalized.
    "mla": (
        {"attention": "mla", "down_dim_q": 16, "down_dim_kv": 16, "rope_dim": 4},
        {"attention": 2, "rms_norm": 5, "layer_norm": 4, "glu": 2},
    ),
    # Four experts a layer, each with its gate.
    "moe": ({"ffn": "moe"}, {"attention": 2, "rms_norm": 5, "glu": 8}),
    # Sees both ways: a masked diffusion model.
    "diffusion": ({"causal": False}, {"attention": 2, "rms_norm": 5, "glu": 2, "gemm_epilogue": 4}),
}


@pytest.mark.parametrize("name", MODELS)
def test_transformer(name):
    library("dantinox", "dantinox==0.4.14", "--no-deps")
    from dantinox.core.config import ModelConfig
    from dantinox.core.model import Transformer

    changes, expected = MODELS[name]
    sizes = {"dim": WIDTH, "n_heads": 4, "num_blocks": LAYERS, "vocab_size": 48, "max_context": 16}
    with quick_initialization():
        model = Transformer(ModelConfig(**{**sizes, **changes}), rngs=nnx.Rngs(0))
    check(
        model,
        functional,
        float64(nnx.state(model, nnx.Param)),
        jnp.asarray(np.random.default_rng(0).integers(0, 48, (2, LENGTH))),
        expected=expected,
        roundings=path_roundings(LAYERS, HIDDEN),
        dtype=None if name == "gqa" else "float32",  # rotary angles are float32: jit alone moves them
    )
