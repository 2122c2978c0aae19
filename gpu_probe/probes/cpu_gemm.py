"""Rate of large products by dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from gpu_probe.probe import Probe, Target
from gpu_probe.probes._jax import JaxProgram, program
from gpu_probe.property_map import Property
from gpu_probe.samples import Point, Samples
from gpu_probe.statistics import measured, summarize

DTYPES = ("float32", "bfloat16", "float64")


def generate(point: Point, target: Target) -> JaxProgram:
    """A product of two random square matrices; its result has their dtype."""
    side = int(point["side"])
    with jax.enable_x64(point["dtype"] == "float64"):
        keys = jax.random.split(jax.random.key(side))
        a, b = (jax.random.normal(k, (side, side), jnp.dtype(str(point["dtype"]))) for k in keys)
        return program(jnp.matmul, (a, b), lambda s: 2 * side**3 / s)


def points(quick: bool) -> Sequence[Point]:
    """Two sides for each dtype."""
    return [{"dtype": dtype, "side": side} for dtype in DTYPES for side in ((512,) if quick else (512, 1024))]


def analyze(samples: Samples) -> Mapping[str, Property]:
    """``gemm.<dtype>``: at the side whose median is highest."""
    found = {}
    for dtype in sorted(samples.by("dtype")):
        by_side = samples.of(PROBE.name, dtype=dtype).by("side")
        side = max(by_side, key=lambda n: summarize(by_side[n]).median)
        found[f"gemm.{dtype}"] = measured(by_side[side], "FLOP/s", f"2 n^3 operations, n = {side}", PROBE.name)
    return found


PROBE = Probe(
    name="cpu_gemm",
    kind="cpu",
    measures="operations a second of a matrix product, all cores",
    unit="FLOP/s",
    parameters={"dtype": "of operands and result", "side": "rows and columns of both matrices"},
    expected="float64 half of float32; bfloat16 above both where the CPU has instructions for it, else below",
    caveats=("It is the rate that XLA's product reaches, not the CPU's peak.",),
    points=points,
    generate=generate,
    analyze=analyze,
    properties=tuple(f"gemm.{dtype}" for dtype in DTYPES),
)
