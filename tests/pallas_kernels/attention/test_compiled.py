"""Attention compiled for an H200 that need not be there: one kernel, tensor core instructions, no spills."""

import jax
import jax.numpy as jnp
import pytest

import aicf_jax
from pallas_kernels import aot
from pallas_kernels.attention import forward
from pallas_kernels.attention.cases import COMPILED

pytestmark = [pytest.mark.aot, pytest.mark.slow]

H200 = aicf_jax.Policy(target="h200", on_failure="raise")
B, S, H, D = 4, 2048, 16, 64
X = jax.ShapeDtypeStruct((B, S, H, D), jnp.bfloat16)


def causal(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def gradients(f):
    def both(q, k, v, ct):
        y, pull = jax.vjp(f, q, k, v)
        return y, pull(ct)

    return both


def programs():
    found = {}
    for name, case in COMPILED.items():
        types = jax.eval_shape(lambda case=case: case.arrays(jax.random.key(0)))
        found[name] = (lambda q, k, v, case=case: forward(q, k, v, **case.options()), types)
    fused = aicf_jax.fuse(causal, policy=H200)
    found["fused"] = fused, (X, X, X)
    found["unfused"] = causal, (X, X, X)
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
    # Lengths that are not multiples of 8 are padded; 1000 is one.
    assert report.count == 1 and "wgmma" in str(report), report


def test_a_program_is_one_kernel_with_temporaries_that_do_not_grow_with_the_square(reports):
    fused, unfused = reports["fused"], reports["unfused"]
    assert fused.count == 1 and fused.counts["mosaic"] == 1, fused.beside(unfused)
    assert fused.temporaries_bytes <= B * S * H * D * 2, fused
    assert unfused.count > 1 and unfused.temporaries_bytes >= B * H * S * S * 2


def test_a_program_with_gradients_has_the_kernel_forward(reports):
    report = reports["fused gradients"]
    assert report.counts["mosaic"] == 1 and report.spill_bytes == 0, report
