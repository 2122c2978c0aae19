"""Shapes and variants that the kernels are tested with, in the simulator and compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from pallas_kernels.norm.config import NormConfig
from pallas_kernels.norm.device import backward_case, forward_case


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of forward and backward. `config`: None for the default launch."""

    count: int
    length: int
    dtype: str = "bfloat16"
    config: NormConfig | None = None
    residual: bool = False
    scale: str | None = "float32"
    bias: str | None = "float32"
    variance: str = "centered"
    clamped: bool = False
    with_sum: bool = False

    def arrays(self, key: jax.Array) -> dict[str, Any]:
        """Random arguments, None for those it does without; `dy` and `dsum` are for the backward."""
        rows = (self.count, self.length)
        shapes: dict[str, tuple[tuple[int, ...], str]] = {"x": (rows, self.dtype), "dy": (rows, self.dtype)}
        if self.residual:
            shapes["residual"] = (rows, self.dtype)
        if self.with_sum:
            shapes["dsum"] = (rows, self.dtype)
        for name, dtype in (("scale", self.scale), ("bias", self.bias)):
            if dtype is not None:
                shapes[name] = ((self.length,), dtype)
        keys = jax.random.split(key, len(shapes))
        found = {n: jax.random.normal(k, s).astype(d) for k, (n, (s, d)) in zip(keys, shapes.items(), strict=True)}
        return {name: found.get(name) for name in ("x", "dy", "residual", "dsum", "scale", "bias")}


def _launch(rows: int, blocks: int, lean: bool = False) -> NormConfig:
    return NormConfig(rows, blocks, lean)


#: In the simulator, on every run: each variant once, more groups of rows than blocks, rows of no round length.
QUICK: Mapping[str, Case] = {
    "four rows a block, residual": Case(12, 64, config=_launch(4, 2), residual=True, with_sum=True, scale="bfloat16"),
    "odd length, lean": Case(3, 257, "float32", _launch(1, 2, lean=True), variance="moments", clamped=True),
    "one element": Case(1, 1, "float16", bias=None),
    "root mean square": Case(4, 33, config=_launch(4, 1), variance="mean_square", bias=None, residual=True),
}

#: In the simulator, the rest.
SLOW: Mapping[str, Case] = {
    "one row": Case(1, 256, scale=None, bias=None),
    "three elements": Case(4, 3, "float32", residual=True, with_sum=True),
    "hundred": Case(5, 100, "float16", _launch(1, 2), scale=None),
    "hundred, four rows a block": Case(8, 100, "float16", _launch(4, 2, lean=True), variance="mean_square"),
    "several segments": Case(2, 1800, "bfloat16", _launch(1, 2), residual=True, with_sum=True),
    "several segments, four rows a block": Case(8, 500, "bfloat16", _launch(4, 1), residual=True),
    "many rows": Case(24, 128, "bfloat16", _launch(1, 5), clamped=True),
    "many groups": Case(40, 96, "float32", _launch(4, 3, lean=True), clamped=True, variance="moments"),
    "no scale": Case(3, 130, "float32", _launch(1, 3), scale=None, residual=True),
    "mixed types": Case(4, 160, "bfloat16", _launch(4, 1), scale="float16", bias="bfloat16"),
}

#: Compiled with their default launch, which must not spill.
COMPILED: Mapping[str, Case] = {
    "bf16 4096": Case(8192, 4096, residual=True, with_sum=True, scale="bfloat16", bias="bfloat16"),
    "bf16 4096 summed again": Case(8192, 4096, residual=True, clamped=True, variance="moments"),
    "bf16 8192": Case(8192, 8192, residual=True, clamped=True, variance="moments"),
    "bf16 1024": Case(8192, 1024, residual=True, with_sum=True),
    "bf16 768": Case(8192, 768),
    "bf16 256": Case(65536, 256, variance="mean_square", bias=None),
    "bf16 ragged": Case(8191, 1599, residual=True),
    "f16 odd": Case(100, 257, "float16", clamped=True),
    "f32 4096": Case(4096, 4096, "float32", residual=True),
}

#: Checked and timed on a GPU.
DEVICE = (
    forward_case(8192, 4096),
    backward_case(8192, 4096),
    forward_case(65536, 1024),
    backward_case(65536, 1024),
    forward_case(8192, 8192, variance="mean_square"),
    backward_case(8192, 8192, variance="mean_square"),
    forward_case(8192, 4096, "float16", variance="mean_square"),
    forward_case(8191, 1599),
    backward_case(8191, 1599),
)
