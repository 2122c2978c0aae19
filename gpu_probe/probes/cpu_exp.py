"""Rate of exponentials, which softmax lives on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from gpu_probe.probe import Probe, Target
from gpu_probe.probes._jax import JaxProgram, program
from gpu_probe.property_map import Property
from gpu_probe.samples import Point, Samples
from gpu_probe.statistics import measured

#: float32 elements.
ELEMENTS = 1 << 20


def generate(point: Point, target: Target) -> JaxProgram:
    """``exp(-exp(-...))``: one loop over the elements, so that memory is read and written once for all of them."""
    depth = int(point["depth"])
    x = jax.random.uniform(jax.random.key(0), (ELEMENTS,), jnp.float32)

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(depth):
            x = jnp.exp(-x)
        return x

    return program(chain, (x,), lambda s: depth * ELEMENTS / s)


def analyze(samples: Samples) -> Mapping[str, Property]:
    """``sfu.exp_rate``: at the largest depth, where memory matters least."""
    by_depth = samples.by("depth")
    depth = max(by_depth)
    return {"sfu.exp_rate": measured(by_depth[depth], "1/s", f"exponentials of float32, {depth} in a row", PROBE.name)}


def points(quick: bool) -> Sequence[Point]:
    """One exponential, and enough of them to forget memory."""
    return [{"depth": 1}, {"depth": 16}]


PROBE = Probe(
    name="cpu_exp",
    kind="cpu",
    measures="exponentials of float32 a second, all cores",
    unit="1/s",
    parameters={"depth": "exponentials of each element, one of the other"},
    expected="higher at a larger depth, where one load and one store serve them all",
    caveats=("It includes a negation.",),
    points=points,
    generate=generate,
    analyze=analyze,
    properties=("sfu.exp_rate",),
)
