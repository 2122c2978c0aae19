"""What starting costs: a call of a compiled program, and a round of a compiled loop."""

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
from gpu_probe.statistics import measured

#: Calls, or rounds, in one sample.
CALLS, ROUNDS = 200, 64
#: Of the tile in the loop: too little work to matter.
ROWS, WIDTH = 16, 16


def generate(point: Point, target: Target) -> JaxProgram:
    """Calls of ``x + 1`` one after the other, or one call of a loop."""
    if point["what"] == "call":
        x = jnp.float32(0)
        one = program(lambda x: x + 1, (x,), lambda s: s / CALLS)
        return JaxProgram(lambda: [one.run() for _ in range(CALLS)], one.value, one.source)
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (ROWS, WIDTH), jnp.float32) for key in keys)
    return program(rounds, (q, k, v), lambda s: s / ROUNDS)


def rounds(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    """The loop of streamed attention on a tile that is next to nothing: two products, a maximum, two exponentials."""

    def one(_: Any, state: Any) -> Any:
        m, l, acc = state
        scores = q @ k.T
        largest = jnp.maximum(m, scores.max(1))
        weights, old = jnp.exp(scores - largest[:, None]), jnp.exp(m - largest)
        return largest, l * old + weights.sum(1), acc * old[:, None] + weights @ v

    empty = (jnp.full(ROWS, -jnp.inf), jnp.zeros(ROWS), jnp.zeros((ROWS, WIDTH)))
    return lax.fori_loop(0, ROUNDS, one, empty)


def points(quick: bool) -> Sequence[Point]:
    """Both."""
    return [{"what": "call"}, {"what": "round"}]


def analyze(samples: Samples) -> Mapping[str, Property]:
    """``launch.dispatch`` and ``launch.loop_step``."""
    names = {"call": "launch.dispatch", "round": "launch.loop_step"}
    how = {
        "call": f"{CALLS} calls of x + 1, each waited for",
        "round": f"{ROUNDS} rounds of an online softmax on {ROWS} x {WIDTH}",
    }
    return {names[w]: measured(values, "s", how[w], PROBE.name) for w, values in samples.by("what").items()}


PROBE = Probe(
    name="cpu_dispatch",
    kind="cpu",
    measures="time of one call, or of one round of a loop, that has next to nothing to do",
    unit="s",
    parameters={"what": "call: of a compiled program from Python; round: of a loop inside of one"},
    expected="some ten microseconds for a call; a round takes less, for nothing is handed to Python",
    caveats=("Larger tiles start threads and wait for them, which a round here does not.",),
    points=points,
    generate=generate,
    analyze=analyze,
    properties=("launch.dispatch", "launch.loop_step"),
)
