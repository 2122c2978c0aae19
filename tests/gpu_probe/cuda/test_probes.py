"""Every CUDA probe executed on a GPU in numpy: launches are legal, and the analysis finds what the GPU was made of."""

import dataclasses

import matplotlib.figure
import pytest

from gpu_probe import ncu
from gpu_probe.cuda import once
from gpu_probe.cuda.gpu import Compiler, Memory, arch_of, typed
from gpu_probe.probe import DeviceError, Target, Unsupported
from gpu_probe.probes import cuda_bandwidth, cuda_l2_distance, cuda_occupancy, cuda_stride, cuda_tensor, probes
from gpu_probe.samples import Sample, Samples
from tests.gpu_probe.cuda import fake_gpu
from tests.gpu_probe.cuda.fake_gpu import CLOCK_HZ, FACTS, FakeGpu

PROBES = {p.name: p for p in probes("cuda")}
#: Few and small where the points of the probe are many and large.
POINTS = {
    "cuda_latency": [{"footprint_bytes": 1 << k} for k in range(10, 25)],
    "cuda_l2_distance": [{"footprint_bytes": 1 << 20}],
}
NS = 1e9 / CLOCK_HZ

EXPECTED = {
    "cuda_latency": {
        "l1.latency_cycles": 33.0,
        "l1.latency": 33 * NS,
        "l2.latency": 260 * NS,
        "dram.latency_cycles": 620.0,
        "dram.latency": 620 * NS,
        "l1.size": fake_gpu.L1_BYTES,
        "l2.size": fake_gpu.L2_BYTES,
    },
    "cuda_l2_distance": {"l2.latency_near": fake_gpu.NEAR, "l2.latency_far": fake_gpu.FAR},
    "cuda_stride": {
        "coalescing.1": 1.0,
        "coalescing.4": 0.25,
        "coalescing.32": 0.125,
        "sector.size": 32.0,
        "l1.bw": 128 * 132 * CLOCK_HZ,
    },
    "cuda_banks": {"smem.bank_count": 32.0, "smem.bank_width": 4.0, "smem.bw": 128.0},
    "cuda_occupancy": {"occupancy.saturation_warps": 32.0},
    "cuda_scheduler": {
        "vector.f32": 256 * 132 * CLOCK_HZ,
        "issue.warps1.ilp1": 8 / 128,
        "issue.warps16.ilp1": 1.0,
        "issue.warps4.ilp4": 1.0,
    },
    "cuda_exp": {"sfu.exp_clk": 16.0, "sfu.exp_rate": 16 * 132 * CLOCK_HZ},
    "cuda_bandwidth": {"dram.bw_read": fake_gpu.DRAM_BYTES_PER_S, "dram.bw_copy": fake_gpu.DRAM_BYTES_PER_S},
    "cuda_l2_bandwidth": {"l2.bw": fake_gpu.L2_BYTES_PER_S},
    "cuda_launch": {"launch.stream": fake_gpu.STREAM_S, "launch.graph": fake_gpu.GRAPH_S},
    "cuda_tensor": {
        "tensor_clk.bf16.m64n256k16": 4096.0,
        "tensor_clk.tf32.m16n8k8": 2500.0,
        "tensor.bf16": 4096 * 132 * CLOCK_HZ,
        "tensor.e4m3": 4096 * 132 * CLOCK_HZ,
    },
}


def sampled(probe, repeats=2):
    target = fake_gpu.target()
    programs = [(point, probe.generate(point, target)) for point in POINTS.get(probe.name, probe.points(True))]
    found = []
    for repeat in range(repeats):
        for point, program in programs:
            assert "__global__" in program.source
            r = program.execute()
            found.append(Sample(probe.name, point, probe.unit, repeat, r.value, r.clock_hz, r.counters))
    return Samples(tuple(found))


@pytest.mark.parametrize("name", PROBES)
def test_a_probe_finds_what_the_gpu_was_made_of(name):
    found = PROBES[name].analyze(sampled(PROBES[name]))
    for key, value in EXPECTED[name].items():
        # cycles are whole numbers, of which some hundreds are counted at least
        assert found[key].value == pytest.approx(value, rel=0.01), key
        assert found[key].probes == (name,)


@pytest.mark.parametrize("name", [name for name, p in PROBES.items() if p.plot])
def test_a_probe_draws_a_curve_for_each_series(name):
    axes = matplotlib.figure.Figure().subplots()
    found = sampled(PROBES[name], repeats=1)
    PROBES[name].plot(found, axes)
    series = {"cuda_stride": "level", "cuda_occupancy": "loads", "cuda_scheduler": "ilp"}.get(name)
    expected = 1 if series is None else len({s.point[series] for s in found})
    assert len(axes.lines) == expected + (name == "cuda_banks") and axes.get_title()


def test_every_probe_has_an_expectation():
    assert set(EXPECTED) == set(PROBES)


@pytest.mark.parametrize("name", PROBES)
def test_properties_that_are_found_are_announced(name):
    announced = PROBES[name].properties
    for key in PROBES[name].analyze(sampled(PROBES[name], repeats=1)):
        assert key in announced or f"{key.split('.')[0]}.*" in announced, key


@pytest.mark.parametrize("name", PROBES)
def test_no_samples_tell_nothing(name):
    assert PROBES[name].analyze(Samples()) == {}


def samples(probe, point, *values, **counters):
    unit = PROBES[probe].unit
    return tuple(Sample(probe, point, unit, k, v, CLOCK_HZ, counters) for k, v in enumerate(values))


def test_an_l2_in_one_part_has_no_near_and_far():
    one = samples("cuda_l2_distance", {"footprint_bytes": 1}, 300.0, near=290.0, far=310.0, far_share=0.5, timing=5.0)
    assert PROBES["cuda_l2_distance"].analyze(Samples(one)) == {}


def test_two_clusters_leave_the_slowest_loads_out():
    near, far, share = cuda_l2_distance.two_clusters([200.0] * 60 + [420.0] * 39 + [9000.0])
    assert (near, far) == (200.0, 420.0) and share == pytest.approx(39 / 99)


def test_a_sector_is_not_named_where_the_rates_do_not_flatten():
    assert cuda_stride.sector_bytes({1: 64.0, 2: 32.0, 4: 16.0, 8: 8.0}) is None
    assert cuda_stride.sector_bytes({1: 64.0, 2: 32.0, 4: 16.0, 8: 8.0, 16: 7.9, 32: 7.7}) == 32
    assert cuda_stride.sector_bytes({1: 64.0, 2: 32.0, 4: 16.0, 8: 8.0, 16: 4.0, 32: 3.9}) == 64
    assert cuda_stride.sector_bytes({}) is None


def test_time_over_bytes_is_a_line():
    start, rate = cuda_bandwidth.fit([(1e6, 2e-6 + 1e-6), (4e6, 2e-6 + 4e-6), (16e6, 2e-6 + 16e-6)])
    assert start == pytest.approx(2e-6) and rate == pytest.approx(1e12)
    assert cuda_bandwidth.fit([(1e6, 1e-6)] * 3) is None and cuda_bandwidth.fit([(1e6, 2e-6), (2e6, 1e-6)]) is None


@pytest.mark.parametrize("blocks", range(1, 17))
def test_the_spoiler_leaves_room_for_so_many_blocks_and_no_more(blocks):
    spoiler = cuda_occupancy.spoiler_bytes(FACTS, blocks)
    assert FakeGpu().resident_blocks(None, 128, spoiler) == blocks


def test_what_the_target_cannot_run_says_so():
    old = Target("cuda", "a100", {}, present=False, handle=Compiler("sm_80"))
    with pytest.raises(Unsupported, match="wgmma needs sm_90a, a100 is sm_80"):
        cuda_tensor.generate({"instruction": "wgmma", "dtype": "bf16", "n": 256}, old)


def test_a_described_gpu_executes_nothing():
    described = dataclasses.replace(fake_gpu.target(), present=False)
    program = PROBES["cuda_exp"].generate({"warps": 8}, described)
    with pytest.raises(DeviceError, match="only compiled for here"):
        program.execute()


def test_arguments_are_checked_against_the_kernel():
    t = cuda_occupancy.Stream()
    with pytest.raises(TypeError, match="probe_occupancy_loads1: expected 3 arguments, found 1"):
        typed(t, (1,))
    memory = Memory(None, 16)
    with pytest.raises(TypeError, match=r"expected const uint4\*, found 7"):
        typed(t, (7, memory, 1))


def test_hopper_is_compiled_for_with_its_own_instructions():
    assert [arch_of(cc) for cc in ((8, 0), (9, 0), (10, 0))] == ["sm_80", "sm_90a", "sm_100"]


def test_what_a_profiler_runs_names_point_and_kernel_of_each_execution():
    lines = once.run("cuda_banks", True, fake_gpu.target())
    assert lines[0] == {"point": {"stride": 1}, "kernel": "probe_banks"} and len(lines) == 7
    assert once.main(["nothing"]) == 2


def test_counters_stand_beside_what_is_timed():
    banks = PROBES["cuda_banks"]
    own = sampled(banks, repeats=1)
    counted = {"shared_wavefronts": 4096.0, "shared_requests": 1024.0}
    both = ncu.with_counters(own, banks.name, {'{"stride": 4}': counted, '{"stride": 8}': counted})
    agreements = {a.point["stride"]: a for a in ncu.cross_check(both)}
    assert agreements[4].agrees and not agreements[8].agrees
    assert str(agreements[8]).endswith("cycles and wavefronts of a request differ: timed 8, counted 4")
