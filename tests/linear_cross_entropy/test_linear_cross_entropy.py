"""The family linear_cross_entropy: recognized, streamed, and differentiated as the unfused program is."""

from __future__ import annotations

import functools
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
from tests.linear_cross_entropy.spellings import CLASSES, SPELLINGS, TOTALS, by_optax, smoothed, totalled, with_z_loss
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
    weighted,
)
from tests.support import quick_jit


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


NUMBERS = {
    "mean": (jnp.mean, "div(total, c"),
    "divided": (lambda rows: jnp.sum(rows) / 3.0, "div(total, c"),
    "scaled": (lambda rows: jnp.sum(rows) * 0.25, "mul(total, c"),
    "divided twice": (lambda rows: jnp.mean(rows) / 3.0, "div(total, c"),
}
# Of these the sum alone is the loss: what is made of it is no number times it, or it is a result itself.
NOT_NUMBERS = {
    "sum": jnp.sum,
    "divides": lambda rows: 3.0 / jnp.sum(rows),
    "used twice": lambda rows: (lambda total: total / 4.0 + jnp.tanh(total))(jnp.sum(rows)),
    "squared": lambda rows: jnp.sum(rows) ** 2,
    "offset": lambda rows: jnp.sum(rows) + 1.0,
    "by a traced number": lambda rows: jnp.sum(rows) / jnp.sum(LABELS > 2),
}


@pytest.mark.parametrize("name", [*NUMBERS, *NOT_NUMBERS])
def test_a_number_that_the_sum_is_multiplied_by_is_part_of_the_loss(name):
    """The gradients of the forward are then those of a cotangent of one, which need not be multiplied once more."""
    total, line = NUMBERS.get(name) or (NOT_NUMBERS[name], None)
    f = head(lambda logits, labels: total(by_optax(logits, labels)))
    differentiated = only(aicf_jax.explain(f, H, W, LABELS)).program.split("Differentiated")[1]
    assert any(op in differentiated for op in ("div(total, c", "mul(total, c")) == (line is not None)
    assert line is None or line in differentiated
    args = (H, W, LABELS)
    for g in (f, lambda *a: 3 * f(*a)):
        assert_close(gradients(aicf_jax.fuse(g, policy=RAISE), args), gradients(g, args))


def test_the_gradients_of_a_mean_are_not_multiplied_after_they_are_made():
    f = aicf_jax.fuse(head(totalled(by_optax)))
    text = jax.jit(jax.value_and_grad(f, (0, 1))).lower(H, W, LABELS).compile().as_text()
    weights = rf"f32\[{W.shape[0]},{W.shape[1]}\]"
    assert re.search(rf"while\S* = \(.*{weights}", text)
    assert not re.search(rf"multiply\S* = {weights}", text[text.index("\nENTRY") :])


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
