"""The transformer of google-deepmind's gemma (linen), as Gemma 2 and Gemma 3 configure it, tiny."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.others.checks import check, library, path_roundings, quick_initialization

pytestmark = [pytest.mark.others, pytest.mark.filterwarnings("ignore")]

LAYERS, WIDTH, HIDDEN, LENGTH = 2, 32, 64, 12
# Its RMSNorm and its rotary positions compute in float32 whatever they get.
FLOAT32 = ("gemma1", "gemma2", "gemma3")

CONFIGURATIONS = {
    # Norms before attention and MLP, and the last one; GeGLU; grouped queries.
    "gemma1": ({}, {"attention": 2, "rms_norm": 5, "glu": 2}),
    # Norms behind attention and MLP too; a softcap on scores and logits; every other layer sees a window.
    "gemma2": (
        {
            "use_post_attn_norm": True,
            "use_post_ffw_norm": True,
            "attn_logits_soft_cap": 50.0,
            "final_logit_softcap": 30.0,
            "sliding_window_size": 4,
            "transpose_gating_einsum": True,
        },
        {"attention": 2, "rms_norm": 9, "glu": 2},
    ),
    # Queries and keys are normalized.
    "gemma3": (
        {"use_post_attn_norm": True, "use_post_ffw_norm": True, "sliding_window_size": 4, "use_qk_norm": True},
        {"attention": 2, "rms_norm": 13, "glu": 2},
    ),
}


def build(name):
    """The model of this name and what is expected of it."""
    library("gemma.transformer", "gemma==2.0.2 orbax-checkpoint", "--no-deps")
    from gemma import modules, transformer

    changes, expected = CONFIGURATIONS[name]
    kinds = (modules.AttentionType.LOCAL_SLIDING, modules.AttentionType.GLOBAL)
    sizes = {
        "num_layers": LAYERS,
        "num_embed": 48,
        "embed_dim": WIDTH,
        "hidden_dim": HIDDEN,
        "num_heads": 4,
        "head_dim": 8,
        "num_kv_heads": 2,
        "final_logit_softcap": None,
        "use_post_attn_norm": False,
        "use_post_ffw_norm": False,
        "attention_types": kinds if "sliding_window_size" in changes else (modules.AttentionType.GLOBAL,) * LAYERS,
    }
    return transformer.Transformer(transformer.TransformerConfig(**{**sizes, **changes})), expected


def run(model):
    """Logits, without a cache, under the causal mask."""

    def logits(params, ids):
        length = ids.shape[1]
        positions = jnp.broadcast_to(jnp.arange(length), ids.shape)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (*ids.shape, length))
        return model.apply(params, ids, positions, None, mask)[0]

    return logits


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_gemma(name):
    model, expected = build(name)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 48, (2, LENGTH)))
    positions, mask = jnp.zeros((2, LENGTH), int), jnp.ones((2, LENGTH, LENGTH), bool)
    with quick_initialization():
        params = model.init(jax.random.key(0), ids, positions, None, mask)
    check(
        model,
        run,
        params,
        ids,
        expected=expected,
        roundings=path_roundings(LAYERS, HIDDEN),
        whole={**expected, "linear_cross_entropy": 1},
    )
