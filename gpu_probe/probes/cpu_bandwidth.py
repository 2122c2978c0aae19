"""Memory bandwidth of all cores: a copy and a sum of a large array."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from gpu_probe.probe import Probe, Target
from gpu_probe.probes._jax import JaxProgram, program
from gpu_probe.property_map import Property
from gpu_probe.samples import Point, Samples
from gpu_probe.statistics import measured

#: 128 MiB of float32.
ROWS, COLUMNS = 1 << 10, 1 << 15


def generate(point: Point, target: Target) -> JaxProgram:
    """``-x`` of all elements in place, or the sum of each row."""
    x = jax.random.normal(jax.random.key(0), (ROWS, COLUMNS), jnp.float32)
    size = x.nbytes
    if point["kind"] == "read":
        return program(lambda x: x.sum(1), (x,), lambda s: size / s)
    traced = jax.jit(jnp.negative, donate_argnums=0).trace(x)
    compiled, held = traced.lower().compile(), [x]

    def run() -> None:
        held[0] = jax.block_until_ready(compiled(held[0]))

    return JaxProgram(run, lambda s: 2 * size / s, str(traced.jaxpr))


def analyze(samples: Samples) -> Mapping[str, Property]:
    """``dram.bw_copy`` counts what is read and what is written, ``dram.bw_read`` what is read."""
    how = {
        "copy": "bytes read and written by -x of 128 MiB in place",
        "read": "bytes read by sums of the rows of 128 MiB",
    }
    return {
        f"dram.bw_{kind}": measured(values, "B/s", how[kind], PROBE.name) for kind, values in samples.by("kind").items()
    }


def points(quick: bool) -> Sequence[Point]:
    """Both kinds."""
    return [{"kind": "copy"}, {"kind": "read"}]


PROBE = Probe(
    name="cpu_bandwidth",
    kind="cpu",
    measures="bytes that a program moves between memory and cores in a second",
    unit="B/s",
    parameters={"kind": "copy: reads and writes, in place; read: a sum of each row"},
    expected="one value for each, within a factor of two of the other",
    caveats=(
        "The copy is in place: a program that writes to new pages waits for the system to hand them out as well.",
        "Some releases of XLA sum on one core.",
    ),
    points=points,
    generate=generate,
    analyze=analyze,
    properties=("dram.bw_copy", "dram.bw_read"),
)
