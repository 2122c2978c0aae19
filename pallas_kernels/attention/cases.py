"""Shapes and variants of the attention kernel: for the simulator, compiled, and for a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from pallas_kernels.attention.config import ForwardConfig
from pallas_kernels.attention.device import forward_case


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `forward`. `config`: None for the default."""

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

    def arrays(self, key: jax.Array) -> tuple[Any, ...]:
        """Random ``(q, k, v)``."""
        found = []
        shapes = ((self.queries, self.heads), (self.keys, self.kv_heads), (self.keys, self.kv_heads))
        for random, (length, heads), layout in zip(jax.random.split(key, 3), shapes, self.layouts, strict=False):
            sizes = {"b": self.batch, "s": length, "h": heads, "d": self.head_dim}
            x = jax.random.normal(random, tuple(sizes[d] for d in layout))
            found.append(x.astype(self.dtype))
        return tuple(found)

    def equation(self) -> dict[str, Any]:
        """The keyword arguments that say what is computed."""
        return {name: getattr(self, name) for name in ("scale", "lower", "upper", "softcap", "layouts")}

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the call."""
        return {**self.equation(), "with_statistics": self.with_statistics, "config": self.config}


_SMALL = ForwardConfig(64, 2)
_HEADS_FIRST = ("bhsd",) * 4

#: In the simulator, on every run: the fewest that show each part.
QUICK: Mapping[str, Case] = {
    "ragged, causal to the last key, shared heads": Case(1, 136, 200, 2, 1, upper=64, config=_SMALL),
    "window, softcap, float16": Case(
        1, 128, 200, dtype="float16", lower=-20, upper=40, softcap=2.0, layouts=_HEADS_FIRST, config=_SMALL
    ),
}

#: In the simulator, the rest.
SLOW: Mapping[str, Case] = {
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
    "no statistics": Case(1, 64, 64, with_statistics=False, config=_SMALL),
    "large scores": Case(1, 64, 128, scale=100.0, config=_SMALL),
}

_CAUSAL = Case(4, 2048, 2048, 16, 16, upper=0)

#: Compiled for a described GPU with default configurations.
COMPILED: Mapping[str, Case] = {
    "causal, D 64": _CAUSAL,
    "causal, D 128": dataclasses.replace(_CAUSAL, head_dim=128),
    "full, D 64": dataclasses.replace(_CAUSAL, upper=None),
    "full, D 128": dataclasses.replace(_CAUSAL, upper=None, head_dim=128),
    "inference": dataclasses.replace(_CAUSAL, with_statistics=False, dtype="float16"),
    "heads first": dataclasses.replace(_CAUSAL, layouts=_HEADS_FIRST),
    "shared heads, window, D 64": dataclasses.replace(_CAUSAL, kv_heads=4, lower=-255),
    "shared heads, window, softcap, ragged, D 128": Case(2, 1000, 1000, 16, 4, 128, lower=-255, upper=0, softcap=50.0),
    "to the last key, D 128": Case(1, 512, 4096, 16, 16, 128, upper=3584),
}

#: Checked and timed on a GPU.
DEVICE = (
    forward_case(4, 2048, 16, 64, causal=True),
    forward_case(4, 2048, 16, 64),
    forward_case(4, 2048, 16, 128, causal=True),
    forward_case(4, 2048, 16, 128),
    forward_case(2, 4096, 16, 128, causal=True, dtype="float16"),
    forward_case(2, 4096, 16, 128, causal=True, kv_heads=4),
    forward_case(2, 4096, 16, 64, causal=True, window=512),
    forward_case(4, 1000, 16, 64, causal=True),
)
