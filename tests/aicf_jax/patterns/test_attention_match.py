"""Stage 3 of the attention family: which chains are matches, which are near misses, and why. No legality here."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import aicf_jax
from tests.aicf_jax.attention_support import codes, graph_of, matches, normal
from tests.corpus import attention_spellings as corpus

# Only a proof about axes tells these from attention; that is legality's.
BY_AXES = ("softmax_over_queries", "softmax_over_heads")
NEAR = {"sum_over_wrong_axis": "shift_not_row_max", "sigmoid_weights": "not_softmax"}


def ids(cases):
    return [case[0] for case in cases]


@pytest.mark.parametrize("case", corpus.POSITIVE, ids=ids(corpus.POSITIVE))
def test_every_spelling_of_the_corpus_is_one_match(case):
    name, f, args, _ = case
    ((pattern, chain),) = matches(f, *args)
    assert pattern == ("attention_late" if name == "normalized_after_pv" else "attention")
    assert chain[0] == "gemm" and chain.count("gemm") == 2


@pytest.mark.parametrize("case", corpus.NEGATIVE, ids=ids(corpus.NEGATIVE))
def test_the_near_misses_of_the_corpus(case):
    name, f, args, _ = case
    assert len(matches(f, *args)) == (name in BY_AXES)
    assert codes(f, *args) == ([NEAR[name]] if name in NEAR else [])


Q, K, V = (normal(s, 2, 3, 6, 6) for s in range(3))
M, BIAS, KEY = normal(3, 6, 6) > 0, normal(4, 3, 6, 6), jax.random.key(0)


def attention(q, k, v, scores=lambda s: s, weights=lambda p: p, softmax=jax.nn.softmax):
    p = softmax(scores(jnp.einsum("bhqd,bhkd->bhqk", q, k)))
    return jnp.einsum("bhqk,bhkd->bhqd", weights(p), v)


def dropout(p):
    return jnp.where(jax.random.bernoulli(KEY, 0.9, p.shape), p / 0.9, 0)


def dropout_multiplier(p):
    keep = jax.random.bernoulli(KEY, 0.9, (*p.shape[:2], 1, p.shape[-1]))
    return p * (keep.astype(p.dtype) / jnp.asarray(0.9, p.dtype))


SCORES = {
    "scaled by an array": lambda s: s * normal(5, 3, 1, 1),
    "divided by an array": lambda s: s / (1 + normal(5, 3, 1, 1) ** 2),
    "bias": lambda s: s + BIAS,
    "bias first": lambda s: BIAS + s,
    "bias subtracted": lambda s: s - BIAS,
    "negative distances": lambda s: 1.0 - s,
    "softcap": lambda s: 30.0 * jnp.tanh(s / 30.0),
    "clipped": lambda s: jnp.clip(s, -5.0, 5.0),
    "masked": lambda s: jnp.where(M, s, -1e9),
    "masked, the other way round": lambda s: jnp.where(~M, -jnp.inf, s),
    "masked by a sum": lambda s: s + jnp.where(M, 0.0, -1e9),
    "masked twice": lambda s: jnp.where(M.T, jnp.where(M, s, -1e9), -1e9),
    "multiplied mask": lambda s: s * M,
    "cast": lambda s: s.astype(jnp.bfloat16).astype(jnp.float32),
    "grouped": lambda s: s.reshape(2, 3, 1, 6, 6).squeeze(2),
    "expanded": lambda s: (s[:, None] + BIAS)[:, 0],
    "everything": lambda s: jnp.where(M, 30.0 * jnp.tanh((0.35 * s + BIAS).astype(jnp.float32) / 30.0), -jnp.inf),
}


@pytest.mark.parametrize("name", SCORES)
def test_what_may_stand_before_the_softmax(name):
    assert len(matches(functools.partial(attention, scores=SCORES[name]), Q, K, V)) == 1


WEIGHTS = {
    "cast": lambda p: p.astype(jnp.bfloat16).astype(jnp.float32),
    "dropout": dropout,
    "dropout by a multiplier": dropout_multiplier,
    "scaled": lambda p: 0.5 * p,
    "masked again": lambda p: jnp.where(M, p, 0.0),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_what_may_stand_after_the_softmax(name):
    assert len(matches(functools.partial(attention, weights=WEIGHTS[name]), Q, K, V)) == 1


@pytest.mark.parametrize("form", ["bhkd,bhqk->bhqd", "bhqk,bhkd->bqhd", "bhkd,bhqk->bqhd"])
def test_the_weights_may_be_either_operand(form):
    def f(q, k, v):
        p = jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k))
        return jnp.einsum(form, *((v, p) if form.startswith("bhkd") else (p, v)))

    assert len(matches(f, Q, K, V)) == 1


PRECISIONS = [attention, corpus.basic, corpus.normalized_after_pv, corpus.jax_nn, corpus.flax_linen]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    "form", [attention, corpus.normalized_after_pv, corpus.jax_nn, corpus.flax_linen, corpus.basic]
)
def test_every_precision(form, dtype):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        args = [x.astype(dtype) for x in (corpus.QKV if form in (corpus.flax_linen, corpus.jax_nn) else (Q, K, V))]
        assert len(matches(form, *args)) == 1


def test_library_layers():
    x = normal(6, 2, 5, 8)
    linen = nn.MultiHeadDotProductAttention(2)
    variables = linen.init(jax.random.key(0), x)
    assert len(matches(lambda v, y: linen.apply(v, y, mask=nn.make_causal_mask(y[..., 0])), variables, x)) == 1
    layer = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    definition, state = nnx.split(layer)
    mask = jnp.tril(jnp.ones((5, 5), bool))
    assert len(matches(lambda s, y: nnx.merge(definition, s)(y, mask=mask), state, x)) == 1
    # Without a mask, vmap inside nnx transposes the scores after their maximum was taken.
    assert len(matches(lambda s, y: nnx.merge(definition, s)(y), state, x)) == 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_library_function(causal, kv_heads):
    q, k, v = normal(7, 2, 5, 4, 8), normal(8, 2, 5, kv_heads, 8), normal(9, 2, 5, kv_heads, 8)
    f = functools.partial(jax.nn.dot_product_attention, is_causal=causal)
    assert len(matches(f, q, k, v)) == 1
    assert len(matches(lambda *a: f(*a, bias=normal(10, 4, 5, 5)), q, k, v)) == 1
    assert len(matches(jax.vmap(f, in_axes=1, out_axes=1), *(x[:, None] for x in (q, k, v)))) == 1


def test_two_layers_are_two_matches():
    assert len(matches(lambda q, k, v: attention(attention(q, k, v), k, v), Q, K, V)) == 2


def late(q, k, v, weights=lambda p: p, finish=lambda o: o):
    s = jnp.einsum("bhqd,bhkd->bhqk", q, k) * 0.35
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return finish(jnp.einsum("bhqk,bhkd->bhqd", weights(e), v)) / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("name", WEIGHTS)
def test_late_normalization_too(name):
    ((pattern, chain),) = matches(functools.partial(late, weights=WEIGHTS[name]), Q, K, V)
    assert pattern == "attention_late" and chain[-1] == "normalize"


def returning(f):
    """``f`` with the scores and the weights handed to it as lists to fill."""

    def g(q, k, v):
        kept = []
        return f(q, k, v, kept), kept

    return g


def divided(e):
    return e / e.sum(-1, keepdims=True)


def sum_returned(q, k, v):
    s = q @ k
    e = jnp.exp(s - s.max(-1, keepdims=True))
    total = e.sum(-1, keepdims=True)
    return (e / total) @ v, total


NEAR_MISSES = {
    "weights returned": (
        "weights_returned",
        returning(lambda q, k, v, kept: attention(q, k, v, weights=lambda p: kept.append(p) or p)),
    ),
    "weights returned after dropout": (
        "weights_returned",
        returning(lambda q, k, v, kept: attention(q, k, v, weights=lambda p: kept.append(dropout(p)) or kept[0])),
    ),
    "weights used twice": ("multiple_consumers", lambda q, k, v: (lambda p: p @ v + p @ k)(jax.nn.softmax(q @ k))),
    "scores returned": (
        "scores_reused",
        returning(lambda q, k, v, kept: attention(q, k, v, scores=lambda s: kept.append(s) or s)),
    ),
    "scores used": (
        "scores_reused",
        returning(lambda q, k, v, kept: attention(q, k, v, scores=lambda s: kept.append(jnp.sin(0.5 * s)) or 0.5 * s)),
    ),
    "sum returned": ("softmax_parts_reused", lambda q, k, v: sum_returned(q, k, v)),
    "no maximum": ("no_max_subtraction", functools.partial(attention, softmax=lambda s: divided(jnp.exp(s)))),
    "another shift": (
        "shift_not_row_max",
        functools.partial(attention, softmax=lambda s: divided(jnp.exp(s - s.mean(-1, keepdims=True)))),
    ),
    "sigmoid": ("not_softmax", functools.partial(attention, scores=lambda s: 0.35 * s, softmax=jax.nn.sigmoid)),
    "relu of masked scores": (
        "not_softmax",
        functools.partial(attention, scores=lambda s: jnp.where(M, s, 0), softmax=jax.nn.relu),
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    code, f = NEAR_MISSES[name]
    assert matches(f, Q, K, V) == []
    assert codes(f, Q, K, V) == [code]


def test_a_program_that_is_differentiated_already_is_told_what_to_do():
    gradient = jax.grad(lambda *args: attention(*args).sum(), (0, 1, 2))
    (refusal,) = aicf_jax.explain(gradient, Q, K, V).refusals
    assert refusal.code == "softmax_parts_reused" and "fuse f, then differentiate" in refusal.found


@pytest.mark.parametrize(
    "f",
    [
        lambda q, k, v: jax.nn.softmax(q @ k),  # a classifier
        lambda q, k, v: jax.nn.gelu(q @ k) @ v,  # experts
        lambda q, k, v: jax.nn.log_softmax(q @ k),
        lambda q, k, v: q @ k @ v,
        lambda q, k, v: jax.nn.softmax(q) @ k @ v,  # no score product
    ],
)
def test_what_does_not_resemble_attention_is_not_mentioned(f):
    assert matches(f, Q, K, V) == []
    assert codes(f, Q, K, V) == []


def test_matches_follow_the_chain():
    graph = graph_of(attention, Q, K, V)
    assert [n.op for n in graph.nodes if n.op != "nop"] == ["gemm", "softmax", "gemm"]
    assert np.shape(attention(Q, K, V)) == Q.shape
