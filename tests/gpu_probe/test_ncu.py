"""Reading Nsight Compute. The samples follow its documentation; no recording of a real run exists yet."""

import types

import pytest

from gpu_probe import ncu
from gpu_probe.probes import probes
from gpu_probe.samples import Sample, Samples

TIME = "gpu__time_duration.sum"
SECTORS = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio"
#: Documented form of ``--page raw --csv --print-units base``: names, units, one row a launch.
FIRST = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size")
L1 = "probe_stride_l1(const float *, unsigned long long *)"
ROWS = (
    (*FIRST, "Device", "CC", TIME, SECTORS),
    ("",) * 11 + ("nsecond", "sector/request"),
    ("0", "1234", "python", "host", L1, "1", "7", "(1024, 1, 1)", "(132, 1, 1)", "0", "9.0", "12,345.50", "4"),
    ("1", "1234", "python", "host", L1, "1", "7", "(1024, 1, 1)", "(132, 1, 1)", "0", "9.0", "20000", "8"),
    (
        "2",
        "1234",
        "python",
        "host",
        "probe_stride_dram",
        "1",
        "7",
        "(256, 1, 1)",
        "(1, 1, 1)",
        "0",
        "9.0",
        "30000",
        "n/a",
    ),
)
TABLE = "\n".join(",".join(f'"{cell}"' for cell in row) for row in ROWS)
DOCUMENTED = f"==PROF== Connected to process 1234\n{TABLE}\n"
NAMES = {"seconds": TIME, "sectors_per_request": SECTORS}


def test_a_table_is_read_with_its_units():
    first, second, third = ncu.read_csv(DOCUMENTED)
    assert first.kernel == second.kernel == "probe_stride_l1" and third.kernel == "probe_stride_dram"
    assert first.values == {TIME: pytest.approx(12345.5e-9), SECTORS: 4.0}
    assert third.values == {TIME: pytest.approx(30e-6)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "ERR_NVGPUCTRPERM"),
        ('"ID","Kernel Name"\n"0","probe_exp"\n', "expected a row of units"),
    ],
)
def test_what_is_no_table_is_shown(text, message):
    with pytest.raises(ncu.ProfilerError, match=message):
        ncu.read_csv(text)


def test_executions_get_the_launches_of_their_kernel_in_order():
    printed = "\n".join(
        [
            "something else",
            '{"point": {"level": "l1", "stride": 1}, "kernel": "probe_stride_l1"}',
            '{"point": {"level": "dram", "stride": 1}, "kernel": "probe_stride_dram"}',
            '{"point": {"level": "l1", "stride": 2}, "kernel": "probe_stride_l1"}',
        ]
    )
    found = ncu.match(printed, ncu.read_csv(DOCUMENTED), NAMES)
    assert found['{"level": "l1", "stride": 2}'] == {"seconds": pytest.approx(20e-6), "sectors_per_request": 8.0}
    assert found['{"level": "dram", "stride": 1}'] == {"seconds": pytest.approx(30e-6)}
    with pytest.raises(ncu.ProfilerError, match="no launch of probe_stride_dram was profiled"):
        ncu.match(printed + '\n{"point": {"level": "dram", "stride": 2}, "kernel": "probe_stride_dram"}',
                  ncu.read_csv(DOCUMENTED), NAMES)  # fmt: skip


def test_the_first_name_that_the_profiler_knows_is_used():
    known = ["dram__bytes_op_read", "gpu__time_duration"]
    assert ncu.resolve(known, ("seconds", "dram_read_bytes", "warps_active")) == {
        "seconds": TIME,
        "dram_read_bytes": "dram__bytes_op_read.sum",
    }


def test_what_is_counted_is_known_and_of_a_probe():
    assert set(ncu.COUNTED) <= {p.name for p in probes("cuda")}
    assert {what for counted in ncu.COUNTED.values() for what in counted} <= set(ncu.METRICS)


def test_the_profiler_is_driven_over_one_probe(tmp_path, monkeypatch):
    report = tmp_path / "cuda_stride.ncu-rep"
    printed = '{"point": {"level": "l1", "stride": 1}, "kernel": "probe_stride_l1"}\n'
    seen = []

    def run(command, **options):
        seen.append(command)
        text = {
            "--query-metrics": f"{TIME.split('.')[0]}  time\n{SECTORS.split('.')[0]}  sectors\n",
            "--import": DOCUMENTED,
        }
        return types.SimpleNamespace(returncode=0, stdout=text.get(command[1], printed), stderr="")

    monkeypatch.setattr(ncu.subprocess, "run", run)
    monkeypatch.setattr(ncu.shutil, "which", lambda name: f"/opt/{name}")
    found = ncu.profile("cuda_stride", tmp_path)
    assert found == {'{"level": "l1", "stride": 1}': {"seconds": pytest.approx(12345.5e-9), "sectors_per_request": 4.0}}
    assert seen[1][0] == "/opt/ncu" and seen[1][-3:] == ["gpu_probe.cuda.once", "cuda_stride", "--quick"]
    assert f"{TIME},{SECTORS}" in seen[1] and str(report.with_suffix("")) in seen[1]
    assert seen[2][:3] == ["/opt/ncu", "--import", str(report)]


def test_probes_that_have_counters_are_profiled_and_compared(monkeypatch, tmp_path):
    def profile(probe, folder):
        if probe == "cuda_occupancy":
            raise ncu.ProfilerError("no permission")
        return {'{"stride": 4}': {"shared_wavefronts": 8.0, "shared_requests": 4.0}}

    monkeypatch.setattr(ncu, "profile", profile)
    own = Samples(
        (Sample("cuda_banks", {"stride": 4}, "cycles", 0, 4.0), Sample("cuda_exp", {"warps": 8}, "ratio", 0, 1.0))
    )
    found, notes = ncu.profile_all(own, ["cuda_banks", "cuda_exp", "cuda_occupancy"], tmp_path)
    assert found.all[0].counters == {"ncu.shared_wavefronts": 8.0, "ncu.shared_requests": 4.0}
    assert found.all[1].counters == {}
    assert notes == [
        "cuda_occupancy was not profiled: no permission",
        "cuda_banks stride=4: cycles and wavefronts of a request differ: timed 4, counted 2",
        "0 of 1 comparisons with counters agree",
    ]


def test_a_missing_or_failing_profiler_says_what_it_said(monkeypatch, tmp_path):
    monkeypatch.setattr(ncu.shutil, "which", lambda name: None)
    with pytest.raises(ncu.ProfilerError, match="ncu is not on PATH"):
        ncu.profile("cuda_stride", tmp_path)
    monkeypatch.setattr(ncu.shutil, "which", lambda name: "false")
    with pytest.raises(ncu.ProfilerError, match="false ended with code 1"):
        ncu.profile("cuda_stride", tmp_path)


def test_a_report_is_read_by_ncu_report(monkeypatch):
    metric = types.SimpleNamespace(has_value=lambda: True, as_double=lambda: 1500.0, unit=lambda: "nsecond")
    action = types.SimpleNamespace(
        name=lambda: "probe_exp(const float *)",
        metric_names=lambda: [TIME, "device"],
        metric_by_name=lambda name: metric,
    )
    part = types.SimpleNamespace(num_actions=lambda: 1, action_by_idx=lambda k: action)
    context = types.SimpleNamespace(num_ranges=lambda: 1, range_by_idx=lambda k: part)
    monkeypatch.setattr(ncu.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(
        ncu.importlib, "import_module", lambda name: types.SimpleNamespace(load_report=lambda path: context)
    )
    (launch,) = ncu.read_report("a.ncu-rep")
    assert launch == ncu.Launch("probe_exp", {TIME: pytest.approx(1.5e-6)})


def test_a_report_without_ncu_report_names_the_package(monkeypatch):
    monkeypatch.setattr(ncu.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install ncu-report"):
        ncu.read_report("a.ncu-rep")


COMPARED = [
    ("cuda_stride", {"level": "l1", "stride": 2}, 64.0, {}, {"sectors_per_request": 8.0}, True),
    ("cuda_stride", {"level": "dram", "stride": 2}, 9.0, {}, {"sectors_per_request": 8.0}, None),
    ("cuda_banks", {"stride": 2}, 2.0, {}, {"shared_wavefronts": 40.0, "shared_requests": 20.0}, True),
    ("cuda_occupancy", {"warps": 16, "loads": 1}, 1e12, {}, {"warps_active": 15.5}, True),
    ("cuda_occupancy", {"warps": 16, "loads": 1}, 1e12, {}, {"warps_active": 8.0}, False),
    (
        "cuda_bandwidth",
        {"what": "read", "array_bytes": 1},
        4e12,
        {"bytes": 1e9},
        {"dram_read_bytes": 1e9, "dram_write_bytes": 1e7, "seconds": 2.6e-4},
        True,
    ),
    ("cuda_exp", {"warps": 8}, 16.0, {}, {"seconds": 1e-6}, None),
]


@pytest.mark.parametrize(("probe", "point", "value", "own", "counted", "agrees"), COMPARED)
def test_own_times_and_counters_are_held_together(probe, point, value, own, counted, agrees):
    unit = next(p.unit for p in probes("cuda") if p.name == probe)
    counters = {**own, **{ncu.PREFIX + k: v for k, v in counted.items()}}
    found = ncu.cross_check(Samples((Sample(probe, point, unit, 0, value, None, counters),)))
    assert [a.agrees for a in found] == ([] if agrees is None else [agrees] * len(found)) and (found == []) == (
        agrees is None
    )
