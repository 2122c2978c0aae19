"""Attention on several devices: each runs the kernel on its part, and nothing is sent that need not be.

The kernels' equations in plain jax stand in for them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from aicf_jax.kernels import _attention, mosaic_attention, mosaic_attention_grad
from pallas_kernels import attention
from tests.aicf_jax import mosaic_attention_support as support
from tests.aicf_jax import test_mosaic_attention_dropout as dropout_tests
from tests.aicf_jax.partition_support import BACKWARD_BITS, FORWARD_BITS, compare, on_mesh, rounded, stand_in


def forward(*args, **options):
    return tuple(rounded(x, FORWARD_BITS) for x in support.plain_forward(*args, **options))


def backward(*args, **options):
    return tuple(rounded(x, BACKWARD_BITS) for x in support.plain_backward(*args, **options))


KERNELS = [
    stand_in(m.KERNEL, attention, forward=forward, backward=backward) for m in (mosaic_attention, mosaic_attention_grad)
]
B, S, H, D = 4, 16, 4, 64


def full(q, k, v):
    return jax.nn.dot_product_attention(q, k, v)


def causal(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def window(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=3)


def flat(q, k, v):
    """Heads and their elements in one dimension, as a product with weights leaves them."""
    q, k, v = (x.reshape(*x.shape[:2], -1, D) for x in (q, k, v))
    return causal(q, k, v).reshape(*q.shape[:2], -1)


def mapped(q, k, v):
    """Batches along two dimensions, of which the second one is split."""
    return jax.vmap(causal)(q, k, v)


HEADS, BATCH, QUERIES = P(None, None, "model"), P("data"), P(None, "model")
EACH = (B, S, H, D)
#: Function; shapes of Q and of K and V; mesh; how these are split; what is sent, backward too, None: more than unfused.
LAYOUTS = {
    "batch": (causal, EACH, EACH, {"data": 4}, BATCH, BATCH, []),
    "heads": (causal, EACH, EACH, {"model": 4}, HEADS, HEADS, []),
    "batch and shared heads": (
        causal, EACH, (B, S, 2, D), {"data": 4, "model": 2}, P("data", None, "model"), P("data", None, "model"), []
    ),
    "heads of Q alone": (causal, EACH, (B, S, 1, D), {"model": 4}, HEADS, P(), ["all-reduce"]),
    # dK and dV are wanted whole, as the plain program has them.
    "more parts than heads of K": (
        causal, (B, S, 8, D), (B, S, 2, D), {"model": 8}, HEADS, P(), ["all-reduce", "all-gather", "all-gather"]
    ),
    "heads with their elements": (flat, (B, S, H * D), (B, S, 2 * D), {"model": 2}, HEADS, HEADS, []),
    "a batch of batches": (mapped, (3, *EACH), (3, *EACH), {"data": 4}, P(None, "data"), P(None, "data"), []),
    "queries": (full, EACH, EACH, {"model": 4}, QUERIES, P(), ["all-reduce"]),
    # Which keys a query sees depends on its place.
    "queries, causal": (causal, EACH, EACH, {"model": 4}, QUERIES, P(), ["all-reduce"]),
    "queries, window": (window, EACH, EACH, {"model": 8}, QUERIES, P(), ["all-reduce"]),
    "keys": (full, EACH, EACH, {"model": 4}, P(), QUERIES, None),
    "elements of a head": (
        causal, EACH, EACH, {"model": 4}, P(None, None, None, "model"), P(None, None, None, "model"), None
    ),
    "parts of heads": (flat, (B, S, H * D), (B, S, 2 * D), {"model": 8}, HEADS, HEADS, None),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_device_runs_the_kernel_on_its_part(name):
    f, shape, shared, axes, of_q, of_k, sent = LAYOUTS[name]
    args = support.normal(shape, shared, shared)
    found, plain = compare(f, KERNELS, args, on_mesh(args, axes, (of_q, of_k, of_k)))
    assert sent is None or found == sent == plain


@pytest.mark.slow
def test_forward_alone_sends_nothing():
    args = support.normal((B, S, 8, D), (B, S, 2, D), (B, S, 2, D))
    split = on_mesh(args, {"model": 8}, (HEADS, P(), P()))
    assert compare(causal, KERNELS, args, split, forward_only=True) == [[], []]


@pytest.mark.slow
def test_more_bands_than_there_may_be_are_one(monkeypatch):
    monkeypatch.setattr(_attention, "_MOST_BANDS", 2)
    args = support.normal(EACH, EACH, EACH)
    found, _ = compare(causal, KERNELS, args, on_mesh(args, {"model": 4}, (QUERIES, P(), P())), forward_only=True)
    assert found == ["all-gather"]


@pytest.mark.slow
def test_a_kernel_that_takes_no_band_wherever_it_lies_has_all_queries():
    """As cuDNN's. Its equations are those of the others."""
    args = support.normal(EACH, EACH, EACH)
    kernel = dataclasses.replace(mosaic_attention.KERNEL, **_attention.forward(lambda: attention, True, any_band=False))
    kernels = [stand_in(kernel, attention, forward=forward, backward=backward)]
    split = on_mesh(args, {"model": 4}, (QUERIES, P(), P()))
    found, _ = compare(causal, kernels, args, split, forward_only=True)
    assert found == ["all-gather"]


BESIDE = (
    *("t5", "alibi", "bias of all heads", "flax, padding, a query that sees nothing", "causal and segments"),
    *("prefix", "mask of each batch", "padding that is a bias"),
)


@pytest.mark.parametrize("name", [n if n == "t5" else pytest.param(n, marks=pytest.mark.slow) for n in BESIDE])
def test_arrays_beside_the_scores_are_split_along_their_own_dimensions(name):
    """Biases that all batches share have the sum of their gradients."""
    f, beside, _ = support.BESIDE[name]
    args = [*support.normal(*[support.SMALL] * 3), *beside]
    of_qkv = [P("data", None, "model")] * 3
    of_beside = [P("data") if x.shape[0] == support.SMALL[0] else P() for x in beside]
    split = on_mesh(args, {"data": 2, "model": 2}, of_qkv + of_beside)
    found, plain = compare(f, KERNELS, args, split)
    assert sorted(set(found)) == sorted(set(plain)) and len(found) <= len(plain)


DROPOUT = ("causal, factor behind", "in another order", "linen, the same for all heads", "an array")


@pytest.mark.parametrize("name", [DROPOUT[0], *(pytest.param(n, marks=pytest.mark.slow) for n in DROPOUT[1:])])
def test_parts_drop_what_the_whole_drops(name):
    """Which a kernel on one device draws by the place in the whole array."""
    f, beside, *_ = dropout_tests.SPELLINGS[name]
    args = [*support.normal(*[dropout_tests.SHAPE] * 3), beside]
    split = on_mesh(args, {"data": 2, "model": 2}, [*[P("data", None, "model")] * 3, P()])
    found, _ = compare(f, KERNELS, args, split)
    assert found == []


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
def test_biases_of_queries_are_split_with_them(is_causal):
    def f(q, k, v, bias):
        return jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=is_causal)

    args = [*support.normal(*[EACH] * 3), support.normal((1, H, S, S))[0].astype(jnp.float32)]
    split = on_mesh(args, {"model": 4}, (QUERIES, P(), P(), P(None, None, "model")))
    found, _ = compare(f, KERNELS, args, split)
    assert set(found) == {"all-reduce"}
