"""Size of a cache line: the distance at which a second load is no longer free after the first."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gpu_probe.probe import Probe, Target
from gpu_probe.probes._jax import JaxProgram, program
from gpu_probe.property_map import Property
from gpu_probe.samples import Point, Samples

#: Bytes between pairs, and of everything: far beyond the second cache.
BLOCK, BYTES = 1024, 1 << 26
PAIRS = 1 << 14


def generate(point: Point, target: Target) -> JaxProgram:
    """A random walk from block to block, that takes two dependent loads in each: at 0 and at `distance`."""
    words, second = BLOCK // 4, int(point["distance"]) // 4
    blocks = BYTES // BLOCK
    order = np.random.default_rng(1).permutation(blocks)
    table = np.zeros(blocks * words, np.int32)
    table[order * words] = order * words + second
    table[order * words + second] = np.roll(order, -1) * words

    def walk(table: jax.Array, start: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 2 * PAIRS, lambda _, at: lax.dynamic_index_in_dim(table, at, keepdims=False), start)

    made = program(walk, (jnp.asarray(table), jnp.int32(order[0] * words)), lambda s: s * 1e9 / PAIRS)
    return made


def points(quick: bool) -> Sequence[Point]:
    """Powers of two up to half a block."""
    return [{"distance": 2**n} for n in range(3, 10)]


def analyze(samples: Samples) -> Mapping[str, Property]:
    """The line is the smallest distance at which a pair takes more than the middle of the least and the most."""
    by_distance = {d: statistics.median(v) for d, v in samples.by("distance").items()}
    least, most = min(by_distance.values()), max(by_distance.values())
    if most < 1.2 * least:
        return {}
    size = next(d for d, t in by_distance.items() if t > (least + most) / 2)
    method = "smallest distance at which a pair of loads takes more than the middle of the least and the most"
    return {"line.size": Property(size, "B", "measured", method, (size, size), (PROBE.name,))}


PROBE = Probe(
    name="cpu_line",
    kind="cpu",
    measures="time of two dependent loads, the second `distance` bytes behind the first, from memory",
    unit="ns",
    parameters={"distance": "bytes from the first load of a pair to the second"},
    expected="one level while both are in a line, nearly twice that beyond",
    caveats=("A CPU that fetches the neighbour of a line as well shows its pair of lines.",),
    points=points,
    generate=generate,
    analyze=analyze,
    properties=("line.size",),
)
