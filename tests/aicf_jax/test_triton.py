"""The portable kernels as candidates: for which machines, refused where jax-triton does not work, and their results."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aicf_jax
from aicf_jax import policy
from aicf_jax.kernels import (
    KERNELS,
    Kernel,
    _ampere,
    _attention,
    _gemm_epilogue,
    _norm,
    triton_attention,
    triton_attention_grad,
)
from aicf_jax.kernels import triton_gemm_epilogue as forward
from aicf_jax.kernels import triton_gemm_epilogue_grad as gradient
from pallas_kernels import _triton
from pallas_kernels.attention import portable

HAS_TRITON = _triton.unavailable() is None
A100 = aicf_jax.Policy(target="a100", on_failure="raise")
TRITON = {k.name for k in KERNELS if k.name.startswith("triton_")}


def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def dense(x, w, b):
    return jax.nn.gelu(x @ w + b)


ARGS = struct(33, 20), struct(20, 18), struct(18)


def rms_norm(x, g):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6) * g).astype(x.dtype)


def test_each_operation_has_one():
    assert {k.op for k in KERNELS if k.name in TRITON} == {
        "attention", "attention_grad", "gemm_epilogue", "gemm_epilogue_grad",
        "layer_norm", "layer_norm_grad", "rms_norm", "rms_norm_grad",
    }  # fmt: skip


@pytest.mark.parametrize("target", ["a100", "l4"])
def test_a_machine_of_theirs_gets_them_or_hears_why_not(target):
    report = aicf_jax.explain(dense, *ARGS, policy=aicf_jax.Policy(target=target))
    refused = [r for r in report.refusals if "triton_" in r.detail]
    if HAS_TRITON:
        assert [f.kernel for f in report.fusions] == ["triton_gemm_epilogue"] and not refused
    else:
        assert [f.kernel for f in report.fusions] == ["xla"]
        assert [(r.stage, r.code) for r in refused] == [("select", "environment")]
        assert "jax-triton" in refused[0].expected and "Error" in refused[0].found


@pytest.mark.parametrize("target", [None, "cpu", "cuda"])
def test_nobody_else_hears_of_them(target):
    report = aicf_jax.explain(dense, *ARGS, policy=aicf_jax.Policy(target=target))
    assert [f.kernel for f in report.fusions] == ["xla"]
    assert not [r for r in report.refusals if "triton" in r.kernel + r.detail]


def test_what_a_kernel_needs_is_asked_last_and_said():
    asked = []

    def available():
        asked.append(1)
        return "a library", "none"

    def explained(**changes):
        kernel = Kernel("mine", "gemm_epilogue", ("cpu",), forward.KERNEL.capabilities, lambda *_: (), **changes)
        return aicf_jax.explain(dense, *ARGS, kernels=(kernel,)).refusals

    (refusal,) = explained(available=available)
    assert (refusal.stage, refusal.code, refusal.expected, refusal.found) == (
        "select", "environment", "a library", "none",
    )  # fmt: skip
    asked.clear()
    assert explained(available=available, targets=None, deterministic=True) and asked
    asked.clear()
    kernel = Kernel("mine", "gemm_epilogue", ("cpu",), {}, lambda *_: (), available=available)
    (refusal,) = aicf_jax.explain(dense, *ARGS, kernels=(kernel,)).refusals
    assert refusal.code == "capability" and not asked


@pytest.mark.parametrize(
    ("kind", "target"),
    [("NVIDIA L4", "l4"), ("NVIDIA L40S", ""), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA H100 80GB HBM3", "h100")],
)
def test_the_gpu_at_hand_is_known_by_its_name(kind, target):
    assert policy.target_named(kind) == target


# -- results ---------------------------------------------------------------------------------------------


def interpreted(module):
    return types.SimpleNamespace(
        forward=functools.partial(module.forward, interpret=True),
        backward=functools.partial(module.backward, interpret=True),
    )


def on_a_cpu():
    """The kernels in Triton's interpreter."""
    always = lambda part: True  # noqa: E731
    product = _gemm_epilogue.forward(lambda: interpreted(forward._library()), always)
    slope = _gemm_epilogue.gradient(lambda: interpreted(gradient._library()), always)
    here = {"platforms": ("cpu",), "targets": None}
    norms = dataclasses.replace(
        _ampere.NORMS, targets=None, available=None, load=lambda: interpreted(_ampere.NORMS.load())
    )
    return (
        dataclasses.replace(forward.KERNEL, **product, **here),
        dataclasses.replace(gradient.KERNEL, **slope, **here),
        dataclasses.replace(_norm.forward_kernel("rms_norm", norms), platforms=("cpu",)),
        dataclasses.replace(_norm.gradient_kernel("rms_norm_grad", norms), platforms=("cpu",)),
    )


@pytest.mark.skipif(not HAS_TRITON, reason=f"jax-triton: {_triton.unavailable()}")
def test_values_and_gradients_of_a_layer():
    def layer(x, w, b, g):
        return rms_norm(jax.nn.silu(x @ w + b), g)

    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.standard_normal(a.shape), "float16") for a in (*ARGS, struct(18))]
    fused = aicf_jax.fuse(layer, kernels=on_a_cpu(), policy=aicf_jax.Policy(on_failure="raise"))
    report = aicf_jax.explain(layer, *args, kernels=on_a_cpu())
    assert [f.kernel for f in report.fusions] == ["triton_gemm_epilogue", "triton_rms_norm"]

    def both(f):
        y, vjp = jax.vjp(f, *args)
        return y, *vjp(jnp.ones_like(y))

    # Unfused, each equation rounds to float16: some ten of them, and sums of up to 33 such numbers.
    for got, want in zip(both(fused), both(layer), strict=True):
        scale = float(jnp.abs(want).max())
        np.testing.assert_allclose(np.float64(got), np.float64(want), rtol=0, atol=40 * 2.0**-11 * scale)


def attention_on_a_cpu():
    tile = portable.TileConfig(16, 16, 1, 1)
    tiles = portable.BackwardConfig(tile, tile, 16)
    library = types.SimpleNamespace(
        forward=functools.partial(portable.forward, interpret=True, config=tile),
        backward=functools.partial(portable.backward, interpret=True, config=tiles),
    )
    here = {"platforms": ("cpu",), "targets": None, "cost_bytes": lambda op: 0}
    return (
        dataclasses.replace(triton_attention.KERNEL, **_attention.forward(lambda: library), **here),
        dataclasses.replace(triton_attention_grad.KERNEL, **_attention.gradient(lambda: library), **here),
    )


def causal(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def powers_of_two(q, k, v):
    x = jnp.einsum("hqd,hdk->hqk", q, k).astype(jnp.float32) * 0.1
    e = jnp.exp2(x - x.max(-1, keepdims=True))
    return jnp.einsum("hqk,hkd->hdq", (e / e.sum(-1, keepdims=True)).astype(v.dtype), v)


def one_array(x, v):
    """What is Q and K has the sum of both gradients."""
    p = jax.nn.softmax(jnp.einsum("hqd,hkd->hqk", x, x).astype(jnp.float32) * 0.1)
    return jnp.einsum("hqk,hkd->hqd", p.astype(v.dtype), v)


ATTENTION = {
    "one array": (one_array, ((3, 24, 16), (3, 24, 16))),
    "shared heads": (causal, ((2, 24, 4, 16), (2, 24, 2, 16), (2, 24, 2, 16))),
    "powers of two, keys by columns": (powers_of_two, ((3, 24, 16), (3, 16, 40), (3, 40, 16))),
}


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason=f"jax-triton: {_triton.unavailable()}")
@pytest.mark.parametrize("name", ATTENTION)
def test_values_and_gradients_of_attention(name):
    f, shapes = ATTENTION[name]
    args = [jax.random.normal(jax.random.key(i), s).astype(jnp.bfloat16) for i, s in enumerate(shapes)]
    fused = aicf_jax.fuse(f, kernels=attention_on_a_cpu(), policy=aicf_jax.Policy(on_failure="raise"))
    assert "triton_attention_grad" in str(aicf_jax.explain(f, *args, kernels=attention_on_a_cpu()))
    y, pull = jax.vjp(fused, *args)
    with jax.enable_x64(True):
        want, exact = jax.vjp(f, *(x.astype(jnp.float64) for x in args))
        wanted = (want, *exact(jnp.cos(want)))
    # The interpreter rounds bfloat16 towards zero; results, weights and slopes are rounded.
    for a, b in zip((y, *pull(jnp.cos(want).astype(y.dtype))), wanted, strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        assert np.max(np.abs(a - b)) <= 8 * 2.0**-7 * max(1.0, np.max(np.abs(b)))


def test_attention_of_other_kinds_is_not_taken():
    x = struct(4, 512, 8, 64)

    def biased(q, k, v, b):
        return jax.nn.dot_product_attention(q, k, v, b)

    report = aicf_jax.explain(biased, x, x, x, struct(4, 8, 512, 512), policy=aicf_jax.Policy(target="a100"))
    (refusal,) = [r for r in report.refusals if "triton_attention " in r.detail]
    assert refusal.code == "capability" and "no more than scale, softcap and limits" in refusal.expected
