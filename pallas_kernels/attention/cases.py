"""Shapes and variants of the attention kernel: for the simulator, compiled, and for a GPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.config import ForwardConfig
from pallas_kernels.attention.device import SelfAttention, forward_case, gradient_case
from pallas_kernels.attention.device_sides import Beside, beside_case, beside_gradient_case
from pallas_kernels.attention.dropout import Bernoulli


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `forward`. `config`: None for the default.

    Arrays beside the scores: `padding` hides the last keys of each batch, and all of them from no query; `segments`: of
    random ids; `mask` and `bias`: their dimensions, ``"1"`` where they share one; `keep`
    likewise, `drawn` in the kernel or not. `blind`: there is a query that sees
    nothing.
    """

    batch: int
    queries: int
    keys: int
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    dtype: str = "bfloat16"
    scale: float = 0.125
    lower: int | None = None
    upper: int | None = None
    softcap: float | None = None
    layouts: tuple[str, ...] = ("bshd",) * 4
    with_statistics: bool = True
    config: ForwardConfig | None = None
    padding: bool = False
    segments: bool = False
    blind: bool = False
    mask: str = ""
    bias: str = ""
    bias_dtype: str = "float32"
    bias_factor: float = 1.0
    key_bias: bool = False
    fill: float = -math.inf
    keep: str = ""
    keep_probability: float = 0.9
    drawn: bool = False

    def arrays(self, key: jax.Array) -> tuple[Any, ...]:
        """Random ``(q, k, v)``."""
        found = []
        shapes = ((self.queries, self.heads), (self.keys, self.kv_heads), (self.keys, self.kv_heads))
        for random, (length, heads), layout in zip(jax.random.split(key, 3), shapes, self.layouts, strict=False):
            sizes = {"b": self.batch, "s": length, "h": heads, "d": self.head_dim}
            x = jax.random.normal(random, tuple(sizes[d] for d in layout))
            found.append(x.astype(self.dtype))
        return tuple(found)

    def beside(self, key: jax.Array) -> dict[str, Any]:
        """Random arrays beside the scores, as `forward` takes them."""
        b, s, t = self.batch, self.queries, self.keys
        keys = jax.random.split(key, 6)
        pairs: list[Any] = []
        if self.padding:
            kept = jax.random.randint(keys[0], (b, 1, 1), t // 2, t)
            pairs.append((None, (jnp.arange(t) >= kept).astype(jnp.int32)))
        if self.segments:
            of_query, of_key = (jax.random.randint(k, (b, 1, n), 0, 3) for k, n in ((keys[1], s), (keys[2], t)))
            pairs.append((of_query.at[:, :, s // 2].set(9) if self.blind else of_query, of_key))
        sizes = {"b": b, "h": self.heads, "s": s, "t": t, "1": 1}
        mask = jax.random.bernoulli(keys[3], 0.7, [sizes[d] for d in self.mask]) if self.mask else None
        bias = jax.random.normal(keys[4], [sizes[d] for d in self.bias]).astype(self.bias_dtype) if self.bias else None
        key_bias = jax.random.normal(keys[4], (b, 1, t)) if self.key_bias else None
        keep = None
        if self.keep:
            keep = Bernoulli(keys[5], self.keep_probability, tuple(sizes[d] for d in self.keep))
            keep = keep if self.drawn else jax.random.bernoulli(keys[5], self.keep_probability, keep.shape)
        return {"segments": pairs, "mask": mask, "bias": bias, "key_bias": key_bias, "keep": keep}

    def equation(self) -> dict[str, Any]:
        """The keyword arguments that say what is computed."""
        names = ("scale", "lower", "upper", "softcap", "layouts", "bias_factor", "fill")
        factor = 1 / self.keep_probability if self.keep else 1.0
        return {**{name: getattr(self, name) for name in names}, "keep_factor": factor}

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the call."""
        return {**self.equation(), "with_statistics": self.with_statistics, "config": self.config}


_SMALL = ForwardConfig(64, 2)
_HEADS_FIRST = ("bhsd",) * 4
_ONE = ForwardConfig(64, 2, ping_pong=False, warpgroups=1)

#: What programs in float32 fill with.
_LOWEST = float(jnp.finfo(jnp.float32).min)

#: In the simulator, on every run: the fewest that show each part.
QUICK: Mapping[str, Case] = {
    "ragged, causal to the last key, shared heads": Case(1, 136, 200, 2, 1, upper=64, config=_SMALL),
    "window, softcap, float16": Case(
        1, 128, 200, dtype="float16", lower=-20, upper=40, softcap=2.0, layouts=_HEADS_FIRST, config=_SMALL
    ),
    "causal, padding, segments, a query that sees nothing, low fill": Case(
        1, 72, 200, upper=0, padding=True, segments=True, blind=True, fill=_LOWEST, config=_SMALL
    ),
    "dropout drawn in the kernel, causal, shared heads, ragged": Case(
        1, 72, 100, 2, 1, upper=28, keep="bhst", drawn=True, config=_SMALL
    ),
    "bias and mask by tiles, heads of 80": Case(
        1, 40, 136, 2, head_dim=80, mask="11st", bias="1hst", upper=110, config=_ONE
    ),
}

#: In the simulator, the rest.
SLOW: Mapping[str, Case] = {
    "keys in two parts, shared heads, padding": Case(
        1, 1, 200, 4, 2, padding=True, config=dataclasses.replace(_ONE, splits=2)
    ),
    "dropout drawn, causal, shared heads, batches": Case(
        2, 72, 200, 2, 1, upper=128, keep="bhst", drawn=True, config=_SMALL
    ),
    "dropout from an array": Case(2, 136, 200, 2, keep="bhst", config=_SMALL),
    "dropout from an array that all share, odd lengths": Case(2, 75, 101, 4, 2, upper=30, keep="11st", config=_SMALL),
    "dropout from an array, mask, bias, low fill": Case(
        2, 72, 136, 2, mask="b1st", bias="1hst", fill=_LOWEST, keep="1hst", layouts=_HEADS_FIRST, config=_SMALL
    ),
    "dropout drawn, that all share, half of it": Case(
        2, 130, 77, 2, keep="11st", drawn=True, keep_probability=0.5, config=_SMALL
    ),
    "dropout drawn for each batch, padding, heads of 128": Case(
        2, 64, 200, 2, 1, 128, padding=True, keep="b1st", drawn=True
    ),
    "dropout drawn, almost none": Case(
        1, 72, 72, 2, upper=0, keep="1hst", drawn=True, keep_probability=1 - 2.0**-23, config=_SMALL
    ),
    "dropout drawn, float16, window, softcap": Case(
        1, 200, 200, 2, dtype="float16", lower=-50, upper=20, softcap=2.0, keep="bhst", drawn=True, config=_SMALL
    ),
    "one query, dropout drawn, in parts": Case(
        2, 1, 300, 4, 2, keep="bhst", drawn=True, config=dataclasses.replace(_ONE, splits=2)
    ),
    "one query, dropout from an array": Case(2, 1, 300, 4, 2, keep="bhst", config=_ONE),
    "whole blocks": Case(1, 128, 128, config=_SMALL),
    "many blocks, one stage": Case(1, 128, 384, config=ForwardConfig(64, 1)),
    "many blocks, three stages": Case(1, 128, 448, config=ForwardConfig(64, 3)),
    "no turns": Case(1, 128, 256, upper=0, config=ForwardConfig(64, 2, ping_pong=False)),
    "causal, several CTAs": Case(1, 300, 300, upper=0, config=_SMALL),
    "causal to the first key": Case(1, 200, 136, upper=0, config=_SMALL),
    "lengths that are padded": Case(2, 101, 77, config=_SMALL),
    "one query": Case(1, 1, 130, config=_SMALL),
    "one key": Case(1, 70, 1, config=_SMALL),
    "several heads and batches": Case(2, 64, 64, 4, 2, config=_SMALL),
    "mixed layouts": Case(2, 72, 136, 4, 2, layouts=("bshd", "bhsd", "bshd", "bhsd"), config=_SMALL),
    "window without causal": Case(1, 200, 200, lower=-30, upper=30, config=_SMALL),
    "lower limit alone": Case(1, 200, 264, lower=50, config=_SMALL),
    "narrow window": Case(1, 300, 300, lower=0, upper=0, config=_SMALL),
    "window far from the diagonal": Case(1, 130, 300, lower=100, upper=180, config=_SMALL),
    "softcap": Case(1, 64, 128, softcap=30.0, scale=2.0, config=_SMALL),
    "heads of 128": Case(1, 128, 200, head_dim=128, upper=72),
    "heads of 256": Case(1, 64, 100, head_dim=256),
    "heads of 32": Case(1, 64, 100, head_dim=32, config=_SMALL),
    "heads of 80": Case(1, 100, 136, 2, head_dim=80, upper=36, config=_SMALL),
    "heads of 96": Case(1, 64, 100, head_dim=96, config=_SMALL),
    "one warpgroup": Case(1, 100, 200, 2, upper=100, config=_ONE),
    "no statistics": Case(1, 64, 64, with_statistics=False, config=_SMALL),
    "large scores": Case(1, 64, 128, scale=100.0, config=_SMALL),
    "padding": Case(2, 72, 136, 2, padding=True, config=_SMALL),
    "segments, causal": Case(2, 136, 136, upper=0, segments=True, config=_SMALL),
    "segments, a query that sees nothing": Case(1, 72, 136, segments=True, blind=True, config=_SMALL),
    "segments, window, low fill": Case(
        1, 300, 300, lower=-60, upper=30, segments=True, blind=True, fill=_LOWEST, config=_SMALL
    ),
    "segments, low fill, no limits": Case(1, 72, 200, segments=True, blind=True, fill=_LOWEST, config=_SMALL),
    "segments in layouts by heads, shared heads": Case(
        2, 72, 136, 4, 2, segments=True, layouts=_HEADS_FIRST, config=_SMALL
    ),
    "mask of each batch": Case(2, 72, 136, 2, mask="b1st", config=_SMALL),
    "mask of each head, odd lengths, low fill": Case(1, 75, 101, 2, mask="1hst", fill=_LOWEST, config=_SMALL),
    "mask, softcap, whole atoms": Case(1, 128, 256, mask="bhst", softcap=2.0, config=ForwardConfig()),
    "bias of all": Case(2, 72, 136, 2, bias="11st", config=_SMALL),
    "bias of each head and batch, odd lengths": Case(2, 75, 101, 2, bias="bhst", config=_SMALL),
    "bias of keys": Case(2, 72, 200, key_bias=True, config=_SMALL),
    "narrow bias, factor, softcap": Case(
        1, 72, 128, 2, bias="1hst", bias_dtype="bfloat16", bias_factor=3.0, softcap=2.0, config=_SMALL
    ),
    "biases, window, segments, low fill": Case(
        1,
        200,
        200,
        2,
        lower=-50,
        upper=0,
        bias="1hst",
        key_bias=True,
        segments=True,
        blind=True,
        fill=_LOWEST,
        config=_SMALL,
    ),
    "few queries in three parts, causal": Case(1, 5, 300, 2, upper=295, config=dataclasses.replace(_ONE, splits=3)),
    "more parts than keys seen": Case(1, 8, 300, upper=60, config=dataclasses.replace(_ONE, splits=5)),
    "parts, segments, a query that sees nothing, low fill": Case(
        1, 8, 200, upper=100, segments=True, blind=True, fill=_LOWEST, config=dataclasses.replace(_ONE, splits=2)
    ),
    "parts, bias of keys, no statistics": Case(
        2, 1, 200, 4, 2, key_bias=True, with_statistics=False, config=dataclasses.replace(_ONE, splits=3)
    ),
    "one query, one head of keys each": Case(2, 1, 200, 2, 2, bias="1hst", config=dataclasses.replace(_ONE, splits=2)),
}

_CAUSAL = Case(4, 2048, 2048, 16, 16, upper=0)

#: Compiled for a described GPU with default configurations.
COMPILED: Mapping[str, Case] = {
    "full, ragged, mask, low fill, D 64": Case(2, 1000, 1000, 16, 16, mask="b1st", fill=_LOWEST),
    "causal, D 64": _CAUSAL,
    "causal, D 128": dataclasses.replace(_CAUSAL, head_dim=128),
    "full, D 64": dataclasses.replace(_CAUSAL, upper=None),
    "full, D 128": dataclasses.replace(_CAUSAL, upper=None, head_dim=128),
    "inference": dataclasses.replace(_CAUSAL, with_statistics=False, dtype="float16"),
    "heads first": dataclasses.replace(_CAUSAL, layouts=_HEADS_FIRST),
    "shared heads, window, D 64": dataclasses.replace(_CAUSAL, kv_heads=4, lower=-255),
    "shared heads, window, softcap, ragged, D 128": Case(2, 1000, 1000, 16, 4, 128, lower=-255, upper=0, softcap=50.0),
    "full, ragged, D 64": Case(2, 1000, 1000, 16, 16),
    "to the last key, D 128": Case(1, 512, 4096, 16, 16, 128, upper=3584),
    "causal, D 256": dataclasses.replace(_CAUSAL, head_dim=256),
    "causal, D 32": dataclasses.replace(_CAUSAL, head_dim=32),
    "full, D 80": dataclasses.replace(_CAUSAL, head_dim=80, upper=None),
    "causal, D 96": dataclasses.replace(_CAUSAL, head_dim=96),
    "full, D 192": dataclasses.replace(_CAUSAL, head_dim=192, upper=None),
    "causal, padding, low fill, D 64": dataclasses.replace(_CAUSAL, padding=True, fill=_LOWEST),
    "causal, padding, low fill, D 128": dataclasses.replace(_CAUSAL, padding=True, fill=_LOWEST, head_dim=128),
    "causal, segments, D 128": dataclasses.replace(_CAUSAL, segments=True, head_dim=128),
    "segments, padding, D 64": dataclasses.replace(_CAUSAL, segments=True, padding=True, upper=None),
    "mask, D 64": dataclasses.replace(_CAUSAL, mask="b1st", upper=None),
    "mask, D 128": dataclasses.replace(_CAUSAL, mask="b1st", upper=None, head_dim=128),
    "bias, D 64": dataclasses.replace(_CAUSAL, bias="1hst", upper=None),
    "bias, padding, low fill, causal, D 128": dataclasses.replace(
        _CAUSAL, bias="1hst", padding=True, fill=_LOWEST, head_dim=128
    ),
    "narrow bias and mask, D 128": dataclasses.replace(
        _CAUSAL, bias="1hst", bias_dtype="bfloat16", mask="b1st", upper=None, head_dim=128
    ),
    "bias of keys, D 64": dataclasses.replace(_CAUSAL, key_bias=True, upper=None),
    "dropout drawn, D 64": dataclasses.replace(_CAUSAL, keep="bhst", drawn=True),
    "dropout drawn, padding, D 128": dataclasses.replace(_CAUSAL, keep="bhst", drawn=True, padding=True, head_dim=128),
    "dropout from an array, D 64": dataclasses.replace(_CAUSAL, keep="11st"),
    "dropout from an array, mask, D 128": dataclasses.replace(_CAUSAL, keep="bhst", mask="b1st", head_dim=128),
}

#: Of few queries, likewise: a kernel, and what merges its parts.
DECODE: Mapping[str, Case] = {
    "one query, shared heads, D 128": Case(4, 1, 8192, 32, 8, 128, padding=True),
    "one query, D 64": Case(1, 1, 8192, 16, 16, 64),
    "few queries, causal, D 128": Case(1, 8, 8192, 16, 4, 128, upper=8184),
}

#: Checked and timed on a GPU.
DEVICE = (
    forward_case(SelfAttention(4, 2048, 16, 64, causal=True)),
    forward_case(SelfAttention(4, 2048, 16, 64)),
    forward_case(SelfAttention(4, 2048, 16, 128, causal=True)),
    forward_case(SelfAttention(4, 2048, 16, 128)),
    forward_case(SelfAttention(2, 4096, 16, 128, causal=True, dtype="float16")),
    forward_case(SelfAttention(2, 4096, 16, 128, causal=True, kv_heads=4)),
    forward_case(SelfAttention(2, 4096, 16, 64, causal=True, window=512)),
    forward_case(SelfAttention(4, 1000, 16, 64, causal=True)),
    forward_case(SelfAttention(2, 2048, 16, 256, causal=True)),
    forward_case(SelfAttention(4, 2048, 16, 80)),
    forward_case(SelfAttention(4, 2048, 16, 96, causal=True)),
    forward_case(SelfAttention(2, 4096, 16, 128, causal=True, kv_heads=4, window=1024, softcap=50.0)),
    beside_case(Beside(4, 2048, 2048, 16, 128, ("padding",), causal=True)),
    beside_case(Beside(4, 2048, 2048, 16, 64, ("segments",), causal=True)),
    beside_case(Beside(4, 2048, 2048, 16, 64, ("mask",))),
    beside_case(Beside(4, 2048, 2048, 16, 64, ("bias",))),
    beside_case(Beside(4, 2048, 2048, 16, 128, ("padding", "bias"))),
    beside_case(Beside(8, 1, 16384, 32, 128, ("padding",), kv_heads=8)),
    beside_case(Beside(1, 8, 16384, 32, 128, (), kv_heads=8, causal=True)),
    gradient_case(SelfAttention(4, 2048, 16, 64, causal=True)),
    gradient_case(SelfAttention(4, 2048, 16, 64)),
    gradient_case(SelfAttention(4, 2048, 16, 128, causal=True)),
    gradient_case(SelfAttention(4, 2048, 16, 128)),
    gradient_case(SelfAttention(2, 4096, 16, 128, causal=True, dtype="float16", kv_heads=4)),
    gradient_case(SelfAttention(2, 4096, 16, 64, causal=True, window=512)),
    gradient_case(SelfAttention(4, 1000, 16, 64, causal=True)),
    gradient_case(SelfAttention(2, 4096, 16, 128, causal=True, kv_heads=4, window=1024, softcap=50.0)),
    beside_gradient_case(Beside(4, 2048, 2048, 16, 128, ("padding",), causal=True)),
    beside_gradient_case(Beside(4, 2048, 2048, 16, 64, ("segments",), causal=True)),
    beside_gradient_case(Beside(4, 2048, 2048, 16, 64, ("mask",))),
    beside_gradient_case(Beside(4, 2048, 2048, 16, 64, ("bias",))),
    beside_gradient_case(Beside(4, 2048, 2048, 16, 128, ("padding", "bias"), causal=True)),
    gradient_case(SelfAttention(4, 2048, 16, 96, causal=True)),
    gradient_case(SelfAttention(2, 2048, 16, 256, causal=True)),
    beside_case(Beside(4, 2048, 2048, 16, 64, ("dropout",), causal=True)),
    beside_case(Beside(4, 2048, 2048, 16, 128, ("shared dropout",))),
    beside_gradient_case(Beside(4, 2048, 2048, 16, 64, ("dropout",), causal=True)),
    beside_gradient_case(Beside(4, 2048, 2048, 16, 128, ("dropout",))),
    beside_gradient_case(Beside(4, 2048, 2048, 16, 64, ("shared dropout",))),
)
