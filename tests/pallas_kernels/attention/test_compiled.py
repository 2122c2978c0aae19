"""Attention compiled for an H200 that need not be there: one kernel, tensor core instructions, no spills."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen

import aicf_jax
from pallas_kernels import aot
from pallas_kernels.attention import forward
from pallas_kernels.attention.cases import COMPILED, DECODE

pytestmark = [pytest.mark.aot, pytest.mark.slow]

H200 = aicf_jax.Policy(target="h200", on_failure="raise")
B, S, H, D = 4, 2048, 16, 64
X = jax.ShapeDtypeStruct((B, S, H, D), jnp.bfloat16)


def causal(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def padded(q, k, v, tokens):
    mask = linen.combine_masks(linen.make_causal_mask(tokens), linen.make_attention_mask(tokens > 0, tokens > 0))
    return linen.dot_product_attention(q, k, v, mask=mask)


def biased(q, k, v, bias):
    return jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=True)


def gradients(f):
    def both(q, k, v, ct):
        y, pull = jax.vjp(f, q, k, v)
        return y, pull(ct)

    return both


def programs():
    found = {}
    for name, case in {**COMPILED, **DECODE}.items():
        types = jax.eval_shape(lambda case=case: (case.arrays(jax.random.key(0)), case.beside(jax.random.key(1))))
        found[name] = (lambda qkv, beside, case=case: forward(*qkv, **beside, **case.options()), types)
    fused = aicf_jax.fuse(causal, policy=H200)
    found["fused"] = fused, (X, X, X)
    found["unfused"] = causal, (X, X, X)
    tokens = jax.ShapeDtypeStruct((B, S), jnp.int32)
    found["fused, padded"] = aicf_jax.fuse(padded, policy=H200), (X, X, X, tokens)
    bias = jax.ShapeDtypeStruct((1, H, S, S), jnp.float32)
    found["fused, biased"] = aicf_jax.fuse(biased, policy=H200), (X, X, X, bias)
    found["fused gradients"] = gradients(fused), (X, X, X, X)
    return found


@pytest.fixture(scope="module")
def reports():
    return aot.compile_all("h200", programs())


@pytest.mark.parametrize("name", COMPILED)
def test_one_kernel_with_wgmma_and_without_a_spill(reports, name):
    report = reports[name]
    assert not isinstance(report, Exception), report
    assert report.counts["mosaic"] == 1 and report.spill_bytes == 0, report
    # Truth values become bytes first.
    arrays = bool(COMPILED[name].mask) + (bool(COMPILED[name].keep) and not COMPILED[name].drawn)
    assert report.count == 1 + arrays and "wgmma" in str(report), report


@pytest.mark.parametrize("name", DECODE)
def test_few_queries_are_a_kernel_and_what_merges_its_parts(reports, name):
    report = reports[name]
    assert not isinstance(report, Exception), report
    assert report.counts["mosaic"] == 1 and report.spill_bytes == 0, report
    # Two merge; one makes queries longer, or ids of padding.
    assert report.count <= 4 and "wgmma" in str(report), report


def test_a_program_is_one_kernel_with_temporaries_that_do_not_grow_with_the_square(reports):
    fused, unfused = reports["fused"], reports["unfused"]
    assert fused.count == 1 and fused.counts["mosaic"] == 1, fused.beside(unfused)
    assert fused.temporaries_bytes <= B * S * H * D * 2, fused
    assert unfused.count > 1 and unfused.temporaries_bytes >= B * H * S * S * 2


@pytest.mark.parametrize("name", ["fused, padded", "fused, biased"])
def test_masks_and_biases_of_a_program_are_read_by_the_kernel(reports, name):
    report = reports[name]
    # Ids of padding are made first, and flax scales Q.
    assert report.counts["mosaic"] == 1 and report.spill_bytes == 0 and report.count <= 4, report
    assert report.temporaries_bytes <= 2 * (B * S * H * D * 2), report


def test_a_program_with_gradients_is_three_kernels(reports):
    report = reports["fused gradients"]
    assert report.counts == {"mosaic": 3} and report.spill_bytes == 0, report
