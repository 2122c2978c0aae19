"""Execution: order, warm-up, continuation, failures, and the command line on probes that need no machine."""

import dataclasses
import json

import pytest
from rich.console import Console

import gpu_probe
from gpu_probe import PropertyMap, cli, report
from gpu_probe.devices import connect
from gpu_probe.devices.cpu import caches
from gpu_probe.probe import DeviceError, Probe, Target
from gpu_probe.probes import probes
from gpu_probe.progress import Progress
from gpu_probe.runner import Session, analyze, configuration, load_samples, measure, visits
from gpu_probe.samples import Reading, Sample, Samples
from gpu_probe.statistics import measured as measured_of
from tests.gpu_probe.maps import cpu_map, measured

TARGET = Target("cpu", "test", {})


class Machine:
    """Programs that count their executions and tell the parameter; with `stop_at` the user interrupts there."""

    def __init__(self, stop_at=None, broken=()):
        self.generated, self.executed, self.stop_at, self.broken = [], [], stop_at, broken

    def probe(self, name="fake", points=(1, 2, 3)):
        def generate(point, target):
            if point["n"] in self.broken:
                raise RuntimeError("no such thing")
            self.generated.append(point["n"])
            return Program(self, point["n"])

        return Probe(
            name=name,
            kind="cpu",
            measures="n",
            unit="ns",
            parameters={"n": "number"},
            expected="a line",
            caveats=("none",),
            points=lambda quick: [{"n": n} for n in points],
            generate=generate,
            analyze=lambda s: {"l1.latency": measured_of(s.values(), "ns", "all", name)},
            properties=("l1.latency",),
            plot=lambda s, axes: axes.plot(s.values()),
        )


@dataclasses.dataclass
class Program:
    machine: Machine
    n: int
    source = "n"

    def execute(self):
        self.machine.executed.append(self.n)
        if len(self.machine.executed) == self.machine.stop_at:
            raise KeyboardInterrupt
        return Reading(float(self.n), 1e9, {"hits": 2.0})


def session(tmp_path, probe, repeats=4, seed=0, fresh=False):
    return Session(tmp_path / "samples.json", configuration(TARGET, [probe], False, repeats, seed), fresh)


def test_each_visit_is_warm_and_each_repetition_has_its_own_order(tmp_path):
    machine = Machine()
    probe, steps = machine.probe(points=range(6)), []
    measure(TARGET, [probe], session(tmp_path, probe), advance=steps.append)
    assert sorted(machine.generated) == list(range(6))
    assert machine.executed[::2] == machine.executed[1::2]
    orders = [tuple(machine.executed[i : i + 12 : 2]) for i in range(0, 48, 12)]
    assert len(set(orders)) > 1 and all(sorted(o) == list(range(6)) for o in orders)
    found = load_samples(tmp_path / "samples.json")
    assert {len(v) for v in found.by("n").values()} == {4} and found.all[0].clock_hz == 1e9
    assert found.counters_by("n", "hits")[3] == [2.0] * 4
    assert len(steps) == visits([probe], 4, False) == 24


def test_an_interrupted_run_continues_and_measures_nothing_twice(tmp_path):
    first = Machine(stop_at=11)
    probe = first.probe()
    begun = session(tmp_path, probe)
    with pytest.raises(KeyboardInterrupt):
        measure(TARGET, [probe], begun)
    begun.write()
    second = Machine()
    again = session(tmp_path, second.probe())
    assert len(again.samples) == 5 and again.notes == ["5 samples kept from an earlier run"]
    measure(TARGET, [second.probe()], again)
    assert len(second.executed) == 2 * (12 - 5)
    assert len({(s.point["n"], s.repeat) for s in load_samples(tmp_path / "samples.json")}) == 12


@pytest.mark.parametrize("change", [{"repeats": 5}, {"seed": 1}])
def test_another_configuration_is_no_continuation(tmp_path, change):
    probe = Machine().probe()
    measure(TARGET, [probe], session(tmp_path, probe))
    other = session(tmp_path, probe, **change)
    assert other.samples == [] and "cannot be continued" in other.notes[0]
    assert (tmp_path / "samples.stale-1.json").exists()


def test_a_broken_file_is_set_aside(tmp_path):
    (tmp_path / "samples.json").write_text('{"schema": 1, "samples": [{}]')
    assert "corrupt" in session(tmp_path, Machine().probe()).notes[0]


def test_a_point_that_fails_is_named_and_the_others_are_measured(tmp_path):
    probe = Machine(broken=(2,)).probe()
    (failure,) = measure(TARGET, [probe], session(tmp_path, probe))
    assert (failure.probe, failure.point, failure.error) == ("fake", {"n": 2}, "RuntimeError: no such thing")
    assert set(load_samples(tmp_path / "samples.json").by("n")) == {1, 3}
    assert json.loads((tmp_path / "samples.json").read_text())["failures"][0]["point"] == {"n": 2}


def test_two_probes_of_one_property_are_refused():
    both = [Machine().probe(n) for n in ("a", "b")]
    taken = Samples(tuple(Sample(n, {"n": 1}, "ns", 0, 1.0) for n in ("a", "b")))
    with pytest.raises(ValueError, match=r"b: expected properties that no other probe gives, found l1\.latency again"):
        analyze(TARGET, both, taken)


@pytest.mark.parametrize(("name", "value"), [("value", float("inf")), ("repeat", -1), ("unit", "x")])
def test_a_sample_that_is_no_measurement_cannot_be_made(name, value):
    right = {"probe": "p", "point": {}, "unit": "s", "repeat": 0, "value": 1.0}
    with pytest.raises(ValueError, match="expected"):
        Sample(**(right | {name: value}))


def test_probes_are_found_and_say_what_they_are():
    found = probes()
    assert {"cpu_bandwidth", "cpu_dispatch", "cpu_exp", "cpu_gemm", "cpu_pointer_chase", "cpu_stride"} <= {
        p.name for p in probes("cpu")
    }
    for probe in found:
        assert probe.expected and probe.caveats and probe.properties
        assert 0 < len(probe.points(True)) <= len(probe.points(False))
    names = [n for p in probes("cpu") for n in p.properties]
    assert len(names) == len(set(names))


def test_a_point_without_its_parameters_is_refused():
    with pytest.raises(ValueError, match=r"Probe\('fake', points=...\): expected m, found n"):
        dataclasses.replace(Machine().probe(), parameters={"m": "other"})


def test_devices():
    here = connect("cpu")
    assert here.name and here.description()["cores"] >= 1
    with pytest.raises(DeviceError, match="found 'z80'"):
        connect("cpu", "z80")
    with pytest.raises(DeviceError, match="expected a device of kind"):
        connect("abacus")


def test_caches_of_the_system(tmp_path):
    rows = [(1, "Data", "32K"), (1, "Instruction", "32K"), (2, "Unified", "1M")]
    for n, row in enumerate(rows):
        (tmp_path / f"index{n}").mkdir()
        names = ("level", "type", "size", "coherency_line_size", "shared_cpu_list")
        for name, text in zip(names, (*row, 64, "0-1"), strict=True):
            (tmp_path / f"index{n}" / name).write_text(f"{text}\n")
    (tmp_path / "index9").mkdir()  # one that tells nothing
    assert [(c["level"], c["bytes"], c["line_bytes"]) for c in caches(tmp_path)] == [(1, 2**15, 64), (2, 2**20, 64)]
    assert caches(tmp_path / "nothing") == []


# -- command line ---------------------------------------------------------------------------------------------------


@pytest.fixture
def line(monkeypatch, tmp_path):
    """Runs a command on the fake probe; returns its exit code and what it printed."""
    machine = Machine()
    monkeypatch.setattr(cli, "probes", lambda kind=None: (machine.probe(),))

    def run(*arguments, broken=(), stop_at=None):
        machine.broken, machine.stop_at, machine.executed = broken, stop_at, []
        console = Console(record=True, width=200, force_terminal=False)
        code = cli.main([str(a) for a in arguments], console)
        return code, console.export_text()

    run.folder = tmp_path / "out"
    run.executed = lambda: machine.executed
    return run


def test_run_writes_map_samples_and_images(line):
    code, text = line("run", "--output", line.folder, "--repeats", 3)
    assert code == cli.EXIT_DONE and "l1.latency" in text and "measured in" in text
    assert {p.name for p in line.folder.iterdir()} == {"map.json", "samples.json", "fake.png"}
    assert PropertyMap.load(line.folder / "map.json").get("l1.latency", "ns") == 2.0
    code, text = line("run", "--output", line.folder, "--repeats", 3)
    assert "all 9 samples are an earlier run's, nothing was measured; --fresh" in text and "measured in" not in text
    assert line("compare", line.folder, line.folder)[0] == cli.EXIT_DONE
    assert "l1.latency" in line("show", line.folder, "--methods")[1]
    (line.folder / "fake.png").unlink()
    assert line("plot", line.folder)[0] == cli.EXIT_DONE and (line.folder / "fake.png").stat().st_size > 1000


def test_an_interrupted_command_continues(line, capsys):
    code, _ = line("run", "--output", line.folder, "--repeats", 3, stop_at=9)
    assert code == cli.EXIT_INTERRUPTED and "the same command continues" in capsys.readouterr().err
    assert line("run", "--output", line.folder, "--repeats", 3)[0] == cli.EXIT_DONE


def test_failures_are_named_and_exit_with_1(line):
    code, text = line("run", "--output", line.folder, "--repeats", 3, broken=(2,))
    assert code == cli.EXIT_WRONG and "failed: fake {'n': 2}: RuntimeError: no such thing" in text
    code, text = line("run", "--dry-run", broken=(2,))
    assert code == cli.EXIT_WRONG and "fake: 2 of 3 programs compile" in text


def test_dry_run_executes_nothing(line):
    code, text = line("run", "--dry-run", "--output", line.folder)
    assert code == cli.EXIT_DONE and "fake: 3 of 3 programs compile" in text and not line.folder.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "nothing.json"], "expected a file, a folder that has map.json, or one of"),
        (["run", "--probes", "abacus"], "no probe for cpu has ['abacus'] in its name"),
        (["run", "--profile"], "--profile: expected --device cuda, whose kernels Nsight Compute counts, found cpu"),
        (["run", "--target", "h200"], "--target names a GPU to compile for, which needs --dry-run"),
    ],
)
def test_wrong_use_is_one_sentence(line, capsys, arguments, message):
    assert line(*arguments)[0] == cli.EXIT_USAGE
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("command", [["run"], ["plot", "h200"]])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(line, tmp_path, capsys, command):
    (tmp_path / "file").write_text("kept")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", "/proc/foo"):
        assert line(*command, "--output", folder)[0] == cli.EXIT_USAGE
        error = capsys.readouterr().err
        assert f"--output: expected a folder for the results, found '{folder}'" in error and error.count("\n") == 1
    assert line.executed() == [] and (tmp_path / "file").read_text() == "kept"


def test_a_probe_of_another_kind_is_hinted_at(capsys):
    assert cli.main(["run", "--probes", "cuda_exp"]) == cli.EXIT_USAGE
    assert "no probe for cpu has ['cuda_exp'] in its name, but cuda has: --device cuda" in capsys.readouterr().err


@pytest.mark.parametrize("repeats", ["1.5", "2", "many"])
def test_repeats_are_a_whole_number(line, capsys, repeats):
    with pytest.raises(SystemExit):
        line("run", "--repeats", repeats)
    assert f"argument --repeats: expected a whole number from 3 on, found {repeats!r}" in capsys.readouterr().err


def test_help_names_the_targets(line, capsys):
    with pytest.raises(SystemExit):
        line("run", "--help")
    assert "a100, b200, h100, h200, l4, or an architecture such as sm_90a" in " ".join(capsys.readouterr().out.split())


def test_a_log_has_a_line_for_each_tenth_that_takes_its_time():
    now = [0.0]
    console = Console(record=True, width=200, force_terminal=False)
    with Progress("x", 20, console, lambda: now[0], tenths=True) as progress:
        for step in range(20):
            now[0] += 0.125 if step < 10 else 1.0
            progress.advance("step")
    found = [text.split() for text in console.export_text().splitlines()]
    assert [words[1] for words in found] == ["8/20", "12/20", "14/20", "16/20", "18/20", "20/20"]
    assert found[-1] == ["x", "20/20", "11", "s"]


def test_a_noisy_run_is_told_with_what_to_do():
    probe = Machine().probe()
    still, wide = (
        Samples(tuple(Sample("fake", {"n": 1}, "ns", i, v) for i, v in enumerate(x))) for x in ([2, 2], [1, 9])
    )
    assert report.noise([probe], still, 2.0, 2) is None and report.noise([probe], still, None, 2) is None
    assert "(load average 2.5 on 2 cores): stop what else runs here" in (report.noise([probe], still, 2.5, 2) or "")
    assert "(median spread above 100% of fake)" in (report.noise([probe], wide, None, 2) or "")


def test_maps_that_disagree_exit_with_1(line, tmp_path):
    cpu_map(l1__size=measured(32, "KiB")).save(tmp_path / "a.json")
    cpu_map(l1__size=measured(1, "MiB")).save(tmp_path / "b.json")
    code, text = line("compare", tmp_path / "a.json", tmp_path / "b.json")
    assert code == cli.EXIT_WRONG and "1 of 1 properties disagree: l1.size" in text


def test_list_says_what_to_expect(line):
    code, text = line("list")
    assert code == cli.EXIT_DONE and "expected: a line" in text and "caveat: none" in text


def test_measure_from_python_keeps_samples_where_it_is_told_to(monkeypatch, tmp_path):
    machine = Machine()
    monkeypatch.setattr("gpu_probe.probes.probes", lambda kind=None: (machine.probe(),))
    assert gpu_probe.measure(quick=True).get("l1.latency", "ns") == 2.0
    gpu_probe.measure(quick=True, output=tmp_path)
    taken = len(machine.executed)
    assert gpu_probe.measure(quick=True, output=tmp_path).get("l1.latency", "ns") == 2.0
    assert len(machine.executed) == taken and len(load_samples(tmp_path / "samples.json")) == 15
    assert gpu_probe.load("h200").name == "NVIDIA H200"
