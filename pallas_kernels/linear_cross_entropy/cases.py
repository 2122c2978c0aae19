"""Shapes and variants of the vocabulary loss kernels: for the simulator, compiled, and for a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.linear_cross_entropy.config import BackwardConfig, ForwardConfig
from pallas_kernels.linear_cross_entropy.device import backward_case, forward_case


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `forward` and one of `backward`. Configurations: None for the default."""

    rows: int
    depth: int
    classes: int
    trans_w: bool = False
    dtype: str = "bfloat16"
    scale: float = 1.0
    softcap: float | None = None
    base: float = 1.0
    with_sum: bool = False
    wanted: tuple[bool, bool] = (True, True)
    forward: ForwardConfig | None = None
    backward: BackwardConfig | None = None

    @property
    def is_ragged(self) -> bool:
        """Whether tiles reach beyond the arrays."""
        tile = (self.forward or ForwardConfig()).tile_v
        return bool(self.rows % 128 or self.depth % 64 or self.classes % tile)

    def arrays(self, key: jax.Array) -> tuple[Any, ...]:
        """Random ``(x, w, labels)``, a few labels of which are no class; logits have a variance of 4."""
        kx, kw, kt = jax.random.split(key, 3)
        x = jax.random.normal(kx, (self.rows, self.depth)).astype(self.dtype)
        w = jax.random.normal(kw, (self.classes, self.depth) if self.trans_w else (self.depth, self.classes))
        labels = jax.random.randint(kt, (self.rows,), -1, self.classes + 1)
        return x, (w * 2 * self.depth**-0.5).astype(self.dtype), labels

    def cotangents(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """Random ``(dl l, dtaken, dsum)``; None for a sum that is not asked for."""
        found = jax.random.normal(key, (3, self.rows), jnp.float32)
        return (found[0], found[1], 0.1 * found[2]) if self.with_sum else (found[0], found[1])

    def equation(self) -> dict[str, Any]:
        """The keyword arguments that say what is computed."""
        return {name: getattr(self, name) for name in ("trans_w", "scale", "softcap", "base")}


#: Two parts of the vocabulary and two of its blocks, more tiles than CTAs, more loads than slots.
_SMALL = {"forward": ForwardConfig(64, 2, 2), "backward": BackwardConfig(64, 2, 128, group=1, sm_count=1)}
_ONE = {"forward": ForwardConfig(64, 2), "backward": BackwardConfig(64, 2, 64, sm_count=2)}

#: In the simulator, on every run: the fewest that show each part.
QUICK: Mapping[str, Case] = {
    "ragged, W transposed, softcap, sum": Case(
        72, 80, 137, True, "float16", scale=1.5, softcap=3.0, with_sum=True, **_SMALL
    ),
}

#: In the simulator, the rest.
SLOW: Mapping[str, Case] = {
    "whole tiles": Case(128, 128, 256, **_SMALL),
    "ragged": Case(200, 72, 213, **_SMALL),
    "ragged, many rows": Case(300, 64, 65, with_sum=True, **_SMALL),
    "sum of logits": Case(128, 64, 128, with_sum=True, **_ONE),
    "softcap": Case(128, 64, 192, softcap=2.0, **_ONE),
    "W transposed": Case(128, 128, 192, True, **_ONE),
    "float16": Case(128, 64, 128, dtype="float16", **_ONE),
    "powers of two": Case(128, 64, 128, base=0.6931471805599453, scale=0.3, **_ONE),
    "large logits": Case(128, 64, 128, scale=300.0, **_ONE),
    "one load a tile": Case(256, 64, 512, **_SMALL),
    "three slots": Case(128, 448, 256, forward=ForwardConfig(128, 3), backward=BackwardConfig(128, 3, 256)),
    "wide parts": Case(
        128, 64, 384, forward=ForwardConfig(192, 2, 2), backward=BackwardConfig(128, 2, 128, store_v=64, sm_count=1)
    ),
    "a row and few classes": Case(1, 16, 5, **_ONE),
    "a class": Case(9, 16, 1, True, **_ONE),
    "dX alone": Case(128, 64, 128, wanted=(True, False), **_ONE),
    "dW alone": Case(128, 64, 128, wanted=(False, True), **_ONE),
    "defaults": Case(128, 64, 256),
}

#: Compiled for a described GPU with default configurations.
COMPILED: Mapping[str, Case] = {
    "8192 rows, 128k classes": Case(8192, 4096, 128256),
    "W transposed": Case(4096, 2048, 32000, True, "float16"),
    "softcap, 256k classes": Case(4096, 2048, 256000, softcap=30.0),
    "sum of logits": Case(4096, 1024, 50304, True, with_sum=True),
    "few rows": Case(16, 4096, 128256),
    "classes that are padded": Case(1000, 784, 50257),
}

#: Checked and timed on a GPU.
DEVICE = (
    forward_case(8192, 1024, 32000),
    forward_case(8192, 4096, 128256),
    forward_case(4096, 2048, 50304, trans_w=True),
    backward_case(8192, 1024, 32000),
    backward_case(8192, 4096, 128256),
    backward_case(4096, 2048, 50304, trans_w=True),
    backward_case(4096, 768, 50257, trans_w=True, dtype="float16"),
)
