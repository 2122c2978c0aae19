"""Attention's backward compiled for an H200 that need not be there: two kernels, O(S) temporaries, no spills."""

import jax
import jax.numpy as jnp
import pytest

import aicf_jax
from pallas_kernels import aot
from pallas_kernels.attention import backward
from pallas_kernels.attention.gradient_cases import COMPILED, SPILLING

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


def program(case):
    def run(q, k, v, out, m, total, dout):
        names = ("scale", "lower", "upper", "softcap", "layouts")
        return backward(q, k, v, out, m, total, dout, **{name: getattr(case, name) for name in names})

    q, k, v = jax.eval_shape(lambda: case.arrays(jax.random.key(0)))
    rows = jax.ShapeDtypeStruct((case.batch, case.heads, case.queries), jnp.float32)
    return run, (q, k, v, q, rows, rows, q)


def programs():
    found = {name: program(case) for name, case in COMPILED.items()}
    found |= {name: program(case) for name, (case, _) in SPILLING.items()}
    found["fused"] = gradients(aicf_jax.fuse(causal, policy=H200)), (X, X, X, X)
    found["unfused"] = gradients(causal), (X, X, X, X)
    return found


@pytest.fixture(scope="module")
def reports():
    return aot.compile_all("h200", programs(), timeout_s=1200)


@pytest.mark.parametrize("name", [*COMPILED, *SPILLING])
def test_two_kernels_with_wgmma(reports, name):
    report = reports[name]
    assert not isinstance(report, Exception), report
    assert report.counts == {"mosaic": 2} and "wgmma" in str(report), report
    assert report.spill_bytes <= (SPILLING[name][1] if name in SPILLING else 0), report


def test_a_program_with_gradients_has_temporaries_that_do_not_grow_with_the_square(reports):
    fused, unfused = reports["fused"], reports["unfused"]
    # The forward, dQ, and dK with dV; m and l, and of the backward two numbers for each query too.
    assert fused.counts == {"mosaic": 3} and fused.spill_bytes == 0, fused.beside(unfused)
    assert fused.temporaries_bytes <= 4 * (B * H * S * 4), fused
    assert unfused.count > 3 and unfused.temporaries_bytes >= B * H * S * S * 2
