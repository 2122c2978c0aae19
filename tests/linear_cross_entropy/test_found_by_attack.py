"""Losses that once were another function when they were fused, each the smallest of its kind."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import stop_gradient
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import aicf_jax
from aicf_jax.ops import _loss_programs
from tests.linear_cross_entropy.spellings import CLASSES, by_optax
from tests.support import normal, quick_jit

RAISE = aicf_jax.Policy(on_failure="raise")
H, W = normal(0, 12, 5), normal(1, 5, CLASSES)
LABELS = jnp.asarray(np.random.default_rng(2).integers(0, CLASSES, 12), jnp.int32)
# Sums of 5, 12 and 37 products, each way.
TOLERANCE = 256 * 2.0**-24


def at(x, labels):
    return jnp.take_along_axis(x, labels[:, None], -1)[:, 0]


def top(x):
    return jnp.max(x, -1, keepdims=True)


def log_sum(x, shift, added):
    return added[:, 0] + jnp.log(jnp.sum(jnp.exp(x - shift), -1))


def smoothed(x, labels):
    log_probs = jax.nn.log_softmax(x)
    return -(0.9 * at(log_probs, labels) + 0.1 * jnp.mean(stop_gradient(log_probs), -1))


#: name -> (loss of logits and labels, whether it is one operation)
HELD = {
    "the log-sum-exp": (lambda x, y: stop_gradient(jax.nn.logsumexp(x, -1)) - at(x, y), True),
    "one of two": (lambda x, y: jax.nn.logsumexp(x, -1) * stop_gradient(jax.nn.logsumexp(x, -1)) - at(x, y), True),
    "the element": (lambda x, y: jax.nn.logsumexp(x, -1) - stop_gradient(at(x, y)), True),
    "log-probabilities under a sum": (lambda x, y: -jnp.sum(stop_gradient(jax.nn.log_softmax(x)), -1), False),
    "one of two uses": (smoothed, False),
    "logits of the element": (lambda x, y: log_sum(x, stop_gradient(top(x)), top(stop_gradient(x))) - at(x, y), True),
    "the logits that are picked": (
        lambda x, y: log_sum(x, top(stop_gradient(x)), top(stop_gradient(x))) - at(stop_gradient(x), y),
        False,
    ),
    "one of two maxima": (lambda x, y: log_sum(x, top(x), stop_gradient(top(x))) - at(x, y), False),
    "the other maximum": (lambda x, y: log_sum(x, stop_gradient(top(x)), top(x)) - at(x, y), False),
    "all logits": (lambda x, y: by_optax(stop_gradient(x), y), True),
}


def check(f, args, count=None):
    if count is not None:
        assert aicf_jax.explain(f, *args, policy=RAISE).count("linear_cross_entropy") == count

    def run(g):
        return quick_jit(jax.value_and_grad(lambda *a: jnp.sum(g(*a) * 0.7), (0, 1)))(*args)

    found, want = run(aicf_jax.fuse(f, policy=RAISE)), run(f)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        atol = TOLERANCE * max(8.0, float(jnp.max(jnp.abs(jnp.nan_to_num(b)))))
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize("name", HELD)
def test_what_is_behind_stop_gradient_is_not_differentiated(name):
    loss, fused = HELD[name]
    check(lambda h, w, labels: loss(h @ w, labels), (H, W, LABELS), int(fused))


def test_logits_that_were_rounded_are_other_logits():
    def f(h, w, labels):
        x = h @ w
        return jax.nn.logsumexp(x.astype(jnp.bfloat16), -1).astype(jnp.float32) - at(x, labels)

    assert aicf_jax.explain(f, H, W, LABELS).count("linear_cross_entropy") == 0


def test_weights_by_position():
    """Rows that know where they are cannot be one axis cut in two."""

    def f(h, w, labels):
        return jnp.sum(by_optax(h @ w, labels) * jnp.arange(20) / 20)

    check(f, (normal(3, 20, 5), W, jnp.arange(20) % CLASSES), 1)


@pytest.mark.parametrize("total", [jnp.mean, lambda rows: jnp.sum(rows * 0.5), lambda rows: rows])
@pytest.mark.parametrize("where", ["an infinite weight", "an infinite hidden state", "NaN"])
def test_a_row_of_log_softmax_with_an_infinite_logit_is_nan_as_a_whole(total, where):
    def f(h, w, labels):
        return total(-at(jax.nn.log_softmax(h @ w), labels))

    h = {"an infinite hidden state": H.at[1, 2].set(jnp.inf)}.get(where, H)
    w = {"an infinite weight": W.at[2, 5].set(jnp.inf), "NaN": W.at[2, 5].set(jnp.nan)}.get(where, W)

    def gradients(g):
        out, back = jax.vjp(lambda h, w: g(h, w, LABELS), h, w)
        return quick_jit(back)(jnp.ones_like(out))

    found, want = gradients(aicf_jax.fuse(f, policy=RAISE)), gradients(f)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_array_equal(jnp.isnan(a), jnp.isnan(b))


@pytest.mark.parametrize("guarded", [False, True])
def test_a_mean_over_no_rows_has_a_gradient_of_zero(guarded):
    def f(h, w, labels):
        used = labels > 99
        mean = by_optax(h @ w, labels).mean(where=used)
        return jnp.where(jnp.any(used), mean, 0.0) if guarded else mean

    check(f, (H, W, LABELS), 1)
    _, (dh, dw) = jax.value_and_grad(aicf_jax.fuse(f, policy=RAISE), (0, 1))(H, W, LABELS)
    assert not jnp.any(dh) and not jnp.any(dw)


def test_means_over_some_rows_under_vmap():
    """Some of the gradients are kept, the others computed again: both are in one backward."""

    def f(h, w, labels):
        return by_optax(h @ w, labels).mean(where=labels > 3)

    def run(g):
        grad = jax.vmap(jax.grad(g, (0, 1)), (0, None, 0))
        return quick_jit(grad)(H.reshape(3, 4, 5), W, LABELS.reshape(3, 4).at[0].set(0))

    for a, b in zip(run(aicf_jax.fuse(f, policy=RAISE)), run(f), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE * max(1.0, float(jnp.max(jnp.abs(b)))))


def test_a_mean_over_a_sharded_batch_gathers_no_rows(monkeypatch):
    monkeypatch.setattr(_loss_programs, "BLOCK_BYTES", 4096)
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))

    def f(h, w, labels):
        return by_optax(h @ w, labels).mean()

    shapes = (((8, 12, 5), "float32", P("data")), ((5, CLASSES), "float32", P()), ((8, 12), "int32", P("data")))
    args = [jax.ShapeDtypeStruct(s, d, sharding=NamedSharding(mesh, p)) for s, d, p in shapes]
    step = jax.jit(jax.value_and_grad(aicf_jax.fuse(f, policy=RAISE), (0, 1)))
    assert not re.search(r"all-gather|all-to-all|collective-permute", step.lower(*args).compile().as_text())
