"""The family linear_cross_entropy: recognized, streamed, and differentiated as the unfused program is."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import optax
import pytest
from flax import linen, nnx

import aicf_jax
from aicf_jax.ops import _loss_programs
from experiments.benchmarks.attention import gpt
from tests.linear_cross_entropy.spellings import (
    CLASSES,
    SPELLINGS,
    TOTALS,
    by_optax,
    rows_left_out,
    smoothed,
    totalled,
    with_z_loss,
)
from tests.support import quick_jit

RAISE = aicf_jax.Policy(on_failure="raise")
KERNEL = "streamed_linear_cross_entropy"

#: Compiled twice each: all but these are slow tests.
QUICK = {"by_optax", "log_of_softmax_at_label", "smoothed_by_hand", "one_hot_classes_left_out"}


def rest_slow(names, quick=QUICK):
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def normal(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


H, W = normal(0, 4, 12, 5), normal(1, 5, CLASSES)
LABELS = jnp.asarray(np.random.default_rng(2).integers(0, CLASSES, (4, 12)), jnp.int32)


def head(loss):
    """``loss(h @ w)``."""

    def f(h, w, labels):
        return loss(h @ w, labels)

    return f


def weighted(f):
    """A scalar that weighs every result differently."""

    def g(*args):
        out = f(*args)
        return jnp.sum(out * normal(9, *out.shape, dtype=str(out.dtype)))

    return g


def gradients(f, args, argnums=(0, 1)):
    return quick_jit(jax.value_and_grad(weighted(f), argnums=argnums))(*args)


def assert_close(found, expected, dtype=None, terms=64):
    """Sums of 5, 37 or 48 products in another order: each is off by at most `terms` roundings of its largest term.

    Losses are about 4, and weighted sums of them up to 8 before they cancel.
    """
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        roundoff = float(jnp.finfo(dtype or b.dtype).eps) / 2
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = max(8.0, float(np.max(np.abs(b), initial=0.0, where=np.isfinite(b))))
        np.testing.assert_allclose(a, b, rtol=0, atol=2 * terms * roundoff * scale)


def only(report):
    (fusion,) = (x for x in report.fusions if x.op == "linear_cross_entropy")
    return fusion


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_one_streamed_operation(name):
    report = aicf_jax.explain(head(SPELLINGS[name]), H, W, LABELS)
    fusion = only(report)
    assert fusion.kernel == KERNEL and not report.refusals
    assert "corrected by m" in fusion.program
    scalar = only(aicf_jax.explain(head(totalled(SPELLINGS[name])), H, W, LABELS))
    assert scalar.result == "f32[]" and scalar.kernel == KERNEL


@pytest.mark.parametrize("name", rest_slow(SPELLINGS))
def test_values_and_gradients_of_rows_and_of_their_mean(name):
    for f in (head(SPELLINGS[name]), head(totalled(SPELLINGS[name]))):
        args = (H, W, LABELS)
        assert_close(gradients(aicf_jax.fuse(f, policy=RAISE), args), gradients(f, args))


@pytest.mark.parametrize("name", rest_slow(TOTALS, {"padded mean"}))
def test_totals(name):
    f = head(totalled(by_optax, name))
    assert only(aicf_jax.explain(f, H, W, LABELS)).result == "f32[]"
    args = (H, W, LABELS.at[0, :5].set(3))
    assert_close(gradients(aicf_jax.fuse(f, policy=RAISE), args), gradients(f, args))


def test_gradients_of_the_mean_are_computed_in_the_forward_and_those_of_rows_again():
    total, rows = (only(aicf_jax.explain(head(f), H, W, LABELS)) for f in (totalled(by_optax), by_optax))
    assert "unit_dW" in total.program and "kernel xla\n  dX = mul(unit_dX, dY)" in total.backward
    assert "unit_dW" not in rows.program and KERNEL + "_grad" in rows.backward
    assert total.program.count("dot(") == 3  # once for the value, twice where it is differentiated, and dW's sum
    assert rows.backward_program.count("dot(") == 2


HEADS = {
    "tied weights": (lambda h, e, labels: by_optax(h @ e.T, labels), (H, W.T, LABELS)),
    "tied by einsum": (lambda h, e, labels: by_optax(jnp.einsum("bsd,vd->bsv", h, e), labels), (H, W.T, LABELS)),
    "a bias": (lambda h, w, b, labels: by_optax(h @ w + b, labels), (H, W, normal(3, CLASSES), LABELS)),
    "a temperature": (lambda h, w, t, labels: by_optax(h @ w / t, labels), (H, W, jnp.float32(0.7), LABELS)),
    "rows flattened": (lambda h, w, labels: by_optax((h @ w).reshape(48, -1), labels.reshape(-1)), (H, W, LABELS)),
    "classes first": (
        lambda h, w, labels: optax.softmax_cross_entropy_with_integer_labels(
            jnp.einsum("dv,bsd->vbs", w, h), labels, axis=0
        ),
        (H, W, LABELS),
    ),
    "a learned mask weight": (
        lambda h, w, labels, weight: by_optax(h @ w, labels) @ weight,
        (H, W, LABELS, normal(4, 12)),
    ),
}


@pytest.mark.parametrize("name", rest_slow(HEADS, {"a bias"}))
def test_heads(name):
    f, args = HEADS[name]
    for g in (f, lambda *a: jnp.mean(f(*a))):
        assert only(aicf_jax.explain(g, *args)).kernel == KERNEL
        floats = tuple(i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating))
        assert_close(gradients(aicf_jax.fuse(g, policy=RAISE), args, floats), gradients(g, args, floats))


@pytest.mark.slow
def test_soft_labels_have_gradients_too():
    targets = jax.nn.softmax(normal(5, 4, 12, CLASSES))

    def f(h, w, targets):
        return optax.softmax_cross_entropy(h @ w, targets)

    for g in (f, lambda *a: jnp.mean(f(*a))):
        args = (H, W, targets)
        assert only(aicf_jax.explain(g, *args)).kernel == KERNEL
        assert_close(gradients(aicf_jax.fuse(g, policy=RAISE), args, (0, 1, 2)), gradients(g, args, (0, 1, 2)))


# -- rows of the logits that are left out -------------------------------------------------------------------------

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


# -- numerics ----------------------------------------------------------------------------------------------------


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


# -- transformations ----------------------------------------------------------------------------------------------


def scan_of_grad(f):
    def g(h, w, labels):
        def body(w, part):
            return w - 0.1 * jax.grad(weighted(f), 1)(part[0], w, part[1]), None

        return jax.lax.scan(body, w, (h, labels))[0]

    return g


def grad_of_scan(f):
    def g(h, w, labels):
        return jax.lax.scan(lambda c, part: (c + weighted(f)(part[0], w, part[1]), None), 0.0, (h, labels))[0]

    return jax.grad(g, (0, 1))


TRANSFORMS = {
    "vmap over rows": lambda f: jax.vmap(f, (0, None, 0)),
    "vmap over labels only": lambda f: jax.vmap(lambda h, w, y: f(h[0], w, y), (None, None, 0)),
    "vmap over weights": lambda f: jax.vmap(f, (None, 0, None)),
    "vmap of grad": lambda f: jax.vmap(jax.grad(weighted(f), (0, 1)), (0, None, 0)),
    "grad of vmap": lambda f: jax.grad(weighted(jax.vmap(f, (0, None, 0))), (0, 1)),
    "jvp": lambda f: lambda h, w, y: jax.jvp(lambda h, w: f(h, w, y), (h, w), (0.5 * h, w)),
    "grad of grad": lambda f: jax.grad(lambda h, w, y: jnp.sum(jax.grad(weighted(f), 1)(h, w, y) ** 2), (0, 1)),
    "jvp of grad": lambda f: lambda h, w, y: jax.jvp(jax.grad(lambda h: weighted(f)(h, w, y)), (h,), (h,))[1],
    "jacrev": lambda f: jax.jacrev(f),
    "remat": lambda f: jax.grad(weighted(jax.checkpoint(f)), (0, 1)),
    "scan of grad": scan_of_grad,
    "grad of scan": grad_of_scan,
}


@pytest.mark.parametrize("total", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", rest_slow(TRANSFORMS, {"vmap of grad", "grad of scan", "remat"}))
def test_transformations(name, total):
    f = head(totalled(by_optax) if total else by_optax)
    args = (H, W, LABELS)
    if name == "vmap over weights":
        args = (H, jnp.stack([W, 2 * W]), LABELS)
    run = TRANSFORMS[name]
    assert_close(quick_jit(run(aicf_jax.fuse(f, policy=RAISE)))(*args), quick_jit(run(f))(*args), terms=256)


@pytest.mark.slow
def test_against_finite_differences():
    with jax.enable_x64(True):
        args = (H.astype("float64"), W.astype("float64"))
        for loss in (totalled(by_optax), with_z_loss):
            f = functools.partial(head(loss), labels=LABELS)
            jax.test_util.check_grads(aicf_jax.fuse(f, policy=RAISE), args, order=2)


# -- memory -------------------------------------------------------------------------------------------------------


def temporaries(f, rows, classes):
    h, w = jax.ShapeDtypeStruct((rows, 8), "float32"), jax.ShapeDtypeStruct((8, classes), "float32")
    labels = jax.ShapeDtypeStruct((rows,), "int32")
    compiled = jax.jit(f).lower(h, w, labels).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("total", [pytest.param(False, marks=pytest.mark.slow), True])
def test_temporaries_do_not_grow_with_rows_times_classes(total):
    f = aicf_jax.fuse(head(totalled(by_optax) if total else by_optax), policy=RAISE)
    step = jax.value_and_grad(weighted(f), (0, 1))
    logits = 4 * 2048 * 4096
    small, large = temporaries(step, 512, 1024), temporaries(step, 2048, 4096)
    # Rows and classes grow four times, rows times classes 16 times; blocks have 8 rows or classes.
    assert large < 6 * small and large < logits / 16


def test_logits_that_fit_in_the_cache_are_left_to_xla(monkeypatch):
    monkeypatch.setattr(_loss_programs._programs, "cache_bytes", lambda op: 2**30)
    aicf_jax.clear_caches()
    assert only(aicf_jax.explain(head(by_optax), H, W, LABELS)).kernel == "xla"


def test_rows_are_computed_again_only_where_that_is_cheaper_or_the_logits_are_too_large(monkeypatch):
    h, w = jax.ShapeDtypeStruct((64, 4096), "float32"), jax.ShapeDtypeStruct((4096, 64), "float32")
    labels = jax.ShapeDtypeStruct((64,), "int32")
    report = aicf_jax.explain(head(by_optax), h, w, labels)
    assert only(report).kernel == "xla" and "no_gain" in [r.code for r in report.refusals]
    monkeypatch.setattr(_loss_programs, "TOO_LARGE", 1)
    aicf_jax.clear_caches()
    assert only(aicf_jax.explain(head(by_optax), h, w, labels)).kernel == KERNEL


# -- models -------------------------------------------------------------------------------------------------------


def test_a_gpt_with_its_loss():
    stack = gpt.Stack(layers=1, width=16, heads=2, length=24, vocabulary=CLASSES, batch=2)
    loss, args = gpt.build(stack, 0)
    assert only(aicf_jax.explain(loss, *args)).kernel == KERNEL
    found, want = (quick_jit(jax.value_and_grad(f))(*args) for f in (aicf_jax.fuse(loss, policy=RAISE), loss))
    tolerance = gpt.stack_tolerance(stack)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, float(jnp.max(jnp.abs(b)))))


@pytest.mark.slow
def test_linen_tied_weights_and_an_nnx_head():
    embed = linen.Embed(CLASSES, 5)
    variables = embed.init(jax.random.key(0), LABELS)

    def tied(variables, h, labels):
        return by_optax(embed.apply(variables, h, method="attend"), labels).mean()

    definition, state = nnx.split(nnx.Linear(5, CLASSES, rngs=nnx.Rngs(0)))

    def by_nnx(state, h, labels):
        return by_optax(nnx.merge(definition, state)(h), labels).mean()

    for f, parameters in ((tied, variables), (by_nnx, state)):
        assert only(aicf_jax.explain(f, parameters, H, LABELS)).kernel == KERNEL
        found, want = (quick_jit(jax.value_and_grad(g))(parameters, H, LABELS) for g in (aicf_jax.fuse(f), f))
        assert_close(jax.tree.leaves(found), jax.tree.leaves(want))


def test_explain(golden):
    h, w = jax.ShapeDtypeStruct((64, 8), "float32"), jax.ShapeDtypeStruct((8, 100), "float32")
    labels = jax.ShapeDtypeStruct((64,), "int32")
    for name, loss in (("total", totalled(by_optax)), ("rows", smoothed)):
        fusion = only(aicf_jax.explain(head(loss), h, w, labels))
        golden(f"{fusion.backward}\n\n{fusion.program}\n\n{fusion.backward_program}\n", name)
