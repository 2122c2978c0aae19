"""The Flax models of Hugging Face transformers (linen), from tiny configurations with random weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.others.checks import check, float64, library, path_roundings, quick_initialization
from tests.support import normal

pytestmark = [pytest.mark.others, pytest.mark.filterwarnings("ignore")]

LAYERS, WIDTH, HIDDEN, LENGTH = 2, 32, 64, 12
# Llama and Mistral normalize with the statistics of the value in float32: in float64 that is no norm of one value.
FLOAT32 = ("llama", "mistral")
ROUNDINGS = path_roundings(LAYERS, HIDDEN)
SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": HIDDEN,
}
TEXT = {"vocab_size": 48, "max_position_embeddings": 16}

# What a reader of each model expects, for two layers.
MODELS = {
    # Two norms a layer and the last; c_attn, c_proj, and both of the MLP are products with a bias.
    "gpt2": (
        "FlaxGPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 48, "n_positions": 16, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4},
        {"attention": 2, "layer_norm": 5, "gemm_epilogue": 8},
    ),
    # RMSNorm, rotary positions, grouped queries, SwiGLU.
    "llama": (
        "FlaxLlamaForCausalLM",
        "LlamaConfig",
        {**SIZES, **TEXT, "num_key_value_heads": 2},
        {"attention": 2, "rms_norm": 5, "glu": 2},
    ),
    # As llama, with a window.
    "mistral": (
        "FlaxMistralForCausalLM",
        "MistralConfig",
        {**SIZES, **TEXT, "num_key_value_heads": 2, "sliding_window": 4},
        {"attention": 2, "rms_norm": 5, "glu": 2},
    ),
    # After a norm comes the residual. Its attention is multiplied by a head mask, which `fuse` leaves alone.
    "bert": (
        "FlaxBertForMaskedLM",
        "BertConfig",
        {**SIZES, **TEXT},
        {"layer_norm": 6, "gemm_epilogue": 11},
    ),
}
GENERATORS = ("gpt2", "llama", "mistral")


VISION = {**SIZES, "image_size": 16, "patch_size": 4}
IMAGE_MODELS = {
    # The patches are a convolution with a bias; q, k, v, out and both of the MLP have one, and so has the classifier.
    "vit": (
        "FlaxViTForImageClassification",
        "ViTConfig",
        VISION,
        {"conv_epilogue": 1, "attention": 2, "layer_norm": 5, "gemm_epilogue": 13},
    ),
    # The stem, the two convolutions of either stage and one shortcut, each with the stored statistics behind it.
    "resnet": (
        "FlaxResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        {"conv_epilogue": 6, "gemm_epilogue": 1},
    ),
}


def build(name, **changes):
    """The model, its parameters, and what is expected of it."""
    transformers = library("transformers", "transformers==4.46.3")
    model, config, sizes, expected = {**MODELS, **IMAGE_MODELS}[name]
    dtype = jnp.float32 if name in FLOAT32 else jnp.float64
    with quick_initialization():
        config = getattr(transformers, config)(**{**sizes, **changes})
        built = getattr(transformers, model)(config, dtype=dtype)
    return built, built.params if name in FLOAT32 else float64(built.params), expected


def logits_of_text(model):
    return lambda params, ids, mask: model(ids, attention_mask=mask, params=params).logits


def text():
    """Token ids, and a mask that hides three tokens of one text."""
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 48, (2, LENGTH)))
    return ids, jnp.ones((2, LENGTH), jnp.int32).at[1, 9:].set(0)


@pytest.mark.parametrize("name", MODELS)
def test_language_models(name):
    model, params, expected = build(name)
    whole = {**expected, "linear_cross_entropy": 1} if name in GENERATORS else ()
    check(model, logits_of_text, params, *text(), expected=expected, roundings=ROUNDINGS, whole=whole)


def test_dropout_drops_the_same():
    rates = {"embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1}
    model, params, _ = build("gpt2", **rates)

    def run(model):
        def logits(params, ids, mask, key):
            return model(ids, attention_mask=mask, params=params, dropout_rng=key, train=True).logits

        return logits

    # Dropout follows the bias of either second product (attention and MLP) and scales what it keeps.
    expected = {"attention": 2, "layer_norm": 5, "gemm_epilogue": 4}
    check(model, run, params, *text(), jax.random.PRNGKey(3), expected=expected, roundings=ROUNDINGS)


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_image_models(name):
    model, params, expected = build(name)

    def run(model):
        return lambda params, images: model(images, params=params).logits

    images = normal(1, 2, 3, 16, 16, dtype=jnp.float64)
    check(model, run, params, images, expected=expected, roundings=ROUNDINGS)
