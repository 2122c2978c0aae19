"""Stages 3 and 4 of the family linear_cross_entropy: what resembles it and is left exactly as written, and why."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import aicf_jax
from aicf_jax import OpFlags
from tests.aicf_jax.attention_support import graph_of, normal
from tests.linear_cross_entropy.spellings import by_optax, one_hot, totalled, with_z_loss

H, W = normal(0, 4, 6, 5), normal(1, 5, 11)
LABELS = jnp.asarray(np.random.default_rng(2).integers(0, 11, (4, 6)), jnp.int32)


def head(loss):
    def f(h, w, labels):
        return loss(h @ w, labels)

    return f


def accuracy(x, labels):
    return by_optax(x, labels).mean(), (x.argmax(-1) == labels).mean()


def log_probs_returned(x, labels):
    log_probs = jax.nn.log_softmax(x)
    return -jnp.take_along_axis(log_probs, labels[..., None], -1).mean(), log_probs


def no_maximum(x, labels):
    return jnp.log(jnp.sum(jnp.exp(x), -1)) - jnp.take_along_axis(x, labels[..., None], -1)[..., 0]


def all_summed_at_once(x, labels):
    return -jnp.sum(jax.nn.one_hot(labels, 11) * jax.nn.log_softmax(x)) / labels.size


def weighted_log_of_softmax(x, labels):
    return -jnp.sum(jax.nn.one_hot(labels, 11) * jnp.log(jax.nn.softmax(x)), -1)


def two_temperatures(x, labels):
    return by_optax(x, labels) + jax.nn.logsumexp(0.5 * x, -1)


def margin_to_the_maximum(x, labels):
    top = jax.lax.stop_gradient(x.max(-1))
    return top + jnp.log(jnp.exp(x - top[..., None]).sum(-1)) - x[..., 0] + 0.1 * jnp.sin(top)


#: name -> (code, found, loss)
NEAR_MISSES = {
    "logits returned": ("logits_returned", "also a result", lambda x, y: (by_optax(x, y).mean(), x)),
    "accuracy": ("logits_reused", "argmax", accuracy),
    "log-probabilities returned": ("log_probs_reused", "inner values", log_probs_returned),
    "rows and labels summed at once": ("rows_summed", "at once", all_summed_at_once),
    "sum of log(softmax)": ("log_of_softmax", "NaN", weighted_log_of_softmax),
    "no maximum": ("no_max_subtraction", "without it", no_maximum),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_left_as_written_and_say_why(name):
    code, found, loss = NEAR_MISSES[name]
    f = head(loss)
    report = aicf_jax.explain(f, H, W, LABELS)
    assert report.count("linear_cross_entropy") == 0
    (refusal,) = (r for r in report.refusals if r.pattern == "linear_cross_entropy")
    assert refusal.code == code and found in refusal.found
    assert refusal.stage == "match" and refusal.expected and refusal.site
    for a, b in zip(jax.tree.leaves(aicf_jax.fuse(f)(H, W, LABELS)), jax.tree.leaves(f(H, W, LABELS)), strict=True):
        np.testing.assert_allclose(a, b, rtol=64 * float(jnp.finfo("float32").eps))


#: Programs that have something of a loss and are none.
OTHERS = {
    "log-sum-exp alone": lambda x, y: jax.nn.logsumexp(x, -1),
    "softmax": lambda x, y: jax.nn.softmax(x),
    "entropy": lambda x, y: -jnp.sum(jax.nn.softmax(x) * jax.nn.log_softmax(x), -1),
    "expected value": lambda x, y: jnp.sum(jax.nn.softmax(x) * jnp.arange(11.0), -1),
    "several labels a row": lambda x, y: (
        jax.nn.logsumexp(x, -1)[..., None] - jnp.take_along_axis(x, jnp.stack([y, y], -1), -1)
    ),
    "two temperatures": two_temperatures,
    "the maximum itself": margin_to_the_maximum,
    "hinge": lambda x, y: jnp.maximum(x + 1 - jax.nn.one_hot(y, 11), 0).sum(-1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_cross_entropy(name):
    assert aicf_jax.explain(head(OTHERS[name]), H, W, LABELS).count("linear_cross_entropy") == 0


def test_logits_that_are_no_product():
    report = aicf_jax.explain(lambda x, y: by_optax(x, y).mean(), normal(3, 4, 6, 11), LABELS)
    assert not report.fusions and not report.refusals


def test_a_second_loss_of_the_same_logits():
    """Both losses read the logits and meet in one number: one operation, or none where they are two results."""
    report = aicf_jax.explain(head(lambda x, y: by_optax(x, y) + one_hot(x, y + 1)), H, W, LABELS)
    assert report.count("linear_cross_entropy") == 1
    report = aicf_jax.explain(head(lambda x, y: (by_optax(x, y), one_hot(x, y + 1))), H, W, LABELS)
    assert [r.code for r in report.refusals] == ["log_probs_reused"]


def test_losses_that_are_used_twice_are_one_number_a_row():
    def f(x, y):
        losses = by_optax(x, y)
        return losses.mean(), losses.max()

    (fusion,) = aicf_jax.explain(head(f), H, W, LABELS).fusions
    assert fusion.result == "f32[4,6]"


def test_two_heads_are_two_operations():
    def f(h, w, labels):
        return by_optax(h @ w, labels).mean() + by_optax(h @ (2 * w), labels).mean()

    assert aicf_jax.explain(f, H, W, LABELS).count("linear_cross_entropy") == 2


@pytest.mark.parametrize("loss", [by_optax, one_hot, totalled(with_z_loss)])
def test_fusing_twice_changes_nothing(loss):
    once = aicf_jax.fuse(head(loss))
    report = aicf_jax.explain(lambda *a: aicf_jax.fuse(once)(*a), H, W, LABELS)
    assert report.count("linear_cross_entropy") == 1


def test_the_normal_form_is_seen_by_its_flag():
    graph = graph_of(head(by_optax), H, W, LABELS)
    assert [n.op for n in graph.nodes if n.flags & OpFlags.IS_CROSS_ENTROPY] == ["cross_entropy"]


def test_optax_functions():
    for loss in (
        optax.softmax_cross_entropy_with_integer_labels,
        lambda x, y: optax.softmax_cross_entropy(x, optax.smooth_labels(jax.nn.one_hot(y, 11), 0.1)),
    ):
        assert aicf_jax.explain(head(loss), H, W, LABELS).count("linear_cross_entropy") == 1
