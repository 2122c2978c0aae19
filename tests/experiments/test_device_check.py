"""The check of the kernels on a GPU, without one: its cases, its judgement, its budget, its files and its dry run."""

import io
import json
import re
import sys

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from experiments._progress import Progress
from experiments.device_check import ceilings, cli, correctness, probes, report, timing
from experiments.device_check.cases import every_case
from experiments.device_check.run import run
from pallas_kernels import _triton, device_case
from pallas_kernels.device_case import DeviceCase

CASES = {name: case for name, case in every_case("h200").items() if case.refusal("h200") is None}
BOUND = device_case.tolerance("float32", 8)


def product(x, w):
    return (x @ w,)


def exact(x, w):
    return (x.astype(jnp.float64) @ w.astype(jnp.float64),)


def small(name="small", kernel=product, **changes):
    def arrays(key):
        del key  # generating random numbers takes long to compile
        return jnp.sin(jnp.arange(32.0)).reshape(4, 8), jnp.cos(jnp.arange(32.0)).reshape(8, 4)

    facts = {"unfused": product, "reference": exact, "tolerances": (BOUND,), "flops": 256, "bytes": 320}
    return DeviceCase(name=name, arrays=arrays, kernel=kernel, **{**facts, **changes})


def off_by(error):
    return lambda x, w: (x @ w + error,)


# -- cases ---------------------------------------------------------------------------------------------


def test_every_kernel_package_and_fuse_have_cases():
    packages = {name.split("/")[0] for name in CASES}
    assert packages >= {"fuse", "gemm_epilogue", "norm"}
    assert sum(case.flops > 0 for case in CASES.values()) >= 8


@pytest.mark.parametrize("name", CASES)
def test_kernel_baseline_and_reference_agree_on_shapes(name):
    case = CASES[name]
    avals = case.avals()
    kernel, unfused = (jax.eval_shape(f, *avals) for f in (case.kernel, case.unfused))
    with jax.enable_x64(True):
        reference = jax.eval_shape(case.reference, *avals)
    shapes = [[x.shape for x in results] for results in (kernel, unfused, reference)]
    assert shapes[0] == shapes[1] == shapes[2] and len(shapes[0]) == len(case.tolerances)
    assert [x.dtype for x in kernel] == [x.dtype for x in unfused]
    assert all(x.dtype == jnp.float64 for x in reference)
    assert case.bytes >= device_case.nbytes(kernel)


def test_a_package_that_lists_no_cases_is_named(monkeypatch):
    from pallas_kernels.norm import cases

    monkeypatch.setattr(cases, "DEVICE", [small()])
    with pytest.raises(TypeError, match=r"pallas_kernels\.norm\.cases must export DEVICE: tuple"):
        device_case.discover()
    monkeypatch.setattr(cases, "DEVICE", (small(), small()))
    with pytest.raises(ValueError, match=r"pallas_kernels\.norm\.cases: two cases of the name 'small'"):
        device_case.discover()


@pytest.mark.parametrize(
    "changes", [{"name": ""}, {"tolerances": ()}, {"tolerances": (2.0,)}, {"flops": -1}, {"bytes": 0}]
)
def test_a_case_checks_itself(changes):
    with pytest.raises(ValueError, match="DeviceCase"):
        small(**changes)


def test_a_bound_grows_with_the_length_of_the_sum_and_not_with_float32_noise():
    assert device_case.tolerance("bfloat16") == pytest.approx(2.0**-6, rel=1e-4)
    assert device_case.tolerance("float32", 65536) < 0.01 < device_case.tolerance("bfloat16", 65536)


# -- correctness -----------------------------------------------------------------------------------------


def checked(kernel, **changes):
    case = small(kernel=kernel, **changes)
    return correctness.check(case, jax.jit(kernel), correctness.arrays_of(case, 0))


def test_a_right_kernel():
    found = checked(product)
    assert found["correct"] and found["repeats"] and 0 <= found["errors"][0] <= BOUND


@pytest.mark.parametrize("error", [1e-3, -1.0])
def test_a_wrong_kernel(error):
    found = checked(off_by(error))
    assert not found["correct"] and found["errors"][0] > BOUND


def test_a_result_that_is_not_a_number_is_wrong_and_fits_in_json():
    found = checked(lambda x, w: ((x @ w).at[0, 0].set(jnp.nan),))
    assert not found["correct"] and found["errors"] == [None]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_other_bits_on_another_run_are_wrong_even_if_close():
    case, calls = small(), []

    def racy(x, w):
        calls.append(None)
        return (jnp.nextafter((x @ w), jnp.inf) if len(calls) == 3 else x @ w,)

    found = correctness.check(case, racy, correctness.arrays_of(case, 0))
    assert not found["repeats"] and not found["correct"] and found["errors"][0] <= BOUND


def test_results_of_other_shapes_are_an_error():
    with pytest.raises(ValueError, match=r"expected results of the shapes \[\(4, 4\)\], found \[\(4, 4\), \(4, 4\)\]"):
        checked(lambda x, w: (x @ w,) * 2)


# -- running ---------------------------------------------------------------------------------------------


class Fixed:
    """A clock that says what it is told: the first program takes the first time, and so on."""

    name = "a fixed clock"

    def __init__(self, *times_s):
        self.times = times_s
        self.programs = []

    def times_s(self, program, args, count):
        if program not in self.programs:
            self.programs.append(program)
        return [self.times[self.programs.index(program) % len(self.times)]] * count


CEILINGS = {"copy_bytes_per_s": 4e12, "product_flops_per_s": 8e14, "product_by": "XLA"}


def run_on(cases, clock=None, budget_s=600.0, **others):
    kept = []
    console = Console(file=io.StringIO(), width=200)
    with Progress("check", 2 * len(cases) + 1, console) as progress:
        entries = run(
            cases,
            clock or Fixed(1e-3, 2e-3),
            budget_s,
            progress,
            lambda name, value: kept.append((name, json.loads(json.dumps(value, allow_nan=False)))),
            measure_ceilings=lambda clock: CEILINGS,
            **others,
        )
    return entries, kept, console.file.getvalue()


def fails(x, w):
    raise RuntimeError("no such kernel\nsecond line")


def test_all_are_checked_before_any_is_timed_and_only_those_that_are_right_are():
    cases = {"right": small(), "wrong": small(kernel=off_by(1.0)), "failed": small(kernel=fails)}
    entries, kept, log = run_on(cases)
    assert [name for name, _ in kept] == ["right", "wrong", "failed", "ceilings", "right"]
    assert {name: e["status"] for name, e in entries.items()} == {
        "right": "right",
        "wrong": "wrong",
        "failed": "failed",
    }
    assert entries["failed"]["error"] == "RuntimeError: no such kernel\nsecond line"
    assert "times" not in entries["wrong"]
    times = entries["right"]["times"]
    assert (times["kernel"]["median_s"], times["unfused"]["median_s"], times["kernel"]["samples"]) == (1e-3, 2e-3, 20)
    assert "failed: RuntimeError: no such kernel" in log and "wrong" in log


def test_a_library_is_timed_too():
    entries, _, _ = run_on({"a": small(libraries={"cuBLASLt": device_case.CUBLASLT})}, Fixed(1e-3, 2e-3, 3e-3))
    assert entries["a"]["times"]["cuBLASLt"]["median_s"] == 3e-3


def test_without_time_nothing_is_checked_and_that_shows():
    entries, kept, _ = run_on({"a": small(), "b": small()}, budget_s=1e-9)
    assert all(e == {"status": "not checked"} for e in entries.values()) and kept == []


def test_a_step_that_would_not_fit_is_not_begun():
    from experiments.device_check.run import Budget

    seconds = [0.0]
    budget = Budget(10.0, now=lambda: seconds[0])
    assert budget.fits()
    budget.step(lambda: seconds.__setitem__(0, 6.0))
    assert not budget.fits()  # 6 of 10 are gone, and the longest step took 6


def test_the_wall_clock_where_there_is_no_cupti():
    clock, why = timing.clock()
    assert clock.name == "wall clock" and why.startswith("no CUPTI: ")
    found = timing.medians_s({"a": jax.jit(lambda x: x + 1)}, (jnp.ones(4),), clock, rounds=1, per_round=2)
    assert 0 < found["a"]["low_s"] <= found["a"]["median_s"] <= found["a"]["high_s"]


def test_ceilings():
    found = ceilings.measure(Fixed(1e-3, 4e-3, 2e-3), copied=1 << 10, side=16)
    assert found["copy_bytes_per_s"] == 4 * 1024 / 1e-3  # read and written, 2 bytes each
    assert (found["product_by"], found["product_flops_per_s"]) == ("cuBLASLt", 2 * 16**3 / 2e-3)


# -- what a reader sees ----------------------------------------------------------------------------------


def summary(seconds):
    return {"median_s": seconds, "low_s": seconds, "high_s": seconds, "samples": 20}


def text_of(table):
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(table)
    return console.file.getvalue()


def test_the_table(golden):
    right = {"status": "right", "errors": [1e-3, 2e-4], "tolerances": [1e-2, 1e-3], "repeats": True}
    entries = {
        "product": {
            **right,
            "times": {"kernel": summary(1e-3), "unfused": summary(1.5e-3), "cuBLASLt": summary(1.1e-3)},
            "flops": 6 * 10**11,
            "bytes": 10**9,
        },
        "rows": {
            **right,
            "times": {"kernel": summary(5e-4), "unfused": summary(4e-4)},
            "flops": 0,
            "bytes": 10**9,
        },
        "not timed": right,
        "racy": {**right, "status": "wrong", "repeats": False},
        "nan": {**right, "status": "wrong", "errors": [None, 0.0]},
        "failed": {"status": "failed", "error": "XlaRuntimeError: one\nCUDA_ERROR: two"},
        "late": {"status": "not checked"},
    }
    golden(report.ceilings_text(CEILINGS) + "\n" + text_of(report.check_table(entries, CEILINGS, "CUPTI")))


def test_what_cannot_run_here_is_refused_with_the_reason(tmp_path):
    options = cli.parser().parse_args(["--output", str(tmp_path)])
    console = Console(file=io.StringIO(), width=200)
    found = cli.on_device(
        {"a/small": small()},
        options,
        console,
        clock=(Fixed(1e-3), ""),
        refused={"a/other": "needs another jax"},
        measure_ceilings=lambda clock: CEILINGS,
    )
    entries = json.loads((tmp_path / "device_check.json").read_text())["entries"]
    assert found == 0 and entries["a/other"] == {"status": "refused", "reason": "needs another jax"}
    assert entries["a/small"]["status"] == "right"
    for text in (console.file.getvalue(), text_of(report.dry_table({"a/other": entries["a/other"]}, "h200"))):
        assert re.search("a/other .*refused: needs another jax", text)


def test_triton_kernels_have_cases_that_are_refused_where_it_does_not_work(monkeypatch):
    missing = _triton.Unavailable("jax-triton", "none")
    monkeypatch.setattr(_triton, "unavailable", lambda: missing)
    triton = {name: case for name, case in device_case.discover().items() if " by Triton/" in name}
    assert {name.split(" ")[0] for name in triton} == {"attention", "gemm_epilogue", "norm"}
    assert {case.refusal("a100") for case in triton.values()} == {"needs jax-triton; found none"}
    monkeypatch.setattr(_triton, "unavailable", lambda: None)
    assert {case.refusal("l4") for case in triton.values()} == {None}


def main(capsys, *arguments, cases=None, run_probes=lambda target, folder: 0):
    stream = io.StringIO()
    code = cli.main(
        list(arguments), Console(file=stream, width=200), lambda target: cases or {"a/small": small()}, run_probes
    )
    return code, stream.getvalue() + capsys.readouterr().err


def test_without_a_gpu_it_says_so_and_fails(capsys):
    code, text = main(capsys)
    assert code == 2 and "there is no GPU here (jax runs on cpu), so nothing was checked; --dry-run" in text


def test_cases_are_listed_and_chosen(capsys):
    cases = {"a/one": small(), "b/two": small()}
    assert main(capsys, "--list", cases=cases) == (0, "a/one\nb/two\n")
    assert main(capsys, "--list", "--cases", "two", cases=cases) == (0, "b/two\n")
    code, text = main(capsys, "--cases", "three", cases=cases)
    assert code == 2 and "no case has ['three'] in its name" in text


@pytest.mark.parametrize(("kernel", "code"), [(product, 0), (off_by(1.0), 1), (fails, 1)])
def test_on_a_device(tmp_path, kernel, code):
    """The whole of it but the GPU: the file is whole, and the exit code says whether all is right."""
    options = cli.parser().parse_args(["--output", str(tmp_path)])
    console = Console(file=io.StringIO(), width=200)
    found = cli.on_device(
        {"a/small": small(kernel=kernel)},
        options,
        console,
        clock=(Fixed(1e-3), "no CUPTI"),
        measure_ceilings=lambda clock: CEILINGS,
    )
    text = console.file.getvalue()
    assert found == code and "no CUPTI" in text and "kernels on this GPU" in text
    assert ("a/small failed:\nRuntimeError: no such kernel\nsecond line" in text) == (kernel is fails)
    assert [p.name for p in tmp_path.iterdir()] == ["device_check.json"]
    document = json.loads((tmp_path / "device_check.json").read_text())
    assert document["ceilings"] == CEILINGS and document["clock"] == "a fixed clock"
    assert document["entries"]["a/small"]["status"] == {0: "right"}.get(code, document["entries"]["a/small"]["status"])
    assert ("times" in document["entries"]["a/small"]) == (code == 0)


@pytest.mark.aot
def test_the_dry_run(capsys, tmp_path):
    cases = {"a/small": small(), "a/failed": small(kernel=fails)}
    code, text = main(capsys, "--dry-run", "--output", str(tmp_path), cases=cases)
    assert code == 1 and "compiled for h200: ours | XLA's" in text and "no such kernel" in text
    entries = json.loads((tmp_path / "compiled-h200.json").read_text())["entries"]
    assert entries["a/small"]["kernel"]["count"] == entries["a/small"]["unfused"]["count"] >= 1
    assert entries["a/failed"]["status"] == "failed"


@pytest.mark.aot
@pytest.mark.slow
def test_every_case_compiles_for_an_h200_without_spills(capsys, tmp_path):
    code, text = main(capsys, "--dry-run", "--output", str(tmp_path), cases=CASES)
    assert code == 0, text
    entries = json.loads((tmp_path / "compiled-h200.json").read_text())["entries"]
    for name, entry in entries.items():
        if name.startswith("linear_cross_entropy/") and name.endswith("and gradients"):
            # Three launches for each block of the vocabulary: it is memory that the loss saves.
            temporaries = [entry[k]["temporaries_bytes"] for k in ("kernel", "unfused")]
            assert temporaries[0] < temporaries[1] / 2, name
        else:
            assert entry["kernel"]["count"] <= entry["unfused"]["count"], name
        if re.match(r"gemm_epilogue/.*\d+x\d+x\d+", name):
            assert any("wgmma" in key for m in entry["kernel"]["mosaic"] for key in m["tensor_core"]), name


# -- probes ----------------------------------------------------------------------------------------------------


def test_the_probes_are_the_last_step_unless_left_out(monkeypatch, capsys, tmp_path):
    seen = []
    monkeypatch.setattr(cli, "dry", lambda *arguments: 0)

    def run_probes(target, folder):
        seen.append((target, folder))
        return 1

    where = ("--dry-run", "--output", str(tmp_path))
    assert main(capsys, *where, run_probes=run_probes)[0] == 1 and seen == [("h200", tmp_path / "probes")]
    assert main(capsys, *where, "--no-probes", run_probes=run_probes)[0] == 0
    assert main(capsys, *where, "--cases", "small", run_probes=run_probes)[0] == 0
    assert len(seen) == 1


def test_the_probes_run_in_a_process_of_their_own(monkeypatch, capsys, tmp_path):
    here, described = (probes.command(target, tmp_path)[1:] for target in (None, "a100"))
    assert here == ["-m", "gpu_probe", "run", "--device", "cuda", "--output", str(tmp_path), "--quick"]
    assert described[-3:] == ["--dry-run", "--target", "a100"]
    monkeypatch.setattr(probes, "command", lambda target, folder: [sys.executable, "-c", target])
    assert probes.run_probes("raise SystemExit(2)", tmp_path) == 2
    assert probes.run_probes("import time; time.sleep(60)", tmp_path, timeout_s=0.2) == 1
    assert "the probes took longer than 0.2 seconds and were stopped" in capsys.readouterr().err
