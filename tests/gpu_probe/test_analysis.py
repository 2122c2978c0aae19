"""From samples to properties, on samples whose answer is known."""

import math

import numpy as np
import pytest

from gpu_probe.probes import cpu_bandwidth, cpu_dispatch, cpu_exp, cpu_gemm, cpu_pointer_chase, cpu_stride
from gpu_probe.staircase import isotonic, levels, segments, size_class
from gpu_probe.statistics import ratio, summarize
from tests.gpu_probe.maps import samples

SIZES = [s for n in range(12, 27) for s in (2**n, 3 * 2 ** (n - 1))]


def staircase(capacities, latencies, sharp, repeats=9):
    """Latency over size: a level hits until its capacity; then all misses (`sharp`), or those that do not fit."""
    rng = np.random.default_rng(0)
    found = {}
    for size in SIZES:
        hit, value, left = 0.0, 0.0, 1.0
        for capacity, latency in zip([*capacities, math.inf], latencies, strict=True):
            hit = 1.0 if size <= capacity else 0.0 if sharp else capacity / size
            value += max(0.0, hit - (1 - left)) * latency
            left = min(left, 1 - hit)
        # other programs only add: a sample in four is far off
        found[size] = [
            value * (1 + 0.03 * rng.random() + (3 * rng.random() if rng.random() < 0.25 else 0)) for _ in range(repeats)
        ]
    return found


@pytest.mark.parametrize("sharp", [True, False])
@pytest.mark.parametrize("capacities", [(2**15, 2**20), (48 * 2**10, 2**20, 2**23), (2**15, 2**18, 2**22)])
def test_levels_are_found_within_one_class(capacities, sharp):
    latencies = (1.2, 4.0, 15.0, 90.0)[: len(capacities)] + (110.0,)
    found = levels(staircase(capacities, latencies, sharp))
    assert [x.capacity is None for x in found] == [False] * len(capacities) + [True]
    for level, capacity, latency in zip(found, [*capacities, None], latencies, strict=True):
        assert level.latency == pytest.approx(latency, rel=0.4)
        if capacity is not None:
            assert abs(size_class(level.capacity) - size_class(capacity)) <= 1
            assert level.interval[0] <= level.capacity <= level.interval[1]


def test_one_level_and_too_few_sizes():
    assert [x.capacity for x in levels({s: [5.0] * 5 for s in SIZES})] == [None]
    assert levels({4096: [1.0], 8192: [2.0]}) == []
    assert cpu_pointer_chase.analyze(samples("cpu_pointer_chase", "bytes", "ns", {s: [5.0] * 3 for s in SIZES})) == {}


def test_sequences():
    assert isotonic([1.0, 3.0, 2.0, 4.0]) == [1.0, 2.5, 2.5, 4.0]
    assert segments([1.0] * 4 + [3.0] * 4) == [(0, 3), (4, 7)]
    assert segments([1.0, 1.05, 0.95, 1.0]) == [(0, 3)]


def test_outliers_are_left_out_and_counted():
    found = summarize([1.0, 1.1, 0.9, 1.0, 1.05, 9.0])
    assert found.outliers == (9.0,) and (found.low, found.high) == (0.9, 1.1) and found.count == 6
    with pytest.raises(ValueError, match="expected samples, found none"):
        summarize([])
    (low, high), value = (r := ratio([1.0, 2.0, 3.0], [2.0, 4.0, 4.0], "m", "p")).interval, r.value
    assert (low, value, high) == (0.25, 0.5, 1.5)


def test_chase_names_levels_from_the_first():
    found = cpu_pointer_chase.analyze(
        samples("cpu_pointer_chase", "bytes", "ns", staircase((2**15, 2**20), (1.2, 4, 100), True))
    )
    assert set(found) == {"l1.size", "l1.latency", "l2.size", "l2.latency", "dram.latency"}
    assert (found["l1.size"].value, found["l2.size"].value) == (2**15, 2**20)


@pytest.mark.parametrize("line", [64, 128])
def test_line_is_where_a_larger_stride_loses_nothing(line):
    rates = {
        s: [12e9 / max(1, s / 2) * (1 if 4 * s <= line else 4 * s / line * 0.9)] * 3
        for s in (1, 2, 4, 8, 16, 32, 64, 128)
    }
    found = cpu_stride.analyze(samples("cpu_stride", "stride", "B/s", rates))
    assert found["line.size"].value == line and found["coalescing.16"].value == pytest.approx(0.5)


def test_no_line_where_bandwidth_never_falls_or_always_does():
    flat = {s: [1e9] * 3 for s in (1, 2, 4, 8)}
    falling = {s: [1e9 / s] * 3 for s in (1, 2, 4, 8)}
    for rates in (flat, falling):
        assert "line.size" not in cpu_stride.analyze(samples("cpu_stride", "stride", "B/s", rates))
    assert cpu_stride.analyze(samples("cpu_stride", "stride", "B/s", {2: [1e9]})) == {}


def test_a_round_is_the_intercept_of_a_line():
    times = {0: [1e-5] * 3} | {n: [20e-6 + 1e-6 * n, 20e-6 + 1e-6 * n, 90e-6 + 1e-6 * n] for n in (16, 32, 64, 128)}
    found = cpu_dispatch.analyze(samples("cpu_dispatch", "columns", "s", times))
    assert found["launch.loop_step"].value == pytest.approx(20e-6) and found["launch.dispatch"].value == 1e-5
    low, high = found["launch.loop_step"].interval
    assert low <= 20e-6 * (1 + 1e-9) and high >= 20e-6 * (1 - 1e-9)
    through_zero = {n: [1e-6 * n - 1e-7] * 3 for n in (16, 32, 64)}
    assert cpu_dispatch.analyze(samples("cpu_dispatch", "columns", "s", through_zero)) == {}


def test_rates():
    gemm = samples("cpu_gemm", "side", "FLOP/s", {512: [1e9] * 3, 1024: [2e9, 2e9, 2.2e9]}, dtype="float32")
    found = cpu_gemm.analyze(gemm)["gemm.float32"]
    assert found.value == 2e9 and found.interval == (2e9, 2.2e9) and "n = 1024" in found.method
    assert cpu_exp.analyze(samples("cpu_exp", "depth", "1/s", {1: [1e8], 16: [4e8]}))["sfu.exp_rate"].value == 4e8
    found = cpu_bandwidth.analyze(samples("cpu_bandwidth", "kind", "B/s", {"copy": [2e10], "read": [1e10]}))
    assert {n: p.value for n, p in found.items()} == {"dram.bw_copy": 2e10, "dram.bw_read": 1e10}
