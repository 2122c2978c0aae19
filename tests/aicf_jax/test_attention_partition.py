"""Attention on several devices: each runs the kernel on its part, and nothing is sent that need not be.

The kernels' equations in plain jax stand in for them.
"""

import dataclasses
import math
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import aicf_jax
from aicf_jax.kernels import mosaic_attention, mosaic_attention_grad
from pallas_kernels import attention
from tests.aicf_jax import test_mosaic_attention as forward_tests
from tests.aicf_jax import test_mosaic_attention_grad as gradient_tests

B, S, H, D = 4, 16, 4, 64
COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


def collectives(compiled):
    return re.findall(rf" ({COLLECTIVES})(?:-start)?\(", compiled.as_text())


def marked(f, bits):
    """A stand-in that rounds to so many bits, more than bfloat16 has, which is seen in the compiled program."""

    def run(*args, **options):
        return tuple(
            jax.lax.reduce_precision(x.astype("float32"), 8, bits).astype(x.dtype) for x in f(*args, **options)
        )

    return run


RUNS, RUNS_BACKWARD = "mantissa_bits=20", "mantissa_bits=19"
FORWARD, BACKWARD = marked(forward_tests.plain_forward, 20), marked(gradient_tests.plain_backward, 19)


def stand_in(kernel):
    def patched(f):
        def run(*args):
            with mock.patch.multiple(attention, forward=FORWARD, backward=BACKWARD):
                return f(*args)

        return f and run

    return dataclasses.replace(
        kernel, platforms=("cpu",), targets=None, run=patched(kernel.run), save=patched(kernel.save),
        partition=lambda op, saving: patched(kernel.partition(op, saving)), cost_bytes=lambda op: 0,
    )  # fmt: skip


KERNELS = stand_in(mosaic_attention.KERNEL), stand_in(mosaic_attention_grad.KERNEL)


def dot_product_attention(**options):
    return lambda q, k, v, **beside: jax.nn.dot_product_attention(q, k, v, **options, **beside)


full, causal = dot_product_attention(), dot_product_attention(is_causal=True)


def many_queries(q, k, v):
    x = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * 0.125
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(x).astype(v.dtype), v)


def flat_heads(q, k, v):
    """Heads and their elements in one dimension, as a product with weights leaves them."""
    q, k, v = (x.reshape(*x.shape[:2], -1, D) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(*q.shape[:2], -1)


#: Function; shapes of Q and of K and V; mesh; how these are split; collectives forward and backward, None: any.
SHAPE = (B, S, H, D)
LAYOUTS = {
    "batch": (causal, SHAPE, SHAPE, {"data": 4}, P("data"), P("data"), [], []),
    "heads": (causal, SHAPE, SHAPE, {"model": 4}, P(None, None, "model"), P(None, None, "model"), [], []),
    "batch and heads": (
        causal,
        SHAPE,
        (B, S, 2, D),
        {"data": 4, "model": 2},
        P("data", None, "model"),
        P("data", None, "model"),
        [],
        [],
    ),
    "one head of k": (causal, SHAPE, (B, S, 1, D), {"model": 4}, P(None, None, "model"), P(), [], ["all-reduce"]),
    "queries": (full, SHAPE, SHAPE, {"seq": 4}, P(None, "seq"), P(), [], ["all-reduce"]),
    "queries, causal": (causal, SHAPE, SHAPE, {"seq": 4}, P(None, "seq"), P(), None, None),
    "more parts than heads of k": (
        causal,
        (B, S, 8, D),
        (B, S, 2, D),
        {"model": 8},
        P(None, None, "model"),
        P(),
        None,
        None,
    ),
    "depth": (
        causal,
        SHAPE,
        SHAPE,
        {"model": 4},
        P(None, None, None, "model"),
        P(None, None, None, "model"),
        None,
        None,
    ),
    "heads with their elements": (
        flat_heads,
        (B, S, H * D),
        (B, S, 2 * D),
        {"model": 2},
        P(None, None, "model"),
        P(None, None, "model"),
        [],
        [],
    ),
    "heads in parts": (
        flat_heads,
        (B, S, H * D),
        (B, S, 2 * D),
        {"model": 8},
        P(None, None, "model"),
        P(None, None, "model"),
        None,
        None,
    ),
}


def program(f):
    def both(q, k, v, ct):
        y, pull = jax.vjp(f, q, k, v)
        return y, pull(ct)

    return both


@pytest.mark.parametrize("name", LAYOUTS)
def test_parts(name):
    f, shape, shared, axes, of_q, of_k, forward, backward = LAYOUTS[name]
    mesh = Mesh(np.array(jax.devices()[: math.prod(axes.values())]).reshape(tuple(axes.values())), tuple(axes))
    args = forward_tests.normal(shape, shared, shared, shape)
    specs = of_q, of_k, of_k, of_q
    split = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs, strict=True)]
    fused = aicf_jax.fuse(f, kernels=KERNELS, policy=aicf_jax.Policy(on_failure="raise"))
    for g, n, counts in ((lambda f: f, 3, forward), (program, 4, backward)):
        compiled = jax.jit(g(fused)).lower(*split[:n]).compile()
        unfused = jax.jit(g(f)).lower(*split[:n]).compile()
        assert RUNS in compiled.as_text()
        print(name, collectives(compiled), collectives(unfused))
        found, want = compiled(*split[:n]), jax.jit(g(fused))(*args[:n])
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
            assert np.max(np.abs(a - b)) <= 4 * 2.0**-8 * np.max(np.abs(b))
        if counts is not None:
            assert collectives(compiled) == counts
    assert RUNS_BACKWARD in compiled.as_text()
