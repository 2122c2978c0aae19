"""What starting costs: a call of a compiled program, and a round of a compiled loop."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gpu_probe.probe import Probe, Target
from gpu_probe.probes._jax import JaxProgram, program
from gpu_probe.property_map import Property
from gpu_probe.samples import Point, Samples
from gpu_probe.statistics import bootstrap, measured

#: Calls, or rounds, in one sample.
CALLS, ROUNDS = 200, 16
#: Of the tile in the loop: as many rows as fill all cores, and the width of a usual head.
ROWS, WIDTH = 512, 64


def generate(point: Point, target: Target) -> JaxProgram:
    """Calls of ``x + 1`` one after the other where there are no columns, else a loop over tiles of so many."""
    columns = int(point["columns"])
    if not columns:
        x = jnp.float32(0)
        one = program(lambda x: x + 1, (x,), lambda s: s / CALLS)
        return JaxProgram(lambda: [one.run() for _ in range(CALLS)], one.value, one.source)
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((ROWS, WIDTH), (ROUNDS * columns, WIDTH), (ROUNDS * columns, WIDTH))
    q, k, v = (jax.random.normal(key, shape, jnp.float32) for key, shape in zip(keys, shapes, strict=True))
    return program(lambda q, k, v: streamed(q, k, v, columns), (q, k, v), lambda s: s / ROUNDS)


def streamed(q: jax.Array, k: jax.Array, v: jax.Array, columns: int) -> Any:
    """Attention as an online softmax: a round takes so many columns of scores."""

    def one(i: Any, state: Any) -> Any:
        m, l, acc = state
        keys, values = (lax.dynamic_slice_in_dim(x, i * columns, columns) for x in (k, v))
        scores = q @ keys.T
        largest = jnp.maximum(m, scores.max(1))
        weights, old = jnp.exp(scores - largest[:, None]), jnp.exp(m - largest)
        return largest, l * old + weights.sum(1), acc * old[:, None] + weights @ values

    empty = (jnp.full(ROWS, -jnp.inf), jnp.zeros(ROWS), jnp.zeros((ROWS, WIDTH)))
    return lax.fori_loop(0, ROUNDS, one, empty)


def points(quick: bool) -> Sequence[Point]:
    """A call, and tiles of four sizes."""
    return [{"columns": n} for n in (0, 16, 32, 64, 128)]


def analyze(samples: Samples) -> Mapping[str, Property]:
    """``launch.dispatch``, and ``launch.loop_step`` as the time of a round of no columns."""
    by_columns = samples.by("columns")
    found = {}
    if 0 in by_columns:
        method = f"{CALLS} calls of x + 1, each waited for"
        found["launch.dispatch"] = measured(by_columns.pop(0), "s", method, PROBE.name)
    if len(by_columns) < 3:
        return found
    value = intercept({n: statistics.median(v) for n, v in by_columns.items()})
    if value > 0:
        low, high = np.percentile(bootstrap(by_columns, intercept), [5, 95])
        interval = (max(0.0, min(float(low), value)), max(float(high), value))
        method = f"rounds of an online softmax on {ROWS} x n scores, T = a + b n: a (Theil and Sen)"
        found["launch.loop_step"] = Property(value, "s", "measured", method, interval, (PROBE.name,))
    return found


def intercept(times: Mapping[int, float]) -> float:
    """The a of the line T = a + b n through most points: b is the median of the slopes of all pairs."""
    pairs = itertools.combinations(times.items(), 2)
    slope = statistics.median((t - s) / (m - n) for (n, s), (m, t) in pairs)
    return float(statistics.median(t - slope * n for n, t in times.items()))


PROBE = Probe(
    name="cpu_dispatch",
    kind="cpu",
    measures="time of one call, or of one round of a loop",
    unit="s",
    parameters={
        "columns": "0: a call from Python of a program with nothing to do; else the scores of a row in a round"
    },
    expected="some ten microseconds for a call; rounds on a line over their columns, whose intercept is what starting "
    "a round's kernels and threads takes",
    caveats=("The intercept includes what a round does once for its rows, such as rescaling sums.",),
    points=points,
    generate=generate,
    analyze=analyze,
    properties=("launch.dispatch", "launch.loop_step"),
)
