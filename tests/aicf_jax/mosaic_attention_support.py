"""Spellings of attention, what lies beside their scores, and the equations that stand in for the Mosaic GPU kernels."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

import aicf_jax
from aicf_jax.kernels import mosaic_attention, mosaic_attention_grad
from pallas_kernels import attention
from pallas_kernels.attention import reference

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
    # Flax divides Q before, which is part of the operation.
    "flax": (flax_causal, (Q, Q, Q), {**CAUSAL, "scale": 0.125}),
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

    kernel = mosaic_attention.KERNEL
    # Small cases, where nothing moves less than the equations.
    return dataclasses.replace(
        kernel, platforms=("cpu",), targets=None, opaque=False, run=patched(kernel.run), save=patched(kernel.save),
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


def is_given(x):
    return bool(x) if isinstance(x, list) else x is not None


def plain_backward(q, k, v, out, m, l, dout, *, wanted=(), **equation):
    """From the statistics it is given, in float32."""
    layouts = equation.pop("layouts")
    given = {name: equation.pop(name, None) for name in ("bias", "key_bias")}
    factor, fill = equation.pop("bias_factor", 1.0), equation.pop("fill", -jnp.inf)
    dropped = reference.kept(equation["keep"]) * equation["keep_factor"] if "keep" in equation else 1.0
    q32, k32, v32, out, dout = (
        x.astype(jnp.float32) if layout == "bhsd" else x.astype(jnp.float32).swapaxes(1, 2)
        for x, layout in zip((q, k, v, out, dout), (*layouts, layouts[3]), strict=True)
    )
    group = q32.shape[1] // k32.shape[1]
    hides = (equation[name] for name in ("lower", "upper", "segments", "mask") if name in equation)
    visible = reference.visible(q32.shape[2], k32.shape[2], *hides)

    def scores(q32, k32, bias, key_bias):
        x = jnp.einsum("bhsd,bhtd->bhst", q32, jnp.repeat(k32, group, 1)) * equation["scale"]
        if equation["softcap"] is not None:
            x = equation["softcap"] * jnp.tanh(x / equation["softcap"])
        x = x if bias is None else x + factor * bias.astype(jnp.float32)
        x = x if key_bias is None else x + key_bias[:, :, None]
        return jnp.where(visible, x, fill)

    x, pull = jax.vjp(scores, q32, k32, given["bias"], given["key_bias"])
    p = jnp.exp(x - m[..., None]) / l[..., None]
    delta = jnp.sum(out * dout, -1, keepdims=True)
    dp, pull_v = jax.vjp(lambda v32: jnp.einsum("bhsd,bhtd->bhst", dout, jnp.repeat(v32, group, 1)), v32)
    dq, dk, *biases = pull(p * (dp * dropped - delta))
    found = tuple(
        (x if layout == "bhsd" else x.swapaxes(1, 2)).astype(q.dtype)
        for x, layout in zip((dq, dk, *pull_v(p * dropped)), layouts, strict=False)
    )
    by_name = dict(zip(given, biases, strict=True))
    return *found, *(by_name[name] for name in wanted)


def gradient_stand_in(backward=plain_backward):
    kernel = mosaic_attention_grad.KERNEL

    def run(op, *inputs):
        with mock.patch.object(attention, "backward", backward):
            return kernel.run(op, *inputs)

    return dataclasses.replace(kernel, platforms=("cpu",), targets=None, opaque=False, run=run, cost_bytes=lambda op: 0)
