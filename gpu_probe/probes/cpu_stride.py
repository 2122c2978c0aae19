"""Sums over every `stride`-th element: what of the bandwidth is left when most of a line is not used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gpu_probe.probe import Probe, Target
from gpu_probe.probes._jax import JaxProgram, program
from gpu_probe.property_map import Property
from gpu_probe.samples import Point, Samples
from gpu_probe.statistics import measured, summarize

#: float32 elements: 64 MiB, beyond the caches that a core has for itself.
ELEMENTS = 1 << 24


def generate(point: Point, target: Target) -> JaxProgram:
    """The sum of the elements at multiples of `stride`."""
    stride = int(point["stride"])
    x = jax.random.normal(jax.random.key(stride), (ELEMENTS // stride, stride), jnp.float32)
    return program(lambda x: x[:, 0].sum(), (x,), lambda s: 4 * x.shape[0] / s)


def points(quick: bool) -> Sequence[Point]:
    """Powers of two."""
    return [{"stride": 2**n} for n in range(8)]


def analyze(samples: Samples) -> Mapping[str, Property]:
    """``coalescing.<bytes>``: bandwidth of what is used, over that at stride 1."""
    by_stride = samples.by("stride")
    if 1 not in by_stride:
        return {}
    whole = summarize(by_stride[1]).median
    method = "bytes used a second over those at stride 1"
    return {
        f"coalescing.{4 * stride}": measured([v / whole for v in values], "ratio", method, PROBE.name)
        for stride, values in by_stride.items()
        if stride > 1
    }


def plot(samples: Samples, axes: Any) -> None:
    """Bandwidth of what is used over the stride."""
    by_stride = samples.by("stride")
    summaries = [summarize(v) for v in by_stride.values()]
    bytes_apart = [4 * s for s in by_stride]
    axes.fill_between(
        bytes_apart, [s.low / 1e9 for s in summaries], [s.high / 1e9 for s in summaries], alpha=0.25, lw=0
    )
    axes.plot(bytes_apart, [s.median / 1e9 for s in summaries], marker="o", ms=3)
    axes.set(xscale="log", yscale="log", xlabel="bytes apart", ylabel="GB/s of what is used", title="stride sweep")
    axes.set_xscale("log", base=2)


PROBE = Probe(
    name="cpu_stride",
    kind="cpu",
    measures="bytes of used elements a second, one core",
    unit="B/s",
    parameters={"stride": "elements of 4 bytes from one that is used to the next"},
    expected="falls with the stride until only one element of each line is used, then more slowly",
    caveats=(
        "At small strides the additions take longer than the loads.",
        "At large strides what is used may stay in a large last cache, and each page costs a translation.",
    ),
    points=points,
    generate=generate,
    analyze=analyze,
    properties=tuple(f"coalescing.{4 * 2**n}" for n in range(1, 8)),
    plot=plot,
)
