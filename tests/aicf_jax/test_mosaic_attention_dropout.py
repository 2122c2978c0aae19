"""Dropout of attention's weights for the Mosaic GPU kernels: which spellings are read, and what the kernels are given.

The kernels' equations in plain jax stand in for them, but for one test in the simulator.
"""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import aicf_jax
from pallas_kernels import _mosaic, attention
from pallas_kernels.attention import BackwardConfig, Bernoulli, ForwardConfig
from tests.aicf_jax import mosaic_attention_support as support
from tests.aicf_jax.mosaic_attention_support import PLAIN, normal, scores, tril
from tests.pallas_kernels.simulator import skip_what_it_lacks

KEY = jax.random.key(5)
SHAPE = (2, 24, 4, 64)
RATE = 0.2


def weights(q, k):
    return jax.nn.softmax(scores(q, k), -1)


def valued(w, v):
    return jnp.einsum("bhqk,bkhd->bqhd", w.astype(v.dtype), v)


def flax(broadcast, module=linen):
    def f(q, k, v, rng):
        return module.dot_product_attention(
            q, k, v, broadcast_dropout=broadcast, dropout_rng=rng, dropout_rate=RATE, deterministic=False
        )

    return f


def chosen(q, k, v, rng):
    """As `linen.Dropout` writes it."""
    w = weights(q, k)
    return valued(jnp.where(jax.random.bernoulli(rng, 1 - RATE, w.shape), w / (1 - RATE), 0.0), v)


def module(q, k, v, rng):
    w = weights(q, k)
    return valued(linen.Dropout(RATE, deterministic=False).apply({}, w, rngs={"dropout": rng}), v)


def with_mask(q, k, v, rng):
    """Causal, scaled, dropped in the type of V, with the factor behind."""
    w = jax.nn.softmax(jnp.where(tril(q.shape[1]), scores(q, k), -jnp.inf), -1).astype(v.dtype)
    keep = jax.random.bernoulli(rng, 1 - RATE, w.shape)
    return valued(w * keep.astype(w.dtype) * (1 / (1 - RATE)), v)


def heads_second(q, k, v, rng):
    """Dropout of shape ``[B, S, H, T]``, which is not the kernel's order."""
    keep = jax.random.bernoulli(rng, 1 - RATE, (q.shape[0], q.shape[1], q.shape[2], k.shape[1]))
    return valued(weights(q, k) * keep.transpose(0, 2, 1, 3) / (1 - RATE), v)


def opposite(q, k, v, rng):
    w = weights(q, k)
    return valued(jnp.where(jax.random.bernoulli(rng, RATE, w.shape), 0.0, w / (1 - RATE)), v)


def twice(q, k, v, rng):
    w, (a, b) = weights(q, k), jax.random.split(rng)
    w = jnp.where(jax.random.bernoulli(a, 1 - RATE, w.shape), w / (1 - RATE), 0.0)
    return valued(jnp.where(jax.random.bernoulli(b, 0.5, w.shape), 2 * w, 0.0), v)


def of_keys(q, k, v, rng):
    """Whole keys, for all queries."""
    keep = jax.random.bernoulli(rng, 1 - RATE, (q.shape[0], 1, 1, k.shape[1]))
    return valued(weights(q, k) * (keep / (1 - RATE)), v)


def given(q, k, v, keep):
    return valued(weights(q, k) * jnp.where(keep, 2.0, 0.0), v)


KEEP = jnp.asarray(np.random.default_rng(0).random((1, 4, 24, 24)) < 0.5)
# Name -> (function, key or array, the kernel's array (None: drawn in the kernel), factor).
SPELLINGS = {
    "linen": (flax(False), KEY, None, 1.25),
    "linen, the same for all heads": (flax(True), KEY, (1, 1, 24, 24), 1.25),
    "nnx": (flax(False, nnx), KEY, None, 1.25),
    "nnx, a key as numbers": (flax(False, nnx), jax.random.PRNGKey(5), None, 1.25),
    "linen.Dropout": (module, KEY, None, 1.25),
    "chosen": (chosen, KEY, None, 1.25),
    "causal, factor behind": (with_mask, KEY, None, 1.25),
    "in another order": (heads_second, KEY, (2, 4, 24, 24), 1.25),
    "what is dropped": (opposite, KEY, (2, 4, 24, 24), 1.25),
    "twice": (twice, KEY, (2, 4, 24, 24), 2.5),
    "whole keys": (of_keys, KEY, (2, 1, 24, 24), 1.25),
    "an array": (given, KEEP, (1, 4, 24, 24), 2.0),
}
QUICK = ("linen, the same for all heads", "causal, factor behind")


def gradients(f, args):
    """Values, and gradients by Q, K and V."""
    y, pull = jax.vjp(lambda *qkv: f(*qkv, *args[3:]), *args[:3])
    return (y, *pull(jax.random.normal(jax.random.key(1), y.shape).astype(y.dtype)))


def differ_little(found, wanted):
    # Weights, scores, results and (flax) all in between are rounded to 8 bits, at most eight times.
    for a, b in zip(found, wanted, strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        assert a.shape == b.shape
        assert np.max(np.abs(a - b)) <= 8 * 2.0**-8 * max(1.0, np.max(np.abs(b)))


def stand_ins():
    forward = mock.Mock(side_effect=support.plain_forward)
    backward = mock.Mock(side_effect=support.plain_backward)
    return [support.stand_in(forward), support.gradient_stand_in(backward)], forward, backward


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SPELLINGS])
def test_spellings(name):
    """Against the program itself in float32: in float64 jax would draw other numbers."""
    f, beside, shape, factor = SPELLINGS[name]
    args = [*normal(*[SHAPE] * 3), beside]
    kernels, forward, backward = stand_ins()
    found = gradients(aicf_jax.fuse(f, kernels=kernels, policy=PLAIN), args)
    differ_little(found, gradients(f, [*(x.astype(jnp.float32) for x in args[:3]), beside]))
    for call in (forward, backward):
        options = call.call_args.kwargs
        keep = options["keep"]
        if shape is None:
            assert isinstance(keep, Bernoulli) and keep.shape == (2, 4, 24, 24)
            assert keep.probability == pytest.approx(1 - RATE)
        else:
            assert keep.shape == shape and keep.dtype == jnp.bool_
        # Of the type of the program's numbers.
        assert options["keep_factor"] == pytest.approx(factor, rel=2.0**-8)


@pytest.mark.slow
def test_shared_heads_mapped_batches_and_one_query():
    def f(q, k, v, rng):
        return chosen(q, jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2), rng)

    for queries, keys in ((24, 24), (1, 512)):
        args = [*normal((2, queries, 4, 64), (2, keys, 2, 64), (2, keys, 2, 64)), KEY]
        kernels, forward, _ = stand_ins()
        found = gradients(aicf_jax.fuse(f, kernels=kernels, policy=PLAIN), args)
        differ_little(found, gradients(f, [*(x.astype(jnp.float32) for x in args[:3]), KEY]))
        assert isinstance(forward.call_args.kwargs["keep"], Bernoulli)
    args = [*normal(*[(3, *SHAPE)] * 3), KEY]
    mapped = jax.vmap(chosen, (0, 0, 0, None))
    found = gradients(aicf_jax.fuse(mapped, kernels=stand_ins()[0], policy=PLAIN), args)
    differ_little(found, gradients(mapped, [*(x.astype(jnp.float32) for x in args[:3]), KEY]))


@pytest.mark.slow
def test_a_module_of_flax():
    """Whose parameters are differentiated too; its key is folded from the one it is given."""
    layer = linen.MultiHeadDotProductAttention(
        4, qkv_features=256, dropout_rate=RATE, deterministic=False, broadcast_dropout=False, dtype=jnp.bfloat16
    )
    (x,) = normal((2, 24, 64))
    variables = layer.init({"params": jax.random.key(0), "dropout": KEY}, x)

    def loss(variables, x):
        mask = linen.make_causal_mask(jnp.ones(x.shape[:2]))
        return jnp.sum(layer.apply(variables, x, mask=mask, rngs={"dropout": KEY}).astype(jnp.float32) ** 2)

    kernels, forward, backward = stand_ins()
    found = jax.value_and_grad(aicf_jax.fuse(loss, kernels=kernels, policy=PLAIN), (0, 1))(variables, x)
    wanted = jax.value_and_grad(loss, (0, 1))(variables, x)
    assert isinstance(forward.call_args.kwargs["keep"], Bernoulli)
    assert isinstance(backward.call_args.kwargs["keep"], Bernoulli)
    # Both round to 8 bits between all operations; the gradient of the bias of keys is nothing but roundings.
    found, wanted = ([np.asarray(x).astype(np.float64) for x in jax.tree.leaves(xs)] for xs in (found, wanted))
    largest = max(np.max(np.abs(x)) for x in wanted[1:])
    assert abs(found[0] - wanted[0]) <= 16 * 2.0**-8 * abs(wanted[0])
    for a, b in zip(found[1:], wanted[1:], strict=True):
        assert np.max(np.abs(a - b)) <= 16 * 2.0**-8 * largest


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linen", "linen, the same for all heads"])
def test_in_the_simulator(name):
    """Both kernels as operations call them, against the stand-ins."""
    skip_what_it_lacks()
    f, beside, *_ = SPELLINGS[name]
    args = [*normal(*[SHAPE] * 3), beside]
    seen = []

    def recording(kernel, config, plain):
        def run(*args, **options):
            leaves, tree = jax.tree.flatten((args, options))
            leaves = [jax.random.key_data(x) if is_key(x) else x for x in leaves]
            where = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]

            def record(*arrays):
                given = dict(zip(where, map(jnp.asarray, arrays), strict=True))
                seen.append((kernel, config, plain, tree.unflatten([given.get(i, x) for i, x in enumerate(leaves)])))

            jax.debug.callback(record, *(leaves[i] for i in where))
            return plain(*args, **options)

        return run

    small = ForwardConfig(64, 2), BackwardConfig(64, 64, 2)
    forward = recording(attention.forward, small[0], support.plain_forward)
    backward = recording(attention.backward, small[1], support.plain_backward)
    kernels = [support.stand_in(forward), support.gradient_stand_in(backward)]
    gradients(aicf_jax.fuse(f, kernels=kernels, policy=PLAIN), args)
    jax.effects_barrier()
    assert {kernel for kernel, *_ in seen} == {attention.forward, attention.backward}
    for kernel, config, plain, (given, options) in seen:
        found = kernel(*given, **options, config=config, interpret=_mosaic.interpret())
        assert not _mosaic.races_found()
        differ_little(found, plain(*given, **options))


def is_key(x):
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


NOISE = jnp.ones((2, 4, 24, 24), jnp.float32)
LEFT = {
    "noise added": (lambda q, k, v, x: valued(weights(q, k) + x, v), NOISE),
    "an array of numbers": (lambda q, k, v, x: valued(weights(q, k) * x, v), NOISE),
    "a traced factor": (lambda q, k, v, x: valued(weights(q, k) * KEEP * x, v), jnp.float32(2)),
    "by the weights themselves": (
        lambda q, k, v, x: valued(jnp.where(weights(q, k) > x, weights(q, k), 0.0), v),
        jnp.float32(0.1),
    ),
    "filled with another number": (lambda q, k, v, x: valued(jnp.where(x, weights(q, k), 1.0), v), KEEP),
    "multiplied alone": (lambda q, k, v, x: valued(weights(q, k) * 3.0, v), KEEP),
    "normalized again": (
        lambda q, k, v, x: valued((w := weights(q, k) * x) / (w.sum(-1, keepdims=True) + 1e-6), v),
        KEEP,
    ),
}


@pytest.mark.parametrize(
    "name", [n if n == "an array of numbers" else pytest.param(n, marks=pytest.mark.slow) for n in LEFT]
)
def test_left_alone(name):
    """What is no dropout: the kernel is not called, and the result is the program's."""
    f, beside = LEFT[name]
    args = [*normal(*[SHAPE] * 3), beside]
    kernels, forward, _ = stand_ins()
    found = aicf_jax.fuse(f, kernels=kernels, policy=aicf_jax.Policy())(*args)
    assert not forward.called
    differ_little([found], [f(*(x.astype(jnp.float32) for x in args[:3]), beside)])


@pytest.mark.slow
def test_kernels_that_do_not_know_it_refuse():
    x = support.struct(2, 2048, 4, 64)
    report = aicf_jax.explain(flax(False), x, x, x, KEY, policy=support.H200)
    assert [fusion.kernel for fusion in report.fusions] == ["mosaic_attention"]
    assert "mosaic_attention_grad" in str(report.fusions[0].backward)
    refused = {r.detail.split()[1] for r in report.refusals if r.detail.startswith("kernel ")}
    assert "cudnn_attention" in refused and "mosaic_attention" not in refused
