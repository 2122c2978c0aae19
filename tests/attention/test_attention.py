"""The attention family: every spelling is recognized, proved, streamed, and differentiates like the unfused program."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import aicf_jax
from tests.attention.equations import (
    FEW_K,
    FEW_V,
    HEADS,
    LENGTH,
    K,
    Q,
    V,
    assert_close,
    causal,
    library,
    loss,
    normal,
    scores,
    values,
)
from tests.corpus import attention_spellings as spellings


def alibi(q, k, v, slopes):
    distance = jnp.abs(jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH))
    return values(scores(q, k) - slopes[:, None, None] * distance, v)


def t5(q, k, v, table):
    bucket = jnp.clip(jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH), -3, 3) + 3
    return values(scores(q, k) + table[:, bucket], v)


def dropout(broadcast):
    def f(q, k, v, key):
        options = {"dropout_rate": 0.3, "deterministic": False, "broadcast_dropout": broadcast}
        return linen.dot_product_attention(q, k, v, dropout_rng=key, **options)

    return f


def segments(q, k, v, ids):
    return linen.dot_product_attention(q, k, v, mask=linen.make_attention_mask(ids, ids, jnp.equal))


def per_head(q, k, v):
    return jax.vmap(lambda q, k, v: jax.nn.softmax(q @ k.swapaxes(-1, -2) / 3.0) @ v, 2, 2)(q, k, v)


#: Compiled twice each: all but these are slow tests.
QUICK = {
    "causal, grouped queries",
    "bias under a causal mask",
    "T5's table",
    "dropout",
    "one query",
    "basic",
    "normalized_after_pv",
    "float32_softmax",
    "exp_log_softmax",
    "flax_linen",
    "vmap over values only",
    "vmap of grad",
    "jvp of grad",
    "grad of scan",
    "remat",
}


def rest_slow(names):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


CASES = {
    "the library's": (library, Q, K, V),
    "causal, grouped queries": (causal, Q, FEW_K, FEW_V),
    "a window": (functools.partial(library, local_window_size=(5, 3)), Q, FEW_K, FEW_V),
    "bias": (library, Q, K, V, normal(3, 1, HEADS, LENGTH, LENGTH)),
    "bias, broadcast over heads": (library, Q, K, V, normal(3, 1, 1, LENGTH, LENGTH)),
    "bias under a causal mask": (causal, Q, K, V, normal(3, 1, HEADS, LENGTH, LENGTH)),
    "padded keys": (lambda q, k, v, n: library(q, k, v, key_value_seq_lengths=n), Q, K, V, jnp.array([7, LENGTH])),
    "ALiBi with learned slopes": (alibi, Q, K, V, jnp.arange(1.0, HEADS + 1) / 10),
    "T5's table": (t5, Q, K, V, normal(4, HEADS, 7)),
    "a learned temperature": (lambda q, k, v, t: values(scores(q, k) / t, v), Q, K, V, jnp.float32(2.0)),
    "softcap": (lambda q, k, v: values(5 * jnp.tanh(scores(q, k) / 5), v), Q, K, V),
    "segments": (segments, Q, K, V, jnp.array([[0] * 20 + [1] * 17, [0] * 5 + [1] * 32])),
    "dropout, broadcast": (dropout(True), Q, K, V, jax.random.key(3)),
    "dropout": (dropout(False), Q, K, V, jax.random.key(3)),
    "heads by vmap": (per_head, Q, K, V),
    "self-attention of one array": (lambda x: linen.dot_product_attention(x, x, x), Q),
    "one query": (lambda q, k, v, n: library(q, k, v, mask=jnp.arange(LENGTH) < n), Q[:, :1], K, V, jnp.int32(9)),
}


def differentiable(args):
    return tuple(i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating))


@pytest.mark.parametrize("name", CASES)
def test_is_one_streamed_attention(name):
    f, *args = CASES[name]
    report = aicf_jax.explain(f, *args)
    assert report.count("attention") == 1
    (fusion,) = (x for x in report.fusions if x.op == "attention")
    assert fusion.kernel == "streamed_attention"
    assert fusion.bytes_after < fusion.bytes_before
    assert "attention_grad" in fusion.backward


@pytest.mark.parametrize("name", rest_slow(CASES))
def test_values_and_gradients(name):
    f, *args = CASES[name]
    where = differentiable(args)
    both = jax.jit(lambda *a: (aicf_jax.fuse(f)(*a), jax.grad(loss(aicf_jax.fuse(f)), where)(*a)))
    assert_close(both(*args), jax.jit(lambda *a: (f(*a), jax.grad(loss(f), where)(*a)))(*args), 512.0)


@pytest.mark.parametrize("case", spellings.POSITIVE, ids=lambda case: case[0])
def test_every_spelling_of_the_corpus_is_recognized(case):
    _, f, args, count = case
    report = aicf_jax.explain(f, *args)
    assert report.count("attention") == count
    assert all(x.kernel == "streamed_attention" for x in report.fusions if x.op == "attention")


@pytest.mark.parametrize("name", rest_slow(name for name, *_ in spellings.POSITIVE))
def test_every_spelling_of_the_corpus_and_its_gradient(name):
    _, f, args, _ = next(case for case in spellings.POSITIVE if case[0] == name)
    fused = jax.jit(lambda *a: jax.value_and_grad(loss(aicf_jax.fuse(f)), (0, 1, 2))(*a))
    dtype = f(*args).dtype
    found, expected = fused(*args), jax.jit(lambda *a: jax.value_and_grad(loss(f), (0, 1, 2))(*a))(*args)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = max(1.0, float(jnp.max(jnp.abs(b))))
        assert float(jnp.max(jnp.abs(a - b))) <= 512 * float(jnp.finfo(dtype).eps) * scale


@pytest.mark.parametrize("case", spellings.NEGATIVE, ids=lambda case: case[0])
def test_no_near_miss_of_the_corpus(case):
    _, f, args, _ = case
    assert aicf_jax.explain(f, *args).count("attention") == 0
    assert_close(aicf_jax.fuse(f)(*args), jax.jit(f)(*args))


NEAR_MISSES = {
    "weights returned": (
        lambda q, k, v: (p := jax.nn.softmax(scores(q, k)), jnp.einsum("bhij,bjhd->bihd", p, v)),
        "weights_returned",
    ),
    "scores reused": (lambda q, k, v: (values(x := scores(q, k), v), x.sum()), "scores_reused"),
    "softmax over the queries": (
        lambda q, k, v: jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores(q, k), -2), v),
        "softmax_axis",
    ),
    "softmax over the heads": (
        lambda q, k, v: jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores(q, k), 1), v),
        "softmax_axis",
    ),
    "weights + epsilon": (
        lambda q, k, v: jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores(q, k)) + 1e-3, v),
        "not_linear",
    ),
    "squared weights": (
        lambda q, k, v: jnp.einsum("bhij,bjhd->bihd", jnp.square(jax.nn.softmax(scores(q, k))), v),
        "not_linear",
    ),
    "no maximum": (
        lambda q, k, v: jnp.einsum("bhij,bjhd->bihd", (e := jnp.exp(scores(q, k))) / e.sum(-1, keepdims=True), v),
        "no_max_subtraction",
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_refused_with_a_code(name):
    f, code = NEAR_MISSES[name]
    report = aicf_jax.explain(f, Q, K, V)
    assert report.count("attention") == 0
    refusal = next(r for r in report.refusals if r.code == code)
    assert refusal.pattern.startswith("attention") and refusal.expected and refusal.found
    assert any(file in refusal.site for file in ("test_attention.py", "attention/equations.py"))
    assert_close(aicf_jax.fuse(f)(Q, K, V), jax.jit(f)(Q, K, V))


TRANSFORMS = {
    "vmap": lambda f: jax.vmap(f)(Q[None], K[None], V[None]),
    "vmap over keys only": lambda f: jax.vmap(lambda k: f(Q, k, V))(jnp.stack([K, 2 * K])),
    "vmap over values only": lambda f: jax.vmap(lambda v: f(Q, K, v))(jnp.stack([V, 2 * V])),
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda q, k, v: loss(f)(q[None], k[None], v[None])))(Q, K, V),
    "vmap of grad, keys only": lambda f: jax.vmap(jax.grad(lambda k: loss(f)(Q, k, V)))(jnp.stack([K, 2 * K])),
    "jvp": lambda f: jax.jvp(f, (Q, K, V), (K, V, Q)),
    "grad of grad": lambda f: jax.grad(lambda q: jnp.sum(jnp.square(jax.grad(loss(f))(q, K, V))))(Q),
    "jvp of grad": lambda f: jax.jvp(jax.grad(lambda q: loss(f)(q, K, V)), (Q,), (K,)),
    "linearize": lambda f: jax.linearize(f, Q, K, V)[1](K, V, Q),
    "scan": lambda f: jax.lax.scan(lambda c, _: (f(c, K, V), None), Q, None, length=2)[0],
    "grad of scan": lambda f: jax.grad(
        lambda q: jax.lax.scan(lambda c, _: (f(c, K, V), None), q, None, length=2)[0].sum()
    )(Q),
    "remat": lambda f: jax.grad(lambda q: jnp.sum(jnp.square(jax.checkpoint(f)(q, K, V))))(Q),
    "cond": lambda f: jax.lax.cond(Q.sum() > -1e9, f, lambda q, k, v: q, Q, K, V),
}


@pytest.mark.parametrize("name", rest_slow(TRANSFORMS))
def test_transforms(name):
    apply = TRANSFORMS[name]
    fused, expected = jax.jit(lambda: apply(aicf_jax.fuse(causal)))(), jax.jit(lambda: apply(causal))()
    for a, b in zip(jax.tree.leaves(fused), jax.tree.leaves(expected), strict=True):
        scale = max(1.0, float(jnp.max(jnp.abs(b))))
        assert float(jnp.max(jnp.abs(a - b))) <= 512 * float(jnp.finfo(jnp.float32).eps) * scale


@pytest.mark.parametrize("inside", ["scan", "remat", "cond", "vmap", "jit"])
def test_recognized_inside(inside):
    bodies = {
        "scan": lambda q: jax.lax.scan(lambda c, _: (causal(c, K, V), None), q, None, length=2)[0],
        "remat": lambda q: jax.checkpoint(lambda q: causal(q, K, V))(q),
        "cond": lambda q: jax.lax.cond(q.sum() > 0, lambda q: causal(q, K, V), lambda q: q, q),
        "vmap": lambda q: jax.vmap(lambda q: causal(q, K, V))(q[None]),
        "jit": lambda q: jax.jit(lambda q: causal(q, K, V))(q),
    }
    assert aicf_jax.explain(bodies[inside], Q).count("attention") == 1


def test_flax_modules_share_recognition():
    x, key = normal(8, 2, LENGTH, 16), jax.random.key(0)
    module = linen.MultiHeadDotProductAttention(2, dropout_rate=0.2, deterministic=False)
    variables = module.init({"params": key, "dropout": key}, x)
    call = {"mask": linen.make_causal_mask(x[..., 0]), "rngs": {"dropout": jax.random.key(5)}}
    assert aicf_jax.explain(module, variables, x, **call).count("attention") == 1
    assert_close(aicf_jax.fuse(module).apply(variables, x, **call), module.apply(variables, x, **call), 512.0)
    layer = nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0))
    assert aicf_jax.explain(layer, x).count("attention") == 1
    assert_close(aicf_jax.fuse(layer)(x), layer(x), 512.0)


def test_temporaries_do_not_grow_with_the_square():
    def temporaries(length):
        x = jax.ShapeDtypeStruct((1, length, 2, 8), "float32")
        gradient = jax.jit(jax.grad(loss(aicf_jax.fuse(causal)), (0, 1, 2)))
        return gradient.lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(2048) < 2.5 * temporaries(1024)


def test_left_to_xla_where_everything_fits_in_the_cache(monkeypatch):
    from aicf_jax.ops import _programs

    monkeypatch.setattr(_programs, "cache_bytes", lambda op: 1 << 40)
    aicf_jax.clear_caches()
    report = aicf_jax.explain(causal, Q, K, V)
    assert [f.kernel for f in report.fusions if f.op == "attention"] == ["xla"]
    assert any(r.code == "no_gain" for r in report.refusals)


def test_explain(golden):
    x = jax.ShapeDtypeStruct((1, 64, 2, 8), "float32")
    (fusion,) = aicf_jax.explain(causal, x, x, x).fusions
    golden(f"{fusion.backward}\n\n{fusion.program}\n\n{fusion.backward_program}\n")
