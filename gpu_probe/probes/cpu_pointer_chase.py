"""Latency of dependent loads over the size of what they walk through: caches and memory of the CPU."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gpu_probe.devices.cpu import clock_hz
from gpu_probe.probe import Probe, Target
from gpu_probe.probes._pages import in_large_pages
from gpu_probe.property_map import Property
from gpu_probe.samples import Point, Reading, Samples
from gpu_probe.staircase import levels
from gpu_probe.statistics import summarize

#: Bytes between pointers: a line of every usual CPU is no longer. One pointer a line.
LINE = 64
#: Lines of 64 pages of 4 KiB. The walk is random inside of such a window and from window to window: where pages are not
#: large, those of one window fit into the first table of address translations, whose misses would hide the caches.
WINDOW = 4096
#: Loads that are timed. The walk goes on where the last one ended: over a cycle, so it comes to every line.
LOADS = 1 << 15
#: Walks through all before one is timed, at least: a cache that others share, or that takes what a smaller one drops,
#: keeps a line only after it has come by some times. And at least so many loads.
ROUNDS, WARM_LOADS = 3, 1 << 17


def cycle(lines: int, seed: int, window: int = WINDOW) -> np.ndarray:
    """Successor of each line in a random cycle through all of them, window by window."""
    rng = np.random.default_rng(seed)
    starts = rng.permutation(-(-lines // window)) * window
    order = np.concatenate([s + rng.permutation(min(window, lines - s)) for s in starts])
    successor = np.empty(lines, np.int32)
    successor[order] = np.roll(order, -1)
    return successor


def chase(table: jax.Array, start: jax.Array) -> jax.Array:
    """Where `LOADS` dependent loads from `start` lead."""
    return lax.fori_loop(0, LOADS, lambda _, at: lax.dynamic_index_in_dim(table, at, keepdims=False), start)


@dataclasses.dataclass
class Chase:
    """A compiled walk that goes on where it ended."""

    compiled: Any
    table: jax.Array
    at: jax.Array
    source: str

    def execute(self) -> Reading:
        """Walks the whole cycle, to have in the caches what stays there, then on with the clock."""
        lines = self.table.size * 4 // LINE
        for _ in range(-(-max(ROUNDS * lines, WARM_LOADS) // LOADS)):
            self._walk()
        started = time.perf_counter_ns()
        self._walk()
        return Reading((time.perf_counter_ns() - started) / LOADS, clock_hz())

    def _walk(self) -> None:
        self.at = jax.block_until_ready(self.compiled(self.table, self.at))


def generate(point: Point, target: Target) -> Chase:
    """A table of `bytes` and its walk."""
    words = LINE // 4
    lines = int(point["bytes"]) // LINE
    table = np.zeros(lines * words, np.int32)
    table[::words] = cycle(lines, seed=lines) * words
    args = (in_large_pages(table), jnp.int32(0))
    traced = jax.jit(chase).trace(*args)
    return Chase(traced.lower().compile(), *args, str(traced.jaxpr))


def points(quick: bool) -> Sequence[Point]:
    """Two sizes an octave, from 4 KiB to 128 MiB (quick: 64 MiB)."""
    octaves = range(12, 26 if quick else 27)
    sizes = [s for n in octaves for s in (2**n, 3 * 2 ** (n - 1))]
    return [{"bytes": s} for s in [*sizes, 2**octaves.stop]]


def analyze(samples: Samples) -> Mapping[str, Property]:
    """A size and a latency for each level, and the latency of memory."""
    by_size = samples.by("bytes")
    found: dict[str, Property] = {}
    steps = levels(by_size)
    for n, level in enumerate(steps, 1):
        name = f"l{n}" if level.capacity is not None else "dram"
        plateau = [v for size, values in by_size.items() if level.sizes[0] <= size <= level.sizes[1] for v in values]
        summary = summarize(plateau)
        low, high = min(summary.low, level.latency), max(summary.high, level.latency)
        method = f"lower quartile, loads from {level.sizes[0]} to {level.sizes[1]} bytes"
        found[f"{name}.latency"] = Property(level.latency, "ns", "measured", method, (low, high), (NAME,))
        if level.capacity is not None:
            method = "largest size whose latency is below the geometric mean of this level's and the next"
            found[f"{name}.size"] = Property(level.capacity, "B", "measured", method, level.interval, (NAME,))
    return found if len(steps) > 1 else {}


def plot(samples: Samples, axes: Any) -> None:
    """The staircase, with the levels that were found."""
    by_size = samples.by("bytes")
    summaries = [summarize(v) for v in by_size.values()]
    axes.fill_between(list(by_size), [s.low for s in summaries], [s.high for s in summaries], alpha=0.25, lw=0)
    axes.plot(list(by_size), [s.median for s in summaries], marker="o", ms=3)
    for level in levels(by_size):
        axes.plot(level.sizes, (level.latency,) * 2, color="black", lw=1)
        if level.capacity is not None:
            axes.axvline(level.capacity, color="black", lw=0.6, ls=":")
    axes.set(xscale="log", yscale="log", xlabel="bytes walked through", ylabel="ns a load", title="latency staircase")
    axes.set_xscale("log", base=2)


NAME = "cpu_pointer_chase"
PROBE = Probe(
    name=NAME,
    kind="cpu",
    measures="time of one load whose address is what the load before it found",
    unit="ns",
    parameters={"bytes": "what the walk goes through, one pointer in each 64 bytes"},
    expected="a staircase: flat while a cache holds the walk, a rise where it does not, flat again in the next level",
    caveats=(
        "A cache that other processes or other virtual machines use has only what they leave of it.",
        "Level n is the n-th that the staircase shows: a level that is hidden takes no number.",
        "A load includes the step of the loop around it, below a nanosecond.",
    ),
    points=points,
    generate=generate,
    analyze=analyze,
    properties=("l1.size", "l1.latency", "l2.size", "l2.latency", "l3.size", "l3.latency", "dram.latency"),
    plot=plot,
)
