"""The Mosaic GPU kernels of attention's backward as a candidate: what they take, and where arrays end up.

The kernels themselves are tested in `tests/pallas_kernels`; here their equations in plain jax stand in for them.
"""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aicf_jax
from aicf_jax.kernels import mosaic_attention_grad
from pallas_kernels import attention
from pallas_kernels.attention import reference
from tests.aicf_jax import test_mosaic_attention as forward_tests

KERNEL = mosaic_attention_grad.KERNEL
H200 = aicf_jax.Policy(target="h200", on_failure="raise")


def plain_backward(q, k, v, out, m, l, dout, **equation):
    """From the statistics it is given, in float32."""
    layouts = equation.pop("layouts")
    q32, k32, v32, out, dout = (
        x.astype(jnp.float32) if layout == "bhsd" else x.astype(jnp.float32).swapaxes(1, 2)
        for x, layout in zip((q, k, v, out, dout), (*layouts, layouts[3]), strict=True)
    )
    group = q32.shape[1] // k32.shape[1]

    def weights(q32, k32):
        x = jnp.einsum("bhsd,bhtd->bhst", q32, jnp.repeat(k32, group, 1)) * equation["scale"]
        if equation["softcap"] is not None:
            x = equation["softcap"] * jnp.tanh(x / equation["softcap"])
        return x

    x, pull = jax.vjp(weights, q32, k32)
    seen = reference.seen(*x.shape[2:], equation["lower"], equation["upper"])
    p = jnp.where(seen, jnp.exp(x - m[..., None]) / l[..., None], 0)
    delta = jnp.sum(out * dout, -1, keepdims=True)
    dp, pull_v = jax.vjp(lambda v32: jnp.einsum("bhsd,bhtd->bhst", dout, jnp.repeat(v32, group, 1)), v32)
    found = (*pull(p * (dp - delta)), *pull_v(p))
    return tuple(
        (x if layout == "bhsd" else x.swapaxes(1, 2)).astype(q.dtype) for x, layout in zip(found, layouts, strict=False)
    )


def stand_in(backward=plain_backward):
    def run(op, *inputs):
        with mock.patch.object(attention, "backward", backward):
            return KERNEL.run(op, *inputs)

    return dataclasses.replace(KERNEL, platforms=("cpu",), targets=None, opaque=False, run=run, cost_bytes=lambda op: 0)


def gradients(f, *args):
    y, pull = jax.vjp(f, *args)
    ct = jax.random.normal(jax.random.key(1), y.shape).astype(y.dtype)
    return pull(ct)


def differ_little(found, args, f):
    with jax.enable_x64(True):
        exact = [x.astype(jnp.float64) for x in args]
        y, pull = jax.vjp(f, *exact)
        ct = jax.random.normal(jax.random.key(1), y.shape, jnp.float32).astype(jnp.bfloat16)
        wanted = pull(ct.astype(jnp.float64))
    # Y, weights and gradients of scores are rounded to 8 bits, at most eight times; what is summed has random signs.
    for a, b in zip(found, wanted, strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        assert a.shape == b.shape
        assert np.max(np.abs(a - b)) <= 8 * 2.0**-8 * max(1.0, np.max(np.abs(b)))


VALUES = {n: x for n, x in forward_tests.VALUES.items() if len(x[1]) == 3}
QUICK = ("shared heads",)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in VALUES])
def test_gradients(name):
    f, shapes, *_ = VALUES[name]
    args = forward_tests.normal(*shapes)
    backward = mock.Mock(side_effect=plain_backward)
    kernels = [forward_tests.stand_in(), stand_in(backward)]
    found = gradients(aicf_jax.fuse(f, kernels=kernels, policy=forward_tests.PLAIN), *args)
    assert backward.called
    differ_little(found, args, f)


@pytest.mark.slow
def test_an_array_that_is_q_and_k_has_one_gradient():
    def f(x, v):
        return jax.nn.softmax((x @ x.T).astype(jnp.float32) * 0.1).astype(v.dtype) @ v

    args = forward_tests.normal((24, 64), (24, 64))
    differ_little(
        gradients(aicf_jax.fuse(f, kernels=[forward_tests.stand_in(), stand_in()], policy=forward_tests.PLAIN), *args),
        args,
        f,
    )


@pytest.mark.slow
def test_under_vmap_the_kernel_is_taken_where_all_is_batched_and_left_where_not():
    f, shapes, *_ = VALUES["shared heads"]
    args = forward_tests.normal(*((3, *s) for s in shapes))
    backward = mock.Mock(side_effect=plain_backward)
    fused = aicf_jax.fuse(f, kernels=[forward_tests.stand_in(), stand_in(backward)], policy=forward_tests.PLAIN)
    differ_little(gradients(jax.vmap(fused), *args), args, jax.vmap(f))
    assert backward.called
    backward.reset_mock()
    y, pull = jax.vjp(fused, *(x[0] for x in args))
    cts = jax.random.normal(jax.random.key(2), (3, *y.shape)).astype(y.dtype)
    found = jax.vmap(pull)(cts)
    one = [pull(ct) for ct in cts]
    for k, x in enumerate(found):
        assert np.allclose(*(np.asarray(y, np.float32) for y in (x, jnp.stack([o[k] for o in one]))), atol=0.05)


TAKEN = (
    "jax.nn",
    "jax.nn, shared heads",
    "flax",
    "window",
    "softcap",
    "heads of 80",
    "heads of 128",
    "heads of 256",
    "matrices",
)


@pytest.mark.parametrize("name", [n if n in TAKEN[:1] else pytest.param(n, marks=pytest.mark.slow) for n in TAKEN])
def test_taken_on_an_h200(name):
    f, types, *_ = forward_tests.TAKEN[name]
    (fusion,) = aicf_jax.explain(f, *types, policy=H200).fusions
    assert "mosaic_attention_grad" in str(fusion.backward)


def test_not_taken_with_a_bias_whose_gradient_is_wanted():
    bias = forward_tests.struct(1, forward_tests.H, forward_tests.S, forward_tests.S)
    q = forward_tests.Q
    (fusion,) = aicf_jax.explain(forward_tests.jax_bias, q, q, q, bias, policy=H200).fusions
    assert "mosaic_attention_grad" not in str(fusion.backward)
