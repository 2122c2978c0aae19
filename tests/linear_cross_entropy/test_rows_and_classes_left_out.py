"""Slices and masks of the logits: of slices only the rows that are left are computed; the rest is as written."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import aicf_jax
from tests.linear_cross_entropy.spellings import CLASSES, SPELLINGS, by_optax, rows_left_out
from tests.linear_cross_entropy.support import (
    KERNEL,
    LABELS,
    RAISE,
    H,
    W,
    assert_close,
    gradients,
    normal,
    only,
    rest_slow,
)
from tests.support import quick_jit

NEXT = slice(None), slice(None, -1)
SLICED = {
    "but the last position": (lambda h, w, b, y: by_optax((h @ w)[NEXT], y[:, 1:]), 4 * 11),
    "with a bias, a softcap, a cast": (
        lambda h, w, b, y: by_optax((9 * jnp.tanh((h @ w + b) / 9)).astype(jnp.float32)[NEXT], y[:, 1:]),
        4 * 11,
    ),
    "but the last example": (lambda h, w, b, y: by_optax((h @ w + b)[:-1], y[1:]), 3 * 12),
    "the last position": (lambda h, w, b, y: by_optax((h @ w)[:, -1], y[:, 0]), 4),
    "every other, twice": (lambda h, w, b, y: by_optax((h @ w)[:, 1::2][:, 1:][2:], y[2:, 3::2]), 2 * 5),
    "flattened after": (lambda h, w, b, y: by_optax((h @ w)[NEXT].reshape(44, -1), y[:, 1:].reshape(-1)), 44),
    "of a mask too": (
        lambda h, w, b, y: rows_left_out(jnp.where(h[..., :1] > 0, h @ w, -1e9)[NEXT], y[:, 1:]),
        44,
    ),
    "classes first": (
        lambda h, w, b, y: optax.softmax_cross_entropy_with_integer_labels(
            jnp.einsum("dv,bsd->vbs", w, h)[..., :-1], y[:, 1:], axis=0
        ),
        44,
    ),
}


@pytest.mark.parametrize("name", SLICED)
def test_slices_of_rows_are_slices_of_the_hidden_states(name):
    """No other row is computed: the program's axes are the rows that are left, the hidden size and the classes."""
    f, rows = SLICED[name]
    fusion = only(aicf_jax.explain(f, H, W, normal(3, CLASSES), LABELS))
    sizes = [int(n) for n in re.findall(r"axis \w+ = (\d+)", fusion.program)]
    assert fusion.kernel == KERNEL and math.prod(sizes) == rows * 5 * CLASSES


@pytest.mark.parametrize("total", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", rest_slow(SLICED, {"with a bias, a softcap, a cast"}))
def test_values_and_gradients_of_sliced_logits(name, total):
    f, _ = SLICED[name]
    g = (lambda *a: jnp.mean(f(*a))) if total else f
    args = (H, W, normal(3, CLASSES), LABELS)
    assert_close(gradients(aicf_jax.fuse(g, policy=RAISE), args, (0, 1, 2)), gradients(g, args, (0, 1, 2)))


def reshaped_rows(h, w, labels):
    return by_optax((h.reshape(48, 5) @ w).reshape(4, 12, -1)[NEXT], labels[:, 1:])


NOT_ROWS = {
    "vocabulary_sliced": lambda h, w, labels: by_optax((h @ w)[..., :-1], labels // 2),
    "slice": reshaped_rows,
    "split": lambda h, w, labels: by_optax(jnp.split(h @ w, 2, axis=1)[0], labels[:, :6]),
}


@pytest.mark.parametrize("code", NOT_ROWS)
def test_other_parts_of_the_logits_are_left_as_written(code):
    report = aicf_jax.explain(NOT_ROWS[code], H, W, LABELS)
    assert report.count("linear_cross_entropy") == 0
    assert [r.code for r in report.refusals if r.pattern == "linear_cross_entropy"] == [code]
    fused = aicf_jax.fuse(NOT_ROWS[code], policy=RAISE)
    np.testing.assert_array_equal(fused(H, W, LABELS), NOT_ROWS[code](H, W, LABELS))


@pytest.mark.parametrize("dtype", rest_slow(["float64", "bfloat16", "float16"], {"bfloat16"}))
@pytest.mark.parametrize("name", rest_slow(["but the last position", "rows_left_out"], {"but the last position"}))
def test_rows_left_out_in_every_precision(name, dtype):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = jnp.promote_types(dtype, jnp.float32)

        def f(h, w):
            x = (h @ w).astype(wide)
            losses = SPELLINGS[name](x, LABELS) if name in SPELLINGS else by_optax(x[NEXT], LABELS[:, 1:])
            return jnp.mean(losses)

        args = H.astype(dtype), W.astype(dtype)
        assert only(aicf_jax.explain(f, *args)).kernel == KERNEL
        found, want = (quick_jit(jax.value_and_grad(g, (0, 1)))(*args) for g in (aicf_jax.fuse(f, policy=RAISE), f))
        # Logits, their gradient, products and results: five roundings each way.
        assert_close(found, want, terms=64 if dtype == "float64" else 10)


def test_a_mask_of_the_softmax_alone_is_not_one_of_the_loss():
    """0 times the -inf of a class that is left out is NaN."""

    def f(h, w, labels):
        log_probs = jax.nn.log_softmax(h @ w, where=(jnp.arange(CLASSES) % 5 != 3)[None, None])
        return -jnp.sum(log_probs * jax.nn.one_hot(labels, CLASSES), -1)

    assert aicf_jax.explain(f, H, W, LABELS).count("linear_cross_entropy") == 0
    want = jax.jit(f)(H, W, LABELS)
    np.testing.assert_array_equal(aicf_jax.fuse(f, policy=RAISE)(H, W, LABELS), want)


def test_labels_of_classes_that_a_mask_leaves_out_have_the_gradients_of_the_unfused_program():
    kept = (jnp.arange(CLASSES) % 5 != 3)[None, None]

    def f(h, w, targets):
        return optax.softmax_cross_entropy(h @ w, targets, where=kept)

    args = (H, W, jax.nn.softmax(normal(5, 4, 12, CLASSES)))
    found, want = (gradients(g, args, (0, 1, 2)) for g in (aicf_jax.fuse(f, policy=RAISE), f))
    assert jnp.isnan(want[1][2]).any()  # 0 times -inf
    assert_close(found, want)
