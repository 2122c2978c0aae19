"""Attention's backward compiled for an H200 that need not be there: two kernels, O(S) temporaries, no spills."""

import math

import jax
import jax.numpy as jnp
import pytest
from flax import linen

import aicf_jax
from pallas_kernels import aot
from pallas_kernels.attention import backward
from pallas_kernels.attention.gradient_cases import COMPILED, CROWDED, SPILLING

pytestmark = [pytest.mark.aot, pytest.mark.slow]

H200 = aicf_jax.Policy(target="h200", on_failure="raise")
B, S, H, D = 4, 2048, 16, 64
X = jax.ShapeDtypeStruct((B, S, H, D), jnp.bfloat16)
TOKENS = jax.ShapeDtypeStruct((B, S), jnp.int32)
BIAS = jax.ShapeDtypeStruct((1, H, S, S), jnp.float32)


def causal(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def padded(q, k, v, tokens):
    mask = linen.combine_masks(linen.make_causal_mask(tokens), linen.make_attention_mask(tokens > 0, tokens > 0))
    return linen.dot_product_attention(q, k, v, mask=mask)


def biased(q, k, v, bias):
    return jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=True)


def gradients(f):
    def both(q, k, v, ct, *beside):
        y, pull = jax.vjp(lambda *qkv: f(*qkv, *beside), q, k, v)
        return y, pull(ct)

    return both


def gradients_of_all(f):
    def both(*args):
        y, pull = jax.vjp(f, *args[:-1])
        return y, pull(args[-1])

    return both


def biases(case):
    return tuple(name for name in ("bias", "key_bias") if getattr(case, name))


def program(case):
    def run(q, k, v, out, m, total, dout, beside):
        return backward(q, k, v, out, m, total, dout, **beside, **case.equation(), wanted=biases(case))

    q, k, v, beside = jax.eval_shape(lambda: (*case.arrays(jax.random.key(0)), case.beside(jax.random.key(0))))
    rows = jax.ShapeDtypeStruct((case.batch, case.heads, case.queries), jnp.float32)
    return run, (q, k, v, q, rows, rows, q, beside)


def programs():
    found = {name: program(case) for name, case in COMPILED.items()}
    found |= {name: program(case) for name, case in CROWDED.items()}
    found |= {name: program(case) for name, (case, _) in SPILLING.items()}
    found["fused"] = gradients(aicf_jax.fuse(causal, policy=H200)), (X, X, X, X)
    found["fused, padded"] = gradients(aicf_jax.fuse(padded, policy=H200)), (X, X, X, X, TOKENS)
    found["fused, biased"] = gradients_of_all(aicf_jax.fuse(biased, policy=H200)), (X, X, X, BIAS, X)
    found["unfused"] = gradients(causal), (X, X, X, X)
    return found


@pytest.fixture(scope="module")
def reports():
    return aot.compile_all("h200", programs(), timeout_s=1200)


@pytest.mark.parametrize("name", [*COMPILED, *SPILLING])
def test_two_kernels_with_wgmma_or_three(reports, name):
    report, case = reports[name], COMPILED[name] if name in COMPILED else SPILLING[name][0]
    assert not isinstance(report, Exception), report
    # One more for the gradient of a bias of queries x keys.
    assert report.counts["mosaic"] == 2 + bool(case.bias) and "wgmma" in str(report), report
    # Masks become bytes and biases are transposed first; whether a row has seen nothing but the fill, and last the sum
    # over what shares a bias of keys.
    may_see_all = case.fill != -math.inf and case.upper is not None
    made = case.mask, case.bias, case.key_bias, case.keep and not case.drawn, may_see_all
    assert report.count <= report.counts["mosaic"] + sum(map(bool, made))
    assert report.spill_bytes <= (SPILLING[name][1] if name in SPILLING else 0), report


@pytest.mark.parametrize("name", CROWDED)
def test_nothing_spills_with_much_beside_the_scores(reports, name):
    report, case = reports[name], CROWDED[name]
    assert not isinstance(report, Exception), report
    assert report.counts["mosaic"] == 2 + bool(case.bias) and "wgmma" in str(report), report
    assert report.spill_bytes == 0, report


def test_a_program_with_gradients_has_temporaries_that_do_not_grow_with_the_square(reports):
    fused, unfused = reports["fused"], reports["unfused"]
    # The forward, dQ, and dK with dV; m and l, and of the backward two numbers for each query too.
    assert fused.counts == {"mosaic": 3} and fused.spill_bytes == 0, fused.beside(unfused)
    assert fused.temporaries_bytes <= 4 * (B * H * S * 4), fused
    assert unfused.count > 3 and unfused.temporaries_bytes >= B * H * S * S * 2


@pytest.mark.parametrize(("name", "mosaic"), [("fused, padded", 3), ("fused, biased", 4)])
def test_masks_and_biases_of_a_program_are_read_by_the_kernels(reports, name, mosaic):
    report = reports[name]
    assert report.counts["mosaic"] == mosaic and report.spill_bytes == 0, report
    # Nothing of all heads and batches; the bias once more, transposed.
    transposed = 4 * H * S * S if name == "fused, biased" else 0
    assert report.temporaries_bytes <= transposed + 4 * (B * S * H * D * 2), report
