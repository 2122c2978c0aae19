"""The Mosaic GPU kernel as a candidate for attention: what it takes, what it must not, and where arrays end up.

The kernel itself is tested in `tests/pallas_kernels`; here its equations in plain jax stand in for it on a CPU, but for
one test in the simulator.
"""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import aicf_jax
from aicf_jax.kernels import mosaic_attention
from aicf_jax.kernels._kernel import Where
from aicf_jax.ops._attention_variant import Variant
from pallas_kernels import _compat, _mosaic, attention
from pallas_kernels.attention import ForwardConfig, reference
from tests.corpus import attention_spellings as corpus

KERNEL = mosaic_attention.KERNEL
H200 = aicf_jax.Policy(target="h200", on_failure="raise")
B, S, H, D = 1, 2048, 4, 64


def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


Q, K = struct(B, S, H, D), struct(B, S, 2, D)
LOWEST = float(jnp.finfo(jnp.float32).min)


def tril(s, t=None, k=0):
    return jnp.tril(jnp.ones((s, t or s), bool), k)


def scores(q, k):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5


def weighted(x, v):
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(x, -1).astype(v.dtype), v)


def masked(mask, fill=-jnp.inf):
    """Attention of float32 scores that are `fill` where a mask of ``(queries, keys)`` says no."""
    return lambda q, k, v: weighted(jnp.where(mask(q.shape[1], k.shape[1]), scores(q, k), fill), v)


def window(s, t):
    i, j = jnp.arange(s)[:, None], jnp.arange(t)
    return (j <= i) & ~(i - j >= 64)


def capped(q, k, v):
    x = 30 * jnp.tanh(scores(q, k) / 30)
    return weighted(jnp.where(tril(q.shape[1]), x, jnp.finfo(x.dtype).min), v)


def added(q, k, v):
    return weighted(scores(q, k) + jnp.where(tril(q.shape[1]), 0.0, -jnp.inf), v)


def heads_first(q, k, v):
    x = jnp.einsum("bhqd,bhkd->bhqk", q, k).astype(jnp.float32) / jnp.sqrt(D)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(x).astype(v.dtype), v)


def powers_of_two(q, k, v):
    x = jnp.einsum("hqd,hkd->hqk", q, k).astype(jnp.float32) * 0.1
    e = jnp.exp2(x - x.max(-1, keepdims=True))
    return jnp.einsum("hqk,hkd->hqd", (e / e.sum(-1, keepdims=True)).astype(v.dtype), v)


def flax_causal(q, k, v):
    return linen.dot_product_attention(q, k, v, mask=linen.make_causal_mask(jnp.ones(q.shape[:2])))


def nnx_causal(q, k, v):
    return nnx.dot_product_attention(q, k, v, mask=nnx.make_causal_mask(jnp.ones(q.shape[:2])))


def jax_causal(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


# Name -> (function, arguments, what `forward` is told, beside the layouts).
CAUSAL = {"lower": None, "upper": 0, "softcap": None}
TAKEN = {
    "jax.nn": (jax_causal, (Q, Q, Q), {**CAUSAL, "scale": 0.125}),
    "jax.nn, shared heads": (jax_causal, (Q, K, K), {**CAUSAL, "scale": 0.125}),
    # Flax divides Q before.
    "flax": (flax_causal, (Q, Q, Q), {**CAUSAL, "scale": 1.0}),
    "nnx": (nnx_causal, (Q, Q, Q), CAUSAL),
    "by hand": (masked(tril), (Q, Q, Q), {**CAUSAL, "scale": 0.125}),
    "float16": (masked(tril), (struct(*Q.shape, dtype="float16"),) * 3, {**CAUSAL, "scale": 0.125}),
    "no mask": (heads_first, (struct(B, H, S, D),) * 3, {**CAUSAL, "upper": None, "scale": 0.125}),
    "to the last key": (masked(lambda s, t: tril(s, t, t - s)), (struct(B, 1024, H, D), Q, Q),
                        {**CAUSAL, "upper": 1024, "scale": 0.125}),
    "window": (masked(window), (Q, Q, Q), {**CAUSAL, "lower": -63, "scale": 0.125}),
    "window behind": (masked(lambda s, t: tril(s, t, 9) & ~tril(s, t, -30)), (Q, Q, Q),
                      {**CAUSAL, "lower": -29, "upper": 9, "scale": 0.125}),
    "forward": (masked(lambda s, t: ~tril(s, t, -1)), (Q, Q, Q),
                {**CAUSAL, "lower": 0, "upper": None, "scale": 0.125}),
    "softcap": (capped, (Q, Q, Q), {**CAUSAL, "softcap": 30.0, "scale": 0.125}),
    "mask added": (added, (Q, Q, Q), {**CAUSAL, "scale": 0.125}),
    "lowest fill": (masked(tril, LOWEST), (Q, Q, Q), {**CAUSAL, "scale": 0.125}),
    "heads of 128": (masked(tril), (struct(B, S, H, 128),) * 3, {**CAUSAL, "scale": 128**-0.5}),
    "heads of 80": (masked(tril), (struct(B, S, H, 80),) * 3, {**CAUSAL, "scale": 80**-0.5}),
    "heads of 256": (masked(tril), (struct(B, S, H, 256),) * 3, {**CAUSAL, "scale": 256**-0.5}),
    "matrices": (lambda q, k, v: jax.nn.softmax(q @ k.T * 0.5) @ v, (struct(S, D),) * 3,
                 {**CAUSAL, "upper": None, "scale": 0.5}),
}  # fmt: skip


def explained(f, *args):
    return aicf_jax.explain(f, *args, policy=H200)


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name):
    f, args, told = TAKEN[name]
    calls = []

    def forward(q, k, v, **options):
        calls.append(options)
        return plain_forward(q, k, v, **options)

    jax.eval_shape(aicf_jax.fuse(f, kernels=[stand_in(forward)], policy=PLAIN), *args)
    (options,) = calls
    assert {n: options[n] for n in CAUSAL} == {n: told[n] for n in CAUSAL}
    assert options["scale"] == pytest.approx(told.get("scale", options["scale"]), rel=1e-6)


@pytest.mark.parametrize("name", ["jax.nn, shared heads", "flax", "by hand", "matrices", "heads of 80"])
def test_taken_on_an_h200_where_it_moves_less(name):
    f, args, _ = TAKEN[name]
    assert [x.kernel for x in explained(f, *args).fusions] == ["mosaic_attention"]


BIAS = struct(B, H, S, S)
MASK = struct(B, 1, 1, S, dtype="bool")
NOT_TAKEN = {
    "traced scale": (lambda q, k, v, s: weighted(scores(q, k) * s, v), (Q, Q, Q, struct(dtype="float32")), "no number"),
    "fill that scores may reach": (masked(tril, -1e9), (Q, Q, Q), "fills with -1e+09"),
    "queries that see nothing": (masked(lambda s, t: tril(s, t, t - s)), (Q, *(struct(B, 1024, H, D),) * 2),
                                 "sees no key"),
    "mask under the softcap": (
        lambda q, k, v: weighted(30 * jnp.tanh(jnp.where(tril(S), scores(q, k), -jnp.inf) / 30), v), (Q, Q, Q),
        "fills with -inf",
    ),
    "bias under the softcap": (
        lambda q, k, v, b: weighted(30 * jnp.tanh((scores(q, k) + b) / 30), v), (Q, Q, Q, BIAS), "under their softcap",
    ),
    "bias that is the same for all keys": (
        lambda q, k, v, b: weighted(scores(q, k) + b, v), (Q, Q, Q, struct(B, H, S, 1)), "same for all keys",
    ),
    "fills that differ": (
        lambda q, k, v, m: weighted(jnp.where(m, jnp.where(tril(S), scores(q, k), LOWEST), -jnp.inf), v),
        (Q, Q, Q, MASK), "different numbers",
    ),
    "masks added to each other": (
        lambda q, k, v, m: weighted(scores(q, k) + jnp.where(m, 0.0, LOWEST) + jnp.where(tril(S), 0.0, LOWEST), v),
        (Q, Q, Q, MASK), "different numbers",
    ),
    "bias added to a fill": (
        lambda q, k, v, b: weighted(jnp.where(tril(S), scores(q, k), LOWEST) + b, v), (Q, Q, Q, BIAS),
        "added to a fill",
    ),
    "scale that is too large": (lambda q, k, v: weighted(scores(q, k) * 1e8, v), (Q, Q, Q), "scale 1.25e+07"),
    "softcap that is too large": (
        lambda q, k, v: weighted(2e6 * jnp.tanh(scores(q, k) / 2e6), v), (Q, Q, Q), "softcap 2e+06",
    ),
    "negative scale": (lambda q, k, v: weighted(-scores(q, k), v), (Q, Q, Q), "not positive"),
    "heads of 72": (masked(tril), (struct(B, S, H, 72),) * 3, "heads of 72"),
    "values of another length": (masked(tril), (Q, Q, struct(B, S, H, 128)), "heads of 64"),
    "float32 result": (
        lambda q, k, v: jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores(q, k)).astype(v.dtype), v,
                                   preferred_element_type=jnp.float32), (Q, Q, Q), "float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_not_taken(name):
    f, args, found = NOT_TAKEN[name]
    report = explained(f, *args)
    assert [x.kernel for x in report.fusions] == ["xla"], name
    (refusal,) = [r for r in report.refusals if r.detail.startswith("kernel mosaic_attention ")]
    assert refusal.code == "capability" and found in refusal.found, refusal


def test_float32_stays_with_xla():
    args = (struct(*Q.shape, dtype="float32"),) * 3
    assert [x.kernel for x in explained(jax_causal, *args).fusions] == ["xla"]


# -- values ----------------------------------------------------------------------------------------------

PLAIN = aicf_jax.Policy(on_failure="raise")


def plain_forward(q, k, v, *, with_statistics, config=None, interpret=None, **equation):
    out, m, total = reference.forward(q, k, v, **equation)
    return (out.astype(q.dtype), m, total) if with_statistics else (out.astype(q.dtype),)


def stand_in(forward=plain_forward):
    """The kernel on a CPU, with this function in place of Mosaic's."""

    def patched(f):
        def run(op, *inputs):
            with mock.patch.object(attention, "forward", forward):
                return f(op, *inputs)

        return run

    # Small cases, where nothing moves less than the equations.
    return dataclasses.replace(
        KERNEL, platforms=("cpu",), targets=None, opaque=False, run=patched(KERNEL.run), save=patched(KERNEL.save),
        cost_bytes=lambda op: 0,
    )  # fmt: skip


def normal(*shapes):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(k, s).astype(jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]


def hidden(mask, fill=-jnp.inf):
    """Attention of scores that are `fill` where an array, as `mask` makes it, says no."""
    return lambda q, k, v, x: weighted(jnp.where(mask(x, q.shape[1], k.shape[1]), scores(q, k), fill), v)


def flax_padded(q, k, v, tokens):
    mask = linen.combine_masks(
        linen.make_causal_mask(tokens), linen.make_attention_mask(tokens > 0, tokens > 0), dtype=q.dtype
    )
    return linen.dot_product_attention(q, k, v, mask=mask)


def flax_segments(q, k, v, tokens):
    return linen.dot_product_attention(q, k, v, mask=linen.make_attention_mask(tokens, tokens, jnp.equal))


def jax_lengths(q, k, v, lengths):
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, is_causal=q.shape[1] > 1)


def jax_bias(q, k, v, bias):
    return jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=True)


def t5(q, k, v, bias, tokens):
    """A bias of positions, and one that hides padding."""
    x = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
    x = x + (bias + jnp.where(tokens > 0, 0.0, LOWEST)[:, None, None])
    return weighted(x, v)


def alibi(q, k, v, slopes):
    i = jnp.arange(q.shape[1])
    x = scores(q, k) + slopes[:, None, None] * (i - i[:, None])
    return weighted(jnp.where(tril(q.shape[1]), x, -jnp.inf), v)


SMALL = (2, 24, 4, 64)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 3, (2, 24)), jnp.int32).at[1, :9].set(0)
LENGTHS = jnp.asarray([24, 7], jnp.int32)
TRUTH = jnp.asarray(np.random.default_rng(1).random((2, 1, 24, 24)) < 0.5).at[:, :, :, 0].set(True)
NUMBERS = jnp.asarray(np.random.default_rng(2).normal(size=(1, 4, 24, 24)), jnp.float32)
# Name -> (function, arrays beside Q, K and V, which of them `forward` is given).
BESIDE = {
    "flax, padding, a query that sees nothing": (flax_padded, [TOKENS], {"segments"}),
    "flax, segments": (flax_segments, [TOKENS], {"segments"}),
    "jax.nn, lengths": (jax_lengths, [LENGTHS], {"segments"}),
    "padding that is numbers": (
        hidden(lambda m, s, t: (m != 0)[:, None, None]),
        [TOKENS.at[:, 0].set(1)],
        {"segments"},
    ),
    "padding of keys, added": (
        lambda q, k, v, m: weighted(scores(q, k) + jnp.where(m > 0, 0.0, LOWEST)[:, None, None], v),
        [TOKENS],
        {"key_bias"},
    ),
    "padding that is a bias": (
        lambda q, k, v, b: weighted(scores(q, k) + b, v),
        [jnp.where(TOKENS > 0, 0.0, LOWEST)[:, None, None]],
        {"key_bias"},
    ),
    "mask of each batch": (hidden(lambda m, s, t: m), [TRUTH], {"mask"}),
    "mask and padding": (hidden(lambda m, s, t: m & m[:, :, :1]), [TRUTH], {"mask", "segments"}),
    "mask of all, not": (hidden(lambda m, s, t: ~m), [~TRUTH[0, 0]], {"mask"}),
    "causal and segments": (
        hidden(lambda x, s, t: tril(s) & (x[:, None, :, None] == x[:, None, None])),
        [TOKENS],
        {"segments"},
    ),
    "prefix": (hidden(lambda x, s, t: tril(s) | (jnp.arange(t) < x[:, None, None, None])), [LENGTHS], {"mask"}),
    "every other key": (
        hidden(lambda x, s, t: jnp.broadcast_to(jnp.arange(t) % x[:, None, None, None] == 0, (2, 1, s, t))),
        [LENGTHS],
        {"segments"},
    ),
    "bias": (jax_bias, [NUMBERS], {"bias"}),
    "bias of all heads": (lambda q, k, v, b: weighted(scores(q, k) - 2 * b, v), [NUMBERS[0, :1]], {"bias"}),
    "bias under the scale": (
        lambda q, k, v, b: weighted((jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) + b) * 0.125, v),
        [NUMBERS],
        {"bias"},
    ),
    "padding as a product": (
        lambda q, k, v, m: weighted(scores(q, k) + -1e9 * (1 - m.astype(jnp.float32))[:, None, None], v),
        [(TOKENS > 0).at[:, 0].set(True)],
        {"key_bias"},
    ),
    "one query, shared heads, bias": (
        lambda q, k, v, b: jax.nn.dot_product_attention(q[:, :1], k[:, :, :2], v[:, :, :2], bias=b),
        [NUMBERS[:, :, :1]],
        {"bias"},
    ),
    "t5": (t5, [NUMBERS, TOKENS.at[:, 0].set(1)], {"bias", "key_bias"}),
    "alibi": (alibi, [jnp.asarray([0.5, 0.25, 0.125, 0.0625])], {"bias"}),
    # A query of padding sees what the sum leaves of the bias beside the fill.
    "mask added beside a bias that is as low": (
        lambda q, k, v, m, b: weighted(scores(q, k) + (jnp.where(m, 0.0, LOWEST) + b), v),
        [TRUTH.at[:, :, 3].set(False), jnp.where(TOKENS > 0, 0.0, LOWEST)[:, None, None]],
        {"bias", "key_bias"},
    ),
}
VALUES = {
    "shared heads": (jax_causal, [SMALL, (2, 24, 2, 64), (2, 24, 2, 64)]),
    "flax": (flax_causal, [SMALL] * 3),
    "heads first": (heads_first, [(2, 4, 24, 64), (2, 4, 40, 64), (2, 4, 40, 64)]),
    "softcap": (capped, [SMALL] * 3),
    "window": (masked(lambda s, t: tril(s) & ~tril(s, t, -5)), [SMALL] * 3),
    "rows first": (
        lambda q, k, v: jnp.einsum("bhqk,kbhd->qbhd", jax.nn.softmax(jnp.einsum("qbhd,kbhd->bhqk", q, k) * 0.125), v),
        [(24, 2, 4, 64), (40, 2, 4, 64), (40, 2, 4, 64)],
    ),
    "keys by columns": (
        lambda q, k, v: jnp.einsum("hqk,hkd->hdq", jax.nn.softmax(jnp.einsum("hqd,hdk->hqk", q, k) * 0.125), v),
        [(3, 24, 64), (3, 64, 40), (3, 40, 64)],
    ),
    "one head": (
        lambda q, k, v: jax.nn.softmax((q @ k.T).astype(jnp.float32) * 0.1).astype(v.dtype) @ v,
        [(24, 64)] * 3,
    ),
    "powers of two": (powers_of_two, [(3, 24, 64), (3, 40, 64), (3, 40, 64)]),
}


QUICK = ("shared heads", "keys by columns", "powers of two")


def agrees(f, args, exact):
    """Fused values and gradients by Q, K, V and biases beside the program's own in float64. Returns the call."""
    forward = mock.Mock(side_effect=plain_forward)
    fused = aicf_jax.fuse(f, kernels=[stand_in(forward)], policy=PLAIN)
    numbers = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]

    def by_numbers(f, args):
        def g(*xs):
            replaced = dict(zip(numbers, xs, strict=True))
            return f(*(replaced.get(i, x) for i, x in enumerate(args)))

        return jax.vjp(g, *(args[i] for i in numbers))

    with jax.enable_x64(True):
        want, pull = by_numbers(f, exact)
        ct = jax.random.normal(jax.random.key(1), want.shape).astype(jnp.bfloat16)
        wanted = (want, *pull(ct.astype(jnp.float64)))
    found, pull = by_numbers(fused, args)
    assert forward.call_args.kwargs["with_statistics"]
    # Weights, scores and results (flax: all in between) are rounded to 8 bits, at most eight times; what is summed has
    # random signs.
    for a, b in zip((found, *pull(ct)), wanted, strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        assert a.shape == b.shape
        assert np.max(np.abs(a - b)) <= 8 * 2.0**-8 * max(1.0, np.max(np.abs(b)))
    return forward.call_args.kwargs


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in VALUES])
def test_values_and_gradients(name):
    f, shapes = VALUES[name]
    args = normal(*shapes)
    with jax.enable_x64(True):
        exact = [x.astype(jnp.float64) for x in args]
    agrees(f, args, exact)


def is_given(x):
    return bool(x) if isinstance(x, list) else x is not None


QUICK_BESIDE = ("flax, padding, a query that sees nothing",)


@pytest.mark.parametrize("name", [n if n in QUICK_BESIDE else pytest.param(n, marks=pytest.mark.slow) for n in BESIDE])
def test_values_and_gradients_with_arrays_beside_the_scores(name):
    f, beside, given = BESIDE[name]
    qkv = normal(*[SMALL] * 3)
    with jax.enable_x64(True):
        exact = [x.astype(jnp.float64) for x in qkv]
        more = [x.astype(jnp.float64) if x.dtype == jnp.float32 else x for x in beside]
    options = agrees(f, [*qkv, *beside], [*exact, *more])
    assert {n for n in ("segments", "mask", "bias", "key_bias") if is_given(options[n])} == given


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("order", ["bshd", "bhsd"])
def test_one_query(kv_heads, order):
    """Whose axis the computation graph leaves out."""
    args = normal((2, 1, 4, 64), (2, 512, kv_heads, 64), (2, 512, kv_heads, 64))

    def f(q, k, v, lengths):
        if order == "bhsd":
            q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        return jax_lengths(q, k, v, lengths)

    args = [x if order == "bshd" else x.swapaxes(1, 2) for x in args]
    with jax.enable_x64(True):
        exact = [x.astype(jnp.float64) for x in args]
    lengths = jnp.asarray([512, 7], jnp.int32)
    options = agrees(f, [*args, lengths], [*exact, lengths])
    assert is_given(options["segments"]) and not is_given(options["mask"])


@pytest.mark.slow
@pytest.mark.parametrize(("f", "beside", "given"), [(jax_bias, NUMBERS, "bias"), (flax_padded, TOKENS, "segments")])
def test_arrays_beside_heads_that_are_shared_and_batches_that_are_mapped(f, beside, given):
    q, k, v = normal((3, *SMALL), (3, 2, 24, 2, 64), (3, 2, 24, 2, 64))

    def mapped(q, k, v, x):
        if f is flax_padded:
            k, v = (jnp.repeat(y, 2, axis=-2) for y in (k, v))
        return jax.vmap(f, (0, 0, 0, None))(q, k, v, x)

    with jax.enable_x64(True):
        exact = [x.astype(jnp.float64) for x in (q, k, v)]
        more = beside.astype(jnp.float64) if given == "bias" else beside
    options = agrees(mapped, [q, k, v, beside], [*exact, more])
    assert is_given(options[given])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flax, padding, a query that sees nothing", "t5"])
def test_arrays_beside_the_scores_in_the_simulator(name):
    """As operations call it, against the stand-in."""
    if not (_compat.simulates_transposes() and _compat.simulates_bounds()):
        pytest.skip("this jax's simulator cannot multiply a transposed ref, nor clip what TMA moves beyond an array")
    real = attention.forward

    def simulated(*args, **options):
        return real(*args, **options, config=ForwardConfig(64, 2), interpret=_mosaic.interpret())

    f, beside, _ = BESIDE[name]
    args = [*normal(*[SMALL] * 3), *beside]
    jaxpr = jax.make_jaxpr(aicf_jax.fuse(f, kernels=[stand_in()], policy=PLAIN))(*args)
    seen = []

    def both(*args, **options):
        found, want = simulated(*args, **options), plain_forward(*args, **options)
        seen.append((found, want))
        return want

    eqns = jaxpr.eqns
    position = next(i for i, e in enumerate(eqns) if e.primitive.name == "fused")
    op = eqns[position].params["op"]
    inputs = jax.core.eval_jaxpr(
        jaxpr.jaxpr.replace(eqns=eqns[:position], outvars=list(eqns[position].invars)), jaxpr.consts, *args
    )
    stand_in(both).save(op, *inputs)
    ((found, want),) = seen
    for got, exact, error in zip(found, want, (2.0**-6, 2.0**-16, 2.0**-16), strict=True):
        got, exact = (np.asarray(x).astype(np.float64) for x in (got, exact))
        assert np.max(np.abs(got - exact)) <= error * np.max(np.abs(exact))
    assert not _mosaic.races_found()


@pytest.mark.slow
def test_in_the_simulator():
    """As operations call it; inside of `fuse` the simulator, which calls back to Python, cannot run."""
    if not (_compat.simulates_transposes() and _compat.simulates_bounds()):
        pytest.skip("this jax's simulator cannot multiply a transposed ref, nor clip what TMA moves beyond an array")
    real = attention.forward

    def simulated(*args, **options):
        return real(*args, **options, config=ForwardConfig(64, 2), interpret=_mosaic.interpret())

    args = normal((1, 40, 2, 64), (1, 72, 2, 64), (1, 72, 2, 64))
    f = masked(lambda s, t: tril(s, t, t - s))
    jaxpr = jax.make_jaxpr(aicf_jax.fuse(f, kernels=[stand_in()], policy=PLAIN))(*args)
    op = next(e for e in jaxpr.eqns if e.primitive.name == "fused").params["op"]
    (found,), (m, total) = stand_in(simulated).save(op, *args)
    # As far as the operation goes: a product whose result the program transposes.
    (want,), (m_want, total_want) = stand_in().save(op, *args)
    pairs = ((found, want, 2.0**-7), (m, m_want, 2.0**-16), (total, total_want, 2.0**-16))
    for got, exact, error in pairs:
        assert got.shape == exact.shape
        got, exact = (np.asarray(x).astype(np.float64) for x in (got, exact))
        assert np.max(np.abs(got - exact)) <= error * np.max(np.abs(exact))
    assert not _mosaic.races_found()


# Products with values in float32, whose result has that type.
WIDE = {"additive_bias"}
LATE = {"normalized_after_pv"}


@pytest.mark.slow
@pytest.mark.parametrize("case", corpus.POSITIVE, ids=[c[0] for c in corpus.POSITIVE])
def test_every_spelling_of_the_corpus_is_read_right_or_left_alone(case):
    name, f, args, _ = case
    args = [x.astype(jnp.bfloat16) for x in args]
    forward = mock.Mock(side_effect=plain_forward)
    # Of any length of heads, which the stand-in does not mind.
    anything = {**KERNEL.capabilities, "variant": Where("any", lambda v: isinstance(v, Variant))}
    kernel = dataclasses.replace(stand_in(forward), capabilities=anything)
    found = np.asarray(aicf_jax.fuse(f, kernels=[kernel], policy=PLAIN)(*args)).astype(np.float64)
    with jax.enable_x64(True):
        want = np.asarray(f(*(x.astype(jnp.float64) for x in args))).astype(np.float64)
    assert forward.called == (name not in WIDE | LATE)
    assert np.max(np.abs(found - want)) <= 8 * 2.0**-8 * np.max(np.abs(want))
