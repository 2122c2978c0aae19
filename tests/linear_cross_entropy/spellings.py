"""Losses as people write them: functions of logits [B, S, V] and labels [B, S], one number a row."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax

CLASSES = 37


def by_optax(x, labels):
    return optax.softmax_cross_entropy_with_integer_labels(x, labels)


def one_hot(x, labels):
    return optax.softmax_cross_entropy(x, jax.nn.one_hot(labels, x.shape[-1], dtype=x.dtype))


def log_softmax_at_label(x, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(x), labels[..., None], -1)[..., 0]


def log_softmax_squeezed(x, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(x), labels[..., None], axis=-1).squeeze(-1)


def flat_rows(x, labels):
    flat, label = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
    log_probs = jax.nn.log_softmax(flat)
    return -log_probs[jnp.arange(label.shape[0]), label]


def grid_index(x, labels):
    b, s = (jnp.arange(n) for n in labels.shape)
    return jax.nn.logsumexp(x, -1) - x[b[:, None], s[None], labels]


def log_of_softmax_at_label(x, labels):
    return -jnp.log(jnp.take_along_axis(jax.nn.softmax(x), labels[..., None], -1)[..., 0])


def log_of_softmax_then_label(x, labels):
    return -jnp.take_along_axis(jnp.log(jax.nn.softmax(x)), labels[..., None], -1)[..., 0]


def by_hand(x, labels):
    shifted = x - jax.lax.stop_gradient(x.max(-1, keepdims=True))
    log_probs = shifted - jnp.log(jnp.exp(shifted).sum(-1, keepdims=True))
    return -jnp.sum(log_probs * (labels[..., None] == jnp.arange(x.shape[-1])), -1)


def chosen_by_where(x, labels):
    here = labels[..., None] == jnp.arange(x.shape[-1])
    return jnp.sum(jnp.where(here, -jax.nn.log_softmax(x), 0.0), -1)


def by_einsum(x, labels):
    return -jnp.einsum("bsv,bsv->bs", jax.nn.one_hot(labels, x.shape[-1], dtype=x.dtype), jax.nn.log_softmax(x))


def per_row(x, labels):
    return jax.vmap(jax.vmap(lambda row, label: jax.nn.logsumexp(row) - row[label]))(x, labels)


def smoothed(x, labels):
    targets = optax.smooth_labels(jax.nn.one_hot(labels, x.shape[-1], dtype=x.dtype), 0.1)
    return optax.softmax_cross_entropy(x, targets)


def smoothed_by_hand(x, labels):
    log_probs = jax.nn.log_softmax(x)
    at_label = jnp.take_along_axis(log_probs, labels[..., None], -1)[..., 0]
    return -(0.9 * at_label + 0.1 * log_probs.mean(-1))


def with_z_loss(x, labels):
    normalizer = jax.nn.logsumexp(x, -1)
    at_label = jnp.take_along_axis(x, labels[..., None], -1)[..., 0]
    return normalizer - at_label + 1e-2 * normalizer**2


def optax_and_z_loss(x, labels):
    return by_optax(x, labels) + 1e-2 * jnp.square(jax.nn.logsumexp(x, -1))


def seen(x):
    return jnp.arange(x.shape[-1]) % 5 != 3


def masked_vocabulary(x, labels):
    return by_optax(jnp.where(seen(x), x, -1e9), labels)


def masked_by_infinity(x, labels):
    return by_optax(jnp.where(seen(x), x, -jnp.inf), 5 * (labels // 5))


def softcapped(x, labels):
    return by_optax(20.0 * jnp.tanh(x / 20.0), labels)


def tempered(x, labels):
    return by_optax(x / 0.7, labels)


def base_two(x, labels):
    x = x * 1.4426950408889634
    top = x.max(-1, keepdims=True)
    normalizer = jnp.log(jnp.sum(jnp.exp2(x - top), -1)) + top[..., 0] * 0.6931471805599453
    return normalizer - jnp.take_along_axis(x, labels[..., None], -1)[..., 0] * 0.6931471805599453


def float32_logits(x, labels):
    return by_optax(x.astype(jnp.promote_types(x.dtype, jnp.float32)), labels)


def clipped_labels(x, labels):
    return jax.nn.logsumexp(x, -1) - jnp.take_along_axis(x, labels[..., None], -1, mode="clip")[..., 0]


def rows_left_out(x, labels):
    return optax.softmax_cross_entropy_with_integer_labels(x, labels, where=labels != 3)


def classes_left_out(x, labels):
    return optax.softmax_cross_entropy_with_integer_labels(x, labels, where=seen(x)[None, None])


def some_classes_of_some_rows(x, labels):
    """Of the first column of rows nothing is left but for the first row."""
    kept = seen(x) & ((jnp.arange(labels.shape[-1]) > 0) | (jnp.arange(labels.shape[0]) == 0)[:, None])[..., None]
    return optax.softmax_cross_entropy_with_integer_labels(x, labels, where=kept)


def one_hot_rows_left_out(x, labels):
    targets = jax.nn.one_hot(labels, x.shape[-1], dtype=x.dtype)
    return optax.softmax_cross_entropy(x, targets, where=labels != 3)


def one_hot_classes_left_out(x, labels):
    targets = jax.nn.one_hot(labels, x.shape[-1], dtype=x.dtype)
    kept = seen(x) & ((jnp.arange(labels.shape[-1]) > 0) | (jnp.arange(labels.shape[0]) == 0)[:, None])[..., None]
    return optax.softmax_cross_entropy(x, targets, where=kept)


SPELLINGS = {
    f.__name__: f
    for f in (
        by_optax,
        one_hot,
        log_softmax_at_label,
        log_softmax_squeezed,
        flat_rows,
        grid_index,
        log_of_softmax_at_label,
        log_of_softmax_then_label,
        by_hand,
        chosen_by_where,
        by_einsum,
        per_row,
        smoothed,
        smoothed_by_hand,
        with_z_loss,
        optax_and_z_loss,
        masked_vocabulary,
        masked_by_infinity,
        softcapped,
        tempered,
        base_two,
        float32_logits,
        clipped_labels,
        rows_left_out,
        classes_left_out,
        some_classes_of_some_rows,
        one_hot_rows_left_out,
        one_hot_classes_left_out,
    )
}


def padded_mean(losses, labels):
    weights = (labels != 3).astype(losses.dtype)
    return jnp.sum(losses * weights) / jnp.sum(weights)


TOTALS = {
    "mean": lambda losses, labels: losses.mean(),
    "sum": lambda losses, labels: losses.sum(),
    "padded mean": padded_mean,
    "where": lambda losses, labels: jnp.sum(jnp.where(labels != 3, losses, 0.0)) / 7.0,
    "mean, where": lambda losses, labels: jnp.mean(losses, where=labels != 3),
}


def totalled(loss, total="mean"):
    """The scalar that is trained on."""

    @functools.wraps(loss)
    def f(x, labels):
        losses = loss(x, labels)
        return TOTALS[total](losses, labels.reshape(losses.shape))

    return f
