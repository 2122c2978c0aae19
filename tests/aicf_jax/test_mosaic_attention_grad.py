"""The Mosaic GPU kernels of attention's backward as a candidate: what they take, and where arrays end up.

The kernels themselves are tested in `tests/pallas_kernels`; here their equations in plain jax stand in for them.
"""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aicf_jax
from aicf_jax.kernels import mosaic_attention_grad
from pallas_kernels import _mosaic, attention
from pallas_kernels.attention import BackwardConfig
from tests.aicf_jax import mosaic_attention_support as support
from tests.pallas_kernels.simulator import skip_what_it_lacks

KERNEL = mosaic_attention_grad.KERNEL
H200 = aicf_jax.Policy(target="h200", on_failure="raise")


def pulled(f, args, ct):
    """Gradients of what is no integer and no truth value."""
    numbers = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]

    def g(*xs):
        replaced = dict(zip(numbers, xs, strict=True))
        return f(*(replaced.get(i, x) for i, x in enumerate(args)))

    y, pull = jax.vjp(g, *(args[i] for i in numbers))
    return pull(ct(y))


def exactly(args):
    return [x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in args]


def cotangent(y):
    return jax.random.normal(jax.random.key(1), y.shape, jnp.float32).astype(jnp.bfloat16).astype(y.dtype)


def gradients(f, *args):
    return pulled(f, args, cotangent)


def differ_little(found, args, f):
    with jax.enable_x64(True):
        wanted = pulled(f, exactly(args), cotangent)
    # Y, weights and gradients of scores are rounded to 8 bits, at most eight times; what is summed has random signs.
    for a, b in zip(found, wanted, strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        assert a.shape == b.shape
        assert np.max(np.abs(a - b)) <= 8 * 2.0**-8 * max(1.0, np.max(np.abs(b)))


VALUES = {n: x for n, x in support.VALUES.items() if len(x[1]) == 3}
QUICK = ("shared heads",)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in VALUES])
def test_gradients(name):
    f, shapes, *_ = VALUES[name]
    args = support.normal(*shapes)
    backward = mock.Mock(side_effect=support.plain_backward)
    kernels = [support.stand_in(), support.gradient_stand_in(backward)]
    found = gradients(aicf_jax.fuse(f, kernels=kernels, policy=support.PLAIN), *args)
    assert backward.called
    differ_little(found, args, f)


BESIDE = support.BESIDE
# The gradients of biases that are made of numbers.
WANTED = {
    **dict.fromkeys(
        ("bias", "bias of all heads", "bias under the scale", "one query, shared heads, bias", "t5", "alibi"), ("bias",)
    ),
    "padding that is a bias": ("key_bias",),
    "mask added beside a bias that is as low": ("key_bias",),
}
QUICK_BESIDE = ("t5",)


@pytest.mark.parametrize("name", [n if n in QUICK_BESIDE else pytest.param(n, marks=pytest.mark.slow) for n in BESIDE])
def test_gradients_with_arrays_beside_the_scores(name):
    f, beside, given = BESIDE[name]
    args = [*support.normal(*[support.SMALL] * 3), *beside]
    backward = mock.Mock(side_effect=support.plain_backward)
    kernels = [support.stand_in(), support.gradient_stand_in(backward)]
    differ_little(gradients(aicf_jax.fuse(f, kernels=kernels, policy=support.PLAIN), *args), args, f)
    options = backward.call_args.kwargs
    told = {n for n in ("segments", "mask", "bias", "key_bias") if support.is_given(options[n])}
    assert told == given
    assert options.get("wanted", ()) == WANTED.get(name, ())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("f", "beside"),
    [(support.jax_bias, support.NUMBERS), (support.flax_padded, support.TOKENS)],
)
def test_gradients_of_batches_that_are_mapped_and_share_what_is_beside_the_scores(f, beside):
    args = [*support.normal(*[(3, *support.SMALL)] * 3), beside]
    mapped = jax.vmap(f, (0, 0, 0, None))
    backward = mock.Mock(side_effect=support.plain_backward)
    kernels = [support.stand_in(), support.gradient_stand_in(backward)]
    differ_little(gradients(aicf_jax.fuse(mapped, kernels=kernels, policy=support.PLAIN), *args), args, mapped)
    assert backward.called


@pytest.mark.slow
def test_a_bias_that_is_also_the_keys_has_one_gradient():
    def f(q, k, v):
        x = jnp.einsum("bhqd,bhkd->bhqk", q, k).astype(jnp.float32) + k[:, :, :, 0][:, :, None].astype(jnp.float32)
        return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(x).astype(v.dtype), v)

    args = support.normal((1, 2, 24, 64), (1, 2, 40, 64), (1, 2, 40, 64))
    kernels = [support.stand_in(), support.gradient_stand_in()]
    differ_little(gradients(aicf_jax.fuse(f, kernels=kernels, policy=support.PLAIN), *args), args, f)


@pytest.mark.slow
def test_an_array_that_is_q_and_k_has_one_gradient():
    def f(x, v):
        return jax.nn.softmax((x @ x.T).astype(jnp.float32) * 0.1).astype(v.dtype) @ v

    args = support.normal((24, 64), (24, 64))
    differ_little(
        gradients(
            aicf_jax.fuse(f, kernels=[support.stand_in(), support.gradient_stand_in()], policy=support.PLAIN), *args
        ),
        args,
        f,
    )


@pytest.mark.slow
def test_under_vmap_the_kernel_is_taken_where_all_is_batched_and_left_where_not():
    f, shapes, *_ = VALUES["shared heads"]
    args = support.normal(*((3, *s) for s in shapes))
    backward = mock.Mock(side_effect=support.plain_backward)
    fused = aicf_jax.fuse(f, kernels=[support.stand_in(), support.gradient_stand_in(backward)], policy=support.PLAIN)
    differ_little(gradients(jax.vmap(fused), *args), args, jax.vmap(f))
    assert backward.called
    backward.reset_mock()
    y, pull = jax.vjp(fused, *(x[0] for x in args))
    cts = jax.random.normal(jax.random.key(2), (3, *y.shape)).astype(y.dtype)
    found = jax.vmap(pull)(cts)
    one = [pull(ct) for ct in cts]
    for k, x in enumerate(found):
        assert np.allclose(*(np.asarray(y, np.float32) for y in (x, jnp.stack([o[k] for o in one]))), atol=0.05)


TAKEN = (
    "jax.nn",
    "jax.nn, shared heads",
    "flax",
    "window",
    "softcap",
    "heads of 80",
    "heads of 128",
    "heads of 256",
    "matrices",
)


@pytest.mark.parametrize("name", [n if n in TAKEN[:1] else pytest.param(n, marks=pytest.mark.slow) for n in TAKEN])
def test_taken_on_an_h200(name):
    f, types, *_ = support.TAKEN[name]
    (fusion,) = aicf_jax.explain(f, *types, policy=H200).fusions
    assert "mosaic_attention_grad" in str(fusion.backward)


S, H, Q = support.S, support.H, support.Q
BIAS = support.struct(1, H, S, S, dtype="float32")
TOKENS = support.struct(support.B, S, dtype="int32")
LOWEST = support.LOWEST
BESIDE_TAKEN = {
    "flax, padding": (support.flax_padded, TOKENS),
    "flax, segments": (support.flax_segments, TOKENS),
    "a bias whose gradient is wanted": (support.jax_bias, BIAS),
    "alibi": (support.alibi, support.struct(H, dtype="float32")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE_TAKEN)
def test_taken_on_an_h200_with_arrays_beside_the_scores(name):
    f, beside = BESIDE_TAKEN[name]
    (fusion,) = aicf_jax.explain(f, Q, Q, Q, beside, policy=H200).fusions
    assert "mosaic_attention_grad" in str(fusion.backward)


def added_in_place(q, k, v, tokens):
    mask = jnp.where((jnp.arange(S)[:, None] + tokens[:, None, None]) % 2 == 0, 0.0, LOWEST)
    return support.weighted(support.scores(q, k) + mask, v)


def filled_powers_of_two(q, k, v, tokens):
    x = jnp.where((tokens > 0)[:, None, None], support.scores(q, k), LOWEST)
    e = jnp.exp2(x - x.max(-1, keepdims=True))
    return jnp.einsum("bhqk,bkhd->bqhd", (e / e.sum(-1, keepdims=True)).astype(v.dtype), v)


BESIDE_NOT_TAKEN = {
    "a fill that is added to scores": (added_in_place, TOKENS),
    "a fill in powers of two": (filled_powers_of_two, TOKENS),
}


@pytest.mark.parametrize("name", BESIDE_NOT_TAKEN)
def test_not_taken_where_hidden_scores_have_gradients_or_statistics_are_rounded(name):
    f, beside = BESIDE_NOT_TAKEN[name]
    report = aicf_jax.explain(f, Q, Q, Q, beside, policy=H200)
    (fusion,) = report.fusions
    assert "mosaic_attention_grad" not in str(fusion.backward)
    assert fusion.kernel == "mosaic_attention"


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "is_taken"), [("float32", False), ("bfloat16", True)])
def test_not_taken_where_a_bias_of_long_heads_does_not_fit_in_shared_memory(dtype, is_taken):
    x = support.struct(1, S, H, 256)
    (fusion,) = aicf_jax.explain(
        support.jax_bias, x, x, x, support.struct(1, H, S, S, dtype=dtype), policy=H200
    ).fusions
    assert fusion.kernel == "mosaic_attention"
    assert ("mosaic_attention_grad" in str(fusion.backward)) == is_taken


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flax, padding, a query that sees nothing", "t5"])
def test_arrays_beside_the_scores_in_the_simulator(name):
    """As operations call it, against the stand-in."""
    skip_what_it_lacks()
    f, beside, _ = BESIDE[name]
    calls, told = [], []

    def recorded(*args, **options):
        arrays = {name: options.pop(name) for name in ("segments", "mask", "bias", "key_bias")}
        told.append(options)
        jax.debug.callback(lambda *x: calls.append(x), args, arrays)
        return support.plain_backward(*args, **options, **arrays)

    args = [*support.normal(*[support.SMALL] * 3), *beside]
    kernels = [support.stand_in(), support.gradient_stand_in(recorded)]
    gradients(aicf_jax.fuse(f, kernels=kernels, policy=support.PLAIN), *args)
    jax.effects_barrier()
    args, arrays = jax.tree.map(jnp.asarray, calls[-1])
    options = {**told[-1], **arrays}
    found = attention.backward(*args, **options, config=BackwardConfig(64, 64, 2), interpret=_mosaic.interpret())
    for got, want in zip(found, support.plain_backward(*args, **options), strict=True):
        got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
        assert np.max(np.abs(got - want)) <= 2.0**-6 * np.max(np.abs(want))
    assert not _mosaic.races_found()
