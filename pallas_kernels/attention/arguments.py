"""The arguments that forward and backward take, whatever they run as, checked."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_kernels._arguments import expect
from pallas_kernels.attention import dropout
from pallas_kernels.attention.sides import Arrays

LAYOUTS = ("bshd", "bhsd")

#: What a scale and a softcap are less than.
HIGHEST_NUMBER = 1e6

#: What hidden scores may be at most, of those that are no infinity.
HIGHEST_FILL = -1e4

_BIAS_DTYPES = ("bfloat16", "float16", "float32")

_NUMBERS = f"numbers of type {', '.join(_BIAS_DTYPES)}"
_TYPES = {"segments": "integers of at most 32 bits", "bias": _NUMBERS, "key_bias": _NUMBERS}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of Q, ``[batch, queries, heads, head_dim]`` in whatever order, and of K and V."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int

    @property
    def group(self) -> int:
        """Heads of Q for each head of K and V."""
        return self.heads // self.kv_heads

    def of_result(self, layout: str) -> tuple[int, ...]:
        """The shape of O, and of Q."""
        return tuple({"b": self.batch, "h": self.heads, "s": self.queries, "d": self.head_dim}[d] for d in layout)


def sizes(
    function: str, q: Any, k: Any, v: Any, layouts: tuple[str, ...], is_depth: Callable[[int], bool], depths: str
) -> Sizes:
    """The sizes of three arrays that belong together, with heads whose length `is_depth`, of which `depths` tells.

    Raises ValueError naming the argument of `function` that does not.
    """
    check = functools.partial(expect, function)
    check("layouts", len(layouts) == 4 and set(layouts) <= set(LAYOUTS), f"four of {', '.join(LAYOUTS)}", layouts)
    check("q", str(q.dtype) in ("bfloat16", "float16"), "bfloat16 or float16", str(q.dtype))
    found = {}
    for name, x, layout in zip("qkv", (q, k, v), layouts, strict=False):
        check(name, x.dtype == q.dtype, f"q's dtype {q.dtype}", str(x.dtype))
        check(name, x.ndim == 4 and 0 not in x.shape, "four dimensions, none of them empty", x.shape)
        found[name] = dict(zip(layout, x.shape, strict=True))
    of_q, of_k = found["q"], found["k"]
    check("q", is_depth(of_q["d"]), depths, q.shape)
    check("k", all(of_k[d] == of_q[d] for d in "bd"), "the batch and the head length of q", k.shape)
    check("k", of_q["h"] % of_k["h"] == 0, f"a number of heads that divides {of_q['h']}", k.shape)
    check("v", found["v"] == of_k, f"the sizes of k, {of_k}", v.shape)
    return Sizes(of_q["b"], of_q["h"], of_k["h"], of_q["s"], of_k["s"], of_q["d"])


def check_scores(
    function: str, of: Sizes, *, scale: float, lower: int | None, upper: int | None, softcap: float | None
) -> None:
    """Raises ValueError unless these make scores of which each query has some."""
    check = functools.partial(expect, function)
    check("scale", 0 < scale < HIGHEST_NUMBER, "a positive number", scale)
    check("softcap", softcap is None or 0 < softcap < HIGHEST_NUMBER, "None or a positive number", softcap)
    check("lower", lower is None or of.queries - 1 + lower < of.keys, "a key for each query", lower)
    check("upper", upper is None or upper >= 0, "a key for each query", upper)
    check("upper", lower is None or upper is None or lower <= upper, f"at least the lower limit {lower}", upper)


def check_sides(function: str, of: Sizes, arrays: Arrays, factor: float, fill: float, keep_factor: float) -> None:
    """Raises ValueError unless these arrays beside the scores have their types and sizes."""
    expect_here = functools.partial(expect, function)

    def check(name: str, x: Any, is_type: bool, *lengths: int) -> None:
        allowed = [(1, of.batch), (1, of.heads), *((n,) for n in lengths)]
        ok = len(x.shape) == len(allowed) and all(n in a for n, a in zip(x.shape, allowed, strict=True))
        expected = f"for {' and '.join(map(str, lengths))}, of batches and heads that fit"
        expect_here(name, ok and is_type, f"{_TYPES.get(name, 'truth values')} {expected}", (x.shape, str(x.dtype)))

    for pair in arrays.segments:
        expect_here("segments", len(pair) == 2 and pair[1] is not None, "pairs with ids of keys", pair)
        for x, length in zip(pair, (of.queries, of.keys), strict=True):
            if x is not None:
                is_ids = jnp.issubdtype(x.dtype, jnp.signedinteger) and x.dtype.itemsize <= 4
                check("segments", x, is_ids, length)
    for name, x in (("mask", arrays.mask), ("keep", arrays.keep)):
        if x is not None:
            check(name, x, x.dtype == jnp.bool_, of.queries, of.keys)
    if arrays.bias is not None:
        check("bias", arrays.bias, str(arrays.bias.dtype) in _BIAS_DTYPES, of.queries, of.keys)
    if arrays.key_bias is not None:
        check("key_bias", arrays.key_bias, str(arrays.key_bias.dtype) in _BIAS_DTYPES, of.keys)
    expect_here("bias_factor", math.isfinite(factor) and factor != 0, "a number other than 0", factor)
    dropout.check(function, arrays.keep, keep_factor)
    expect_here("fill", fill <= HIGHEST_FILL, "-inf, or a number so low that its exponential is 0 beside others", fill)


def check_results(function: str, of: Sizes, layout: str, q: Any, out: Any, dout: Any, m: Any, l: Any) -> None:
    """Raises ValueError unless these are what the forward returned, and a cotangent of it."""
    shape, rows = of.of_result(layout), (of.batch, of.heads, of.queries)
    for name, x in (("out", out), ("dout", dout)):
        expect(function, name, x.shape == shape and x.dtype == q.dtype, f"{q.dtype} {shape}", (x.shape, str(x.dtype)))
    for name, x in (("m", m), ("l", l)):
        ok = x.shape == rows and x.dtype == jnp.float32
        expect(function, name, ok, f"float32 {rows}", (x.shape, str(x.dtype)))
