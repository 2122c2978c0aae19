"""The Mosaic GPU kernels as candidates for vocabulary losses: what they take, what they must not, where arrays end up.

The kernels themselves are tested in `tests/pallas_kernels`; here their equations in plain jax stand in for them on a
CPU.
"""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aicf_jax
from aicf_jax.kernels import mosaic_linear_cross_entropy, mosaic_linear_cross_entropy_grad
from pallas_kernels import linear_cross_entropy
from pallas_kernels.linear_cross_entropy import Numbers, reference
from tests.linear_cross_entropy.spellings import SPELLINGS, TOTALS, by_optax, smoothed, totalled, with_z_loss

KERNELS = mosaic_linear_cross_entropy.KERNEL, mosaic_linear_cross_entropy_grad.KERNEL
H200 = aicf_jax.Policy(target="h200", on_failure="raise")
PLAIN = aicf_jax.Policy(on_failure="raise")

#: A mask is another softmax, or another function of the logits.
MASKED = {n for n in SPELLINGS if "left_out" in n or "masked" in n or n == "some_classes_of_some_rows"}
#: Not seen as losses in 16 bits: constants are rounded.
ROUNDED = {"base_two", "one_hot_rows_left_out"}
TAKEN = [n for n in SPELLINGS if n not in MASKED | ROUNDED]


def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


BIG = struct(2, 2048, 512), struct(512, 32000), struct(2, 2048, dtype="int32")


def head(loss):
    return lambda h, w, labels: loss(h @ w, labels)


def explained(f, *args):
    return aicf_jax.explain(f, *args, policy=H200)


# -- what is taken ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n if n == "smoothed" else pytest.param(n, marks=pytest.mark.slow) for n in TAKEN])
def test_taken_on_an_h200(name):
    rows, total = (explained(head(f), *BIG) for f in (SPELLINGS[name], totalled(SPELLINGS[name])))
    for report in (rows, total):
        assert [x.kernel for x in report.fusions] == ["mosaic_linear_cross_entropy"], report.refusals
    # One loss a row computes the logits again; the gradients of one number are there already.
    assert "kernel mosaic_linear_cross_entropy_grad" in rows.fusions[0].backward
    assert "mosaic_linear_cross_entropy_grad" not in total.fusions[0].backward


BIAS, WIDE = struct(32000), struct(2, 2048, 512, dtype="float32")
NOT_TAKEN = {
    **{n: (head(SPELLINGS[n]), BIG, "of its own" if "left_out" in n or "some" in n else "select_n") for n in
       sorted(MASKED - ROUNDED)},
    "a bias": (lambda h, w, t, b: by_optax(h @ w + b, t), (*BIG, BIAS), "logits through add"),
    "a traced temperature": (lambda h, w, t, s: by_optax(h @ w / s, t), (*BIG, struct()), "no number"),
    "a negative scale": (lambda h, w, t: by_optax(-2.0 * (h @ w), t), BIG, "not positive"),
    "a head for each example": (lambda h, w, t: by_optax(h @ w, t), (BIG[0], struct(2, 512, 32000), BIG[2]), "axes"),
    "soft labels": (lambda h, w, p: -(p * jax.nn.log_softmax(h @ w)).sum(-1),
                    (*BIG[:2], struct(2, 2048, 32000)), "weights by input"),
    "classes weighed": (lambda h, w, t, c: -(c * jax.nn.log_softmax(h @ w)).sum(-1), (*BIG, struct(32000)), "weights"),
    "two labels": (
        lambda h, w, t, u: head(lambda x, t: by_optax(x, t) + by_optax(x, u))(h, w, t), (*BIG, BIG[2]), "several labels"
    ),
    "two kinds of smoothing": (
        lambda h, w, t: -(jnp.arange(32000) % 7 * jax.nn.log_softmax(h @ w)).sum(-1), BIG, "weights by"
    ),
    "float32": (head(by_optax), (WIDE, struct(512, 32000, dtype="float32"), BIG[2]), "float32"),
}  # fmt: skip
QUICK_REFUSALS = ("a bias", "two labels", "classes weighed")


@pytest.mark.parametrize(
    "name", [n if n in QUICK_REFUSALS else pytest.param(n, marks=pytest.mark.slow) for n in NOT_TAKEN]
)
def test_not_taken(name):
    f, args, found = NOT_TAKEN[name]
    report = explained(f, *args)
    assert [x.kernel for x in report.fusions] == ["xla"], name
    (refusal,) = [r for r in report.refusals if r.stage == "select"]
    assert refusal.code == "capability" and found in refusal.found, refusal


@pytest.mark.slow
def test_logits_that_fit_in_the_cache_are_left_to_xla():
    args = struct(128, 512), struct(512, 512), struct(128, dtype="int32")
    assert [x.kernel for x in explained(head(by_optax), *args).fusions] == ["xla"]


# -- values ----------------------------------------------------------------------------------------------


def plain_forward(x, w, labels, *, with_sum, **options):
    *found, total = reference.forward(x, w, labels, **options)
    return Numbers(*found, total if with_sum else None)


def plain_backward(x, w, labels, *numbers, wanted, **options):
    dx, dw = reference.backward(x, w, labels, *numbers, **options)
    return dx.astype(x.dtype) if wanted[0] else None, dw.astype(w.dtype) if wanted[1] else None


def stand_ins(forward=plain_forward, backward=plain_backward):
    """The kernels, for a CPU, with other functions in their place, and where nothing moves less than the equations."""

    def patched(f):
        def run(op, *inputs):
            with mock.patch.multiple(linear_cross_entropy, forward=forward, backward=backward):
                return f(op, *inputs)

        return run

    return [
        dataclasses.replace(
            k, platforms=("cpu",), targets=None, opaque=False, run=patched(k.run), cost_bytes=lambda op: 0,
            save=None if k.save is None else patched(k.save),
        )
        for k in KERNELS
    ]  # fmt: skip


def normal(seed, *shape, dtype="bfloat16"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


H, W = 0.5 * normal(0, 4, 12, 8), 0.5 * normal(1, 8, 37)
LABELS = jnp.asarray(np.random.default_rng(2).integers(0, 37, (4, 12)), jnp.int32)
OTHERS = {
    "tied weights": (lambda h, w, t: by_optax(h @ w.T, t), (H, W.T, LABELS)),
    "rows left out": (lambda h, w, t: by_optax((h @ w)[:, :-1], t[:, 1:]), (H, W, LABELS)),
    "rows left out, smoothed": (lambda h, w, t: smoothed((h @ w)[:, :-1], t[:, 1:]), (H, W, LABELS)),
    "classes first": (lambda h, w, t: by_optax(jnp.einsum("dv,dbs->bsv", w, h), t), (H.transpose(2, 0, 1), W, LABELS)),
    "rows turned": (lambda h, w, t: with_z_loss(jnp.einsum("bsd,dv->sbv", h, w), t), (H, W, LABELS.T)),
    "two dimensions contracted": (
        lambda h, w, t: by_optax(jnp.einsum("bsij,ijv->bsv", h, w), t), (H.reshape(4, 12, 2, 4), W.reshape(2, 4, 37),
                                                                         LABELS)
    ),
    "float32 parameters": (
        lambda h, w, t: by_optax(h @ w.astype(h.dtype), t), (H, W.astype("float32"), LABELS)
    ),
    "float32 logits": (
        lambda h, w, t: smoothed(jnp.matmul(h, w, preferred_element_type="float32"), t), (H, W, LABELS)
    ),
    "labels out of bounds": (
        lambda h, w, t: jnp.nan_to_num(by_optax(h @ w, t), nan=7.0), (H, W, LABELS.at[0, :3].set(99))
    ),
    "a row": (lambda h, w, t: by_optax(h @ w, t), (H[0, 0], W, LABELS[0, 0])),
}  # fmt: skip
VALUES = {
    **{n: (head(SPELLINGS[n]), (H, W, LABELS)) for n in TAKEN},
    **{f"total: {n}": (head(totalled(smoothed, n)), (H, W, LABELS)) for n in TOTALS},
    **OTHERS,
}
QUICK = ("total: padded mean", "rows left out, smoothed")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in VALUES])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_values_and_gradients(name, dtype):
    f, args = VALUES[name]
    args = [x.astype(dtype) if x.dtype == "bfloat16" else x for x in args]
    forward, backward = mock.Mock(side_effect=plain_forward), mock.Mock(side_effect=plain_backward)
    fused = aicf_jax.fuse(f, kernels=stand_ins(forward, backward), policy=PLAIN)
    with jax.enable_x64(True):
        h, w = (jnp.asarray(np.asarray(x).astype(np.float64)) for x in args[:2])
        want, pull = jax.vjp(lambda h, w: f(h, w, args[2]), h, w)
        ct = np.random.default_rng(3).standard_normal(want.shape)
        wanted = (want, *pull(jnp.asarray(ct, want.dtype)))
    found, pull = jax.vjp(lambda h, w: fused(h, w, args[2]), *args[:2])
    assert forward.called
    given = pull(jnp.asarray(ct, found.dtype))
    assert backward.called
    # Losses and cotangents are rounded to 8 bits, or results of a sum of 48 rows are; constants of labels too.
    for a, b in zip((found, *given), wanted, strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        assert a.shape == b.shape
        assert np.max(np.abs(a - b)) <= 8 * 2.0**-8 * max(1.0, np.max(np.abs(b)))


@pytest.mark.slow
def test_only_what_is_wanted_is_computed():
    backward = mock.Mock(side_effect=plain_backward)
    fused = aicf_jax.fuse(head(by_optax), kernels=stand_ins(backward=backward), policy=PLAIN)
    jax.grad(lambda h: fused(h, W, LABELS).sum())(H)
    assert backward.call_args.kwargs["wanted"] == (True, False)


@pytest.mark.slow
def test_a_batch_of_losses_and_a_second_derivative():
    """Under `vmap` rows join rows; what is not derived as one operation runs as its equations."""
    f = head(by_optax)
    fused = aicf_jax.fuse(f, kernels=stand_ins(), policy=PLAIN)
    batch, labels = jnp.stack([H, 2 * H]), jnp.stack([LABELS, LABELS])

    def gradient(g, cast):
        losses = lambda h: jax.vmap(g, (0, None, 0))(h, cast(W), labels)  # noqa: E731
        return jax.grad(lambda h: losses(h).sum())(cast(batch))

    def curvature(g, cast):
        total = lambda h: g(h, cast(W), LABELS).sum()  # noqa: E731
        return jax.jvp(jax.grad(total), (cast(H),), (cast(H),))[1]

    for taken in (gradient, curvature):
        found = np.asarray(taken(fused, lambda x: x)).astype(np.float64)
        with jax.enable_x64(True):
            want = np.asarray(taken(f, lambda x: jnp.asarray(np.asarray(x).astype(np.float64))))
        # Second derivatives are the equations' own, which round to 8 bits some twenty times.
        assert np.max(np.abs(found - want)) <= 20 * 2.0**-8 * max(1.0, np.max(np.abs(want)))
