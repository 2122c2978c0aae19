"""Functions to derive programs from, and how close a derived program must come to them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mcir.attention import Problem
from mcir.derive import Derived, derive_bound
from mcir.ir import Stream

I, J, D, E = 13, 11, 4, 3


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of arrays of these shapes."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...] | str, ...]
    results: tuple[str, ...] = ()

    def avals(self, dtype: str = "float32") -> list[Any]:
        return [
            jax.eval_shape(functools.partial(jax.random.key, 0)) if s == "key" else jax.ShapeDtypeStruct(s, dtype)
            for s in self.shapes
        ]

    def arrays(self, dtype: str = "float32", seed: int = 0) -> list[Any]:
        """Normal numbers; last bits are those of `dtype`."""
        rng = np.random.default_rng(seed)
        return [jax.random.key(7) if s == "key" else jnp.asarray(rng.standard_normal(s), dtype) for s in self.shapes]

    def derived(self, dtype: str = "float32") -> Derived:
        return derive_bound(self.function, *self.avals(dtype), results=self.results)


def scores(q, k):
    return jnp.einsum("hid,hjd->hij", q, k)


def logsumexp(x):
    return jax.nn.logsumexp(x, axis=-1)


def vocabulary_loss(h, w, bias):
    """Log-sum-exp of logits that a product makes."""
    return jax.nn.logsumexp(h @ w + bias, axis=-1)


def softmax_average(x, values):
    """A softmax-weighted sum without a product of matrices."""
    return jnp.sum(jax.nn.softmax(x, axis=-1) * values, axis=-1)


def layer_norm(x, scale, bias):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.var(x, axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-3) * scale + bias


def moments(x):
    return jnp.mean(x, axis=-1), jnp.var(x, axis=-1)


def normalized_late(q, k, v):
    x = scores(q, k)
    p = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    return jnp.einsum("hij,hje->hie", p, v) / jnp.sum(p, axis=-1)[..., None]


def base_two(q, k, v):
    x = scores(q, k) * math.log2(math.e)
    p = jnp.exp2(x - jnp.max(x, axis=-1, keepdims=True))
    return jnp.einsum("hij,hje->hie", p / jnp.sum(p, axis=-1, keepdims=True), v)


def where_argument(q, k, v):
    x = scores(q, k)
    seen = jnp.arange(x.shape[-1]) <= jnp.arange(x.shape[-2])[:, None]
    return jnp.einsum("hij,hje->hie", jax.nn.softmax(x, axis=-1, where=seen), v)


def dropout(q, k, v, key):
    p = jax.nn.softmax(scores(q, k), axis=-1)
    kept = jax.random.bernoulli(key, 0.75, p.shape)
    return jnp.einsum("hij,hje->hie", jnp.where(kept, p / 0.75, 0), v)


def layer_norm_of_product(h, w):
    """The second pass over the features computes the product again."""
    x = h @ w
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-3)


def column_softmax(x, w):
    """The softmax is used along the axis that it is over: one pass is not enough."""
    return jax.nn.softmax(x, axis=0) * w


def two_results(q, k, v):
    x = scores(q, k)
    return jnp.max(x, axis=-1), jnp.einsum("hij,hje->hie", jax.nn.softmax(x, axis=-1), v)


def _attention(save=False, backward=False, **options):
    p = Problem(heads=options.pop("heads", 2), q_len=I, kv_len=J, head_dim=D, value_dim=E, **options)
    names = ("q", "k", "v", "out", "m", "l", "dout") if backward else ("q", "k", "v")
    results = ("dq", "dk", "dv") if backward else ("out", "m", "l") if save else ("out",)
    function = p.backward() if backward else p.forward(save)
    return Case(function, tuple(a.shape for a in p.avals(*names)), results)


_QKV = ((2, I, D), (2, J, D), (2, J, E))

CASES = {
    "attention": _attention(),
    "causal": _attention(causal=True),
    "causal, bottom right": _attention(causal=True, align="bottom_right", fill=-1e30),
    "window": _attention(window=(3, 2), save=True, fill=-1e30),
    "grouped": _attention(batch=2, heads=4, kv_heads=2, causal=True),
    "backward": _attention(backward=True),
    "backward, causal": _attention(backward=True, causal=True, fill=-1e30),
    "backward, grouped": _attention(backward=True, heads=4, kv_heads=2),
    "logsumexp": Case(logsumexp, ((5, 29),), ("lse",)),
    "logsumexp of a product": Case(vocabulary_loss, ((5, D), (D, 29), (29,)), ("lse",)),
    "weighted sum": Case(softmax_average, ((5, 29), (5, 29))),
    "moments": Case(moments, ((5, 29),), ("mean", "var")),
    "layer norm": Case(layer_norm, ((5, 29), (29,), (29,))),
    "layer norm of a product": Case(layer_norm_of_product, ((5, D), (D, 29))),
    "normalized late": Case(normalized_late, _QKV),
    "exp2": Case(base_two, _QKV),
    "where": Case(where_argument, _QKV),
    "dropout": Case(dropout, (*_QKV, "key")),
    "softmax": Case(column_softmax, ((29, 5), (5,))),
    "two results": Case(two_results, _QKV),
}

#: Unit roundoff, half the distance from 1 to the next number.
ROUNDOFF = {d: float(jnp.finfo(d).eps) / 2 for d in ("float64", "float32", "bfloat16", "float16")}
#: The longest sum is over 29 elements; each adds its own rounding, as do about eight operations on it. Scores are
#: of magnitude up to 8, which exp turns from absolute into relative error.
WORST = 29 * 8


def blocked(derived: Derived, block: int) -> Derived:
    """With blocks of this size along the axes that are cut anywhere."""
    program = derived.program
    looped = {a for loops, s in program.statements() for a in (*loops, *([s.axis] if isinstance(s, Stream) else []))}
    program = program.with_blocks(**dict.fromkeys(looped, block)).verify()
    return Derived(program, derived.arguments, derived.results, derived.graph)


def close(found, expected, room, name=""):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    scale = max(1.0, float(np.max(np.abs(expected[np.isfinite(expected)]), initial=0)))
    np.testing.assert_allclose(found, expected, rtol=room, atol=room * scale, err_msg=name)
