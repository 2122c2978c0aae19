"""How exact a fused loss is: in every precision, at infinite logits, odd labels and vocabularies, edge shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aicf_jax
from tests.linear_cross_entropy.spellings import CLASSES, SPELLINGS, by_optax, smoothed, totalled, with_z_loss
from tests.linear_cross_entropy.support import (
    KERNEL,
    LABELS,
    RAISE,
    H,
    W,
    assert_close,
    gradients,
    head,
    normal,
    only,
    rest_slow,
)
from tests.support import quick_jit


@pytest.mark.parametrize(
    "loss", [by_optax, *(pytest.param(f, marks=pytest.mark.slow) for f in (smoothed, with_z_loss))]
)
@pytest.mark.parametrize("dtype", rest_slow(["float64", "float32", "bfloat16", "float16"], {"bfloat16"}))
def test_precisions_against_float64(loss, dtype):
    """No further from the exact result than the unfused program, up to the roundings of results and gradients."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        args = tuple(x.astype(dtype) for x in (H, W))
        f = totalled(lambda x, labels: loss(x.astype(jnp.promote_types(x.dtype, jnp.float32)), labels))

        def g(h, w):
            return f(h @ w, LABELS)

        assert only(aicf_jax.explain(g, *args)).kernel == KERNEL
        exact = quick_jit(jax.value_and_grad(g, (0, 1)))(*(x.astype("float64") for x in args))
        found = quick_jit(jax.value_and_grad(aicf_jax.fuse(g, policy=RAISE), (0, 1)))(*args)
        unfused = quick_jit(jax.value_and_grad(g, (0, 1)))(*args)
        for a, b, c in zip(*map(jax.tree.leaves, (found, exact, unfused)), strict=True):
            assert a.dtype == c.dtype
            # Logits, products and results are rounded to the type: five roundings of the largest value, and 64 of
            # float32 for the sums.
            roundoff = 5 * float(jnp.finfo(dtype).eps) + 64 * float(jnp.finfo("float32").eps) * (dtype != "float64")
            scale = max(1.0, float(jnp.max(jnp.abs(b))))
            np.testing.assert_allclose(
                np.asarray(a, np.float64), np.asarray(b), rtol=0, atol=(roundoff + 1e-13) * scale
            )


def special_logits():
    x = np.array(normal(6, 12, 9))
    x[0, 3], x[1, :], x[2, 5], x[3, 2], x[4, :] = -np.inf, -np.inf, np.inf, np.nan, 1e30
    x[5], x[6] = 1e4 * x[5], -3e38
    x[7, 1] = 3e38
    return jnp.asarray(x)


@pytest.mark.parametrize(
    "name",
    rest_slow(["by_optax", "log_softmax_at_label", "log_of_softmax_at_label", "chosen_by_where"], {"by_optax"}),
)
def test_infinite_and_huge_logits_give_what_the_unfused_program_gives(name):
    """Each logit is one product with 1: it reaches the loss as it is."""
    x, labels = special_logits(), jnp.asarray([3, 1, 5, 0, 2, 1, 1, 1, 0, 1, 2, 3], jnp.int32)
    loss = SPELLINGS[name]

    # A product for each row: an infinite logit times 0 would spoil the others.
    def f(row, label):
        return loss(jnp.ones((2, 1)) @ row[None], jnp.stack([label, label]))

    assert only(aicf_jax.explain(f, x[0], labels[0])).kernel == KERNEL
    found, want = (quick_jit(jax.vmap(g))(x, labels) for g in (aicf_jax.fuse(f, policy=RAISE), f))
    np.testing.assert_array_equal(jnp.isnan(found), jnp.isnan(want))
    np.testing.assert_array_equal(jnp.isinf(found), jnp.isinf(want))
    good = jnp.isfinite(want)
    np.testing.assert_allclose(found[good], want[good], rtol=64 * float(jnp.finfo("float32").eps))


@pytest.mark.parametrize(
    "name", rest_slow(["by_optax", "clipped_labels", "one_hot", "flat_rows", "per_row"], {"by_optax", "clipped_labels"})
)
def test_labels_out_of_bounds(name):
    """NaN, the nearest class, or none, as the program's own gather says; negative labels count from the end."""
    labels = LABELS.at[0, :4].set(jnp.asarray([-1, -CLASSES, CLASSES, 1000]))
    f = head(SPELLINGS[name])
    fused = aicf_jax.fuse(f, policy=RAISE)
    np.testing.assert_array_equal(jnp.isnan(fused(H, W, labels)), jnp.isnan(f(H, W, labels)))
    assert_close(jnp.nan_to_num(fused(H, W, labels)), jnp.nan_to_num(f(H, W, labels)))


@pytest.mark.parametrize("classes", rest_slow([2, 7, 8, 9, 33], {9}))
def test_odd_vocabularies(classes):
    args = (H, W[:, :classes], LABELS % classes)
    for f in (head(by_optax), head(totalled(smoothed))):
        assert_close(gradients(aicf_jax.fuse(f, policy=RAISE), args), gradients(f, args))


@pytest.mark.parametrize(
    ("code", "args"),
    [
        ("one_class", (H, W[:, :1], jnp.zeros_like(LABELS))),
        (None, (H[:0], W, LABELS[:0])),
        ("empty", (H[..., :0], W[:0], LABELS)),
    ],
)
def test_edge_shapes_are_left_as_written(code, args):
    f = head(by_optax)
    report = aicf_jax.explain(f, *args)
    assert report.count("linear_cross_entropy") == 0
    assert [r.code for r in report.refusals] == ([] if code is None else [code])
    np.testing.assert_array_equal(aicf_jax.fuse(f)(*args), f(*args))


def test_bitwise_rewrites_nothing():
    f = head(by_optax)
    report = aicf_jax.explain(f, H, W, LABELS, policy=aicf_jax.Policy(numerics="bitwise"))
    assert report.count("linear_cross_entropy") == 0
    fused = aicf_jax.fuse(f, policy=aicf_jax.Policy(numerics="bitwise"))
    np.testing.assert_array_equal(fused(H, W, LABELS), f(H, W, LABELS))


@pytest.mark.slow
def test_verify_finds_nothing():
    policy = aicf_jax.Policy(verify=True, on_failure="raise")
    for f in (head(by_optax), head(totalled(with_z_loss))):
        gradients(aicf_jax.fuse(f, policy=policy), (H, W, LABELS))
