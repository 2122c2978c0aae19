"""The CPU's probes as programs: what they compute, and that each runs. No test asserts a time."""

import itertools
import mmap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpu_probe.devices import connect
from gpu_probe.probes import _pages, cpu_dispatch, cpu_exp, cpu_pointer_chase, cpu_stride, probes


@pytest.mark.parametrize(("lines", "window"), [(1, 4096), (2, 4096), (64, 16), (100, 16), (5000, 4096)])
def test_a_walk_comes_to_every_line_once(lines, window):
    successor = cpu_pointer_chase.cycle(lines, 0, window)
    at, seen = 0, []
    for _ in range(lines):
        seen.append(at)
        at = int(successor[at])
    assert at == 0 and sorted(seen) == list(range(lines))


def test_a_walk_stays_in_a_window_until_it_has_seen_it():
    successor = cpu_pointer_chase.cycle(64, 0, 16)
    at, windows = int(successor[np.flatnonzero(successor // 16 != np.arange(64) // 16)[0]]), []
    for _ in range(64):
        windows.append(at // 16)
        at = int(successor[at])
    assert sum(a != b for a, b in itertools.pairwise(windows)) == 3


def test_the_compiled_walk_follows_the_pointers(monkeypatch):
    monkeypatch.setattr(cpu_pointer_chase, "LOADS", 100)
    table = jnp.asarray(np.repeat(cpu_pointer_chase.cycle(64, 1) * 2, 2))
    at = 0
    for _ in range(100):
        at = int(table[at])
    assert int(jax.jit(cpu_pointer_chase.chase)(table, jnp.int32(0))) == at


@pytest.mark.parametrize("n", [1, 1000, 1 << 19, (1 << 19) + 1])
def test_a_copy_in_large_pages_is_the_array(n):
    x = np.arange(n, dtype=np.int32)
    found = _pages.in_large_pages(x)
    np.testing.assert_array_equal(found, x)
    assert isinstance(found, jax.Array) and found.dtype == jnp.int32
    if hasattr(mmap, "MADV_HUGEPAGE"):
        assert found.unsafe_buffer_pointer() % _pages.LARGE_PAGE == 0


def test_without_large_pages_it_is_an_array_too(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    np.testing.assert_array_equal(_pages.in_large_pages(np.arange(5)), np.arange(5))


def test_rounds_are_attention(monkeypatch):
    """Softmax(q k^T) v in four rounds, up to float32 rounding of sums of 64 terms of size 1 in both products."""
    monkeypatch.setattr(cpu_dispatch, "ROUNDS", 4)
    monkeypatch.setattr(cpu_dispatch, "ROWS", 32)
    q, k, v = jax.random.normal(jax.random.key(0), (3, 64, 64))
    q = q[:32] / 8
    _, l, acc = cpu_dispatch.streamed(q, k, v, 16)
    expected = jax.nn.softmax(q @ k.T, axis=-1) @ v
    np.testing.assert_allclose(acc / l[:, None], expected, atol=2 * 64 * 2**-24 * 4)


def test_readings_are_what_the_probe_measures(monkeypatch):
    """Of small sizes: rates and times are positive numbers, whatever they are."""
    monkeypatch.setattr(cpu_stride, "ELEMENTS", 1 << 12)
    monkeypatch.setattr(cpu_exp, "ELEMENTS", 1 << 10)
    monkeypatch.setattr(cpu_dispatch, "CALLS", 2)
    cases = [
        (cpu_stride, {"stride": 4}),
        (cpu_exp, {"depth": 2}),
        (cpu_dispatch, {"columns": 0}),
        (cpu_pointer_chase, {"bytes": 4096}),
    ]
    for module, point in cases:
        program = module.PROBE.generate(point, connect("cpu"))
        assert program.execute().value > 0 and program.source


@pytest.mark.slow
@pytest.mark.parametrize("probe", probes("cpu"), ids=lambda p: p.name)
def test_every_point_runs(probe):
    for point in probe.points(True):
        program = probe.generate(point, connect("cpu"))
        assert program.execute().value > 0 and program.source
