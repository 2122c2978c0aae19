"""Sums over every `stride`-th element: what of the bandwidth is left when most of a line is not used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gpu_probe.probe import Probe, Target
from gpu_probe.probes._jax import JaxProgram, program
from gpu_probe.property_map import Property
from gpu_probe.samples import Point, Samples
from gpu_probe.statistics import ratio, summarize

#: float32 elements: 64 MiB, beyond the caches that a core has for itself.
ELEMENTS = 1 << 24
#: Loads in a round of the loop.
UNROLL = 16


def generate(point: Point, target: Target) -> JaxProgram:
    """The sum of the elements at multiples of `stride`, by a loop on one core, some independent loads a round."""
    stride = int(point["stride"])
    rounds, span = ELEMENTS // (stride * UNROLL), stride * (UNROLL - 1) + 1
    x = jax.random.normal(jax.random.key(stride), (ELEMENTS,), jnp.float32)

    def strided(x: jax.Array) -> jax.Array:
        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            return total + lax.dynamic_slice(x, (i * (stride * UNROLL),), (span,))[::stride].sum()

        return lax.fori_loop(0, rounds, add, jnp.float32(0))

    return program(strided, (x,), lambda s: 4 * rounds * UNROLL / s)


def points(quick: bool) -> Sequence[Point]:
    """Powers of two."""
    return [{"stride": 2**n} for n in range(8)]


def analyze(samples: Samples) -> Mapping[str, Property]:
    """``coalescing.<bytes>``, the bandwidth of what is used over that at stride 1, and ``line.size``."""
    by_stride = samples.by("stride")
    if 1 not in by_stride:
        return {}
    medians = {stride: summarize(values).median for stride, values in by_stride.items()}
    method = "bytes used a second over those at stride 1"
    found = {
        f"coalescing.{4 * stride}": ratio(values, by_stride[1], method, PROBE.name)
        for stride, values in by_stride.items()
        if stride > 1
    }
    return found | _line(medians)


def _line(medians: Mapping[int, float]) -> dict[str, Property]:
    """Where elements share no line, no larger stride uses them less well; nothing where no such stride is seen.

    Bandwidths that differ by less than the root of two are taken for equal: a stride that still shares loses half.
    """
    strides = [
        s for s in medians if s < max(medians) and medians[s] < min(v for t, v in medians.items() if t > s) * 2**0.5
    ]
    if not strides or min(strides) == 1:
        return {}
    size = 4 * min(strides)
    method = "smallest stride beyond which the bandwidth of what is used falls by less than a root of two"
    return {"line.size": Property(size, "B", "measured", method, (size / 2, size), (PROBE.name,))}


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
        "A CPU that fetches the neighbour of a line as well shows its pair of lines.",
        "At large strides what is used may stay in a large last cache, and each page costs a translation.",
    ),
    points=points,
    generate=generate,
    analyze=analyze,
    properties=("line.size", *(f"coalescing.{4 * 2**n}" for n in range(1, 8))),
    plot=plot,
)
