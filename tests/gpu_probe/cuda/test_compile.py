"""Probe kernels compiled by NVRTC, which needs no GPU, and what their code must keep of them."""

import importlib
import io
import types

import pytest
from rich.console import Console

from gpu_probe import cli
from gpu_probe.cuda import compile as compile_module
from gpu_probe.cuda import gpu as gpu_module
from gpu_probe.cuda.code import read_ptx
from gpu_probe.cuda.compile import CompileError, check_packages, compile_template
from gpu_probe.cuda.gpu import CodeError, Compiler
from gpu_probe.devices import connect
from gpu_probe.probe import DeviceError, Unsupported
from gpu_probe.probes import cuda_banks, cuda_latency, cuda_launch, cuda_tensor, probes

ARCHS = ("sm_80", "sm_90a", "sm_100")


def compile_probe(name, target):
    """Compiles every point of a probe; the points that the target cannot run, with why."""
    probe = next(p for p in probes("cuda") if p.name == name)
    refused = []
    for point in probe.points(False):
        try:
            probe.generate(point, target)
        except Unsupported as error:
            refused.append(str(error))
    return refused


@pytest.mark.nvrtc
@pytest.mark.parametrize("template", [cuda_latency.Chase(), cuda_banks.Banks()], ids=lambda t: t.name)
def test_loads_stay_dependent_and_the_stride_survives(template):
    compiled = compile_template(template, "sm_90a")
    assert compiled.problems() == []
    assert compiled.problems(read_ptx(compiled.ptx, "sm_90a", template.name)) == []
    assert compiled.registers and compiled.spill_bytes == 0 and compiled.cubin.startswith(b"\x7fELF")


@pytest.mark.nvrtc
def test_a_warpgroup_product_is_not_serialized():
    compiled = compile_template(cuda_tensor.GroupProducts(n=64), "sm_90a")
    assert compiled.warnings == () and compiled.problems() == []


@pytest.mark.nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_every_probe_compiles_to_what_it_needs(arch):
    target = connect("cuda", arch, compile_only=True)
    for probe in probes("cuda"):
        refused = compile_probe(probe.name, target)
        assert {r.split(",")[0] for r in refused} <= {"wgmma needs sm_90a"} and (not refused or arch != "sm_90a")


@pytest.mark.nvrtc
@pytest.mark.slow
def test_a_dry_run_compiles_every_probe_for_h200():
    console = Console(file=io.StringIO(), width=200)
    assert cli.main(["run", "--device", "cuda", "--dry-run", "--target", "h200"], console) == 0
    for probe in probes("cuda"):
        count = len(probe.points(False))
        assert f"{probe.name}: {count} of {count} programs compile" in console.file.getvalue()


@pytest.mark.nvrtc
def test_what_cannot_be_compiled_shows_what_nvrtc_said(monkeypatch):
    monkeypatch.setattr(cuda_launch.Nothing, "TEXT", 'extern "C" __global__ void $name() { nothing_of_that_name; }')
    with pytest.raises(CompileError, match=r"(?s)probe_nothing cannot be compiled for sm_80.*nothing_of_that_name"):
        compile_template(cuda_launch.Nothing(), "sm_80")


def test_code_that_is_not_what_its_probe_needs_is_refused(monkeypatch):
    broken = types.SimpleNamespace(problems=lambda: ["the loads overlap", "it spills"])
    monkeypatch.setattr(gpu_module, "compile_template", lambda template, arch: broken)
    with pytest.raises(CodeError, match="the loads overlap; it spills"):
        Compiler("sm_90a").compile(cuda_latency.Chase())


def test_missing_packages_are_named(monkeypatch):
    with pytest.raises(ImportError, match="no-such not installed; install with: pip install no-such nvidia-cuda-nvrtc"):
        check_packages({"nothing_of_that_name.at_all": "no-such"})

    def unloadable():
        raise RuntimeError("libnvrtc.so.13: not found")

    monkeypatch.setattr(compile_module, "_importable", lambda module: True)
    monkeypatch.setattr(importlib, "import_module", lambda name: types.SimpleNamespace(nvrtcVersion=unloadable))
    with pytest.raises(ImportError, match="NVRTC is not installed; install with: pip install nvidia-cuda-nvrtc"):
        check_packages({})


def test_an_unknown_gpu_is_refused_with_those_there_are():
    with pytest.raises(DeviceError, match=r"expected a100, .* or an architecture like sm_90a, found 'v100'"):
        connect("cuda", "v100", compile_only=True)
    for old in ("sm_75", "sm_70"):
        with pytest.raises(DeviceError, match=f"--target: expected sm_80 or later, .* found '{old}'"):
            connect("cuda", old, compile_only=True)
    with pytest.raises(DeviceError, match="expected no name of a GPU"):
        connect("cuda", "h200")


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            RuntimeError('"cuda" is an NVIDIA driver library and can only be found via system search.'),
            "there is no NVIDIA driver on this machine, so CUDA probes cannot run here; --dry-run compiles them",
        ),
        (
            Exception("CUDA_ERROR_NO_DEVICE"),
            "GPU 0 cannot be used (CUDA_ERROR_NO_DEVICE); --dry-run compiles the probes without one",
        ),
    ],
)
def test_without_driver_or_gpu_the_run_is_refused_in_one_sentence(monkeypatch, said, sentence):
    def nothing(index):
        raise said

    modules = {"cuda.core": types.SimpleNamespace(Device=nothing), "cuda.bindings.driver": None}
    monkeypatch.setattr(gpu_module, "check_packages", lambda: None)
    monkeypatch.setattr(gpu_module.importlib, "import_module", modules.__getitem__)
    with pytest.raises(DeviceError) as error:
        gpu_module.open_gpu()
    assert str(error.value) == sentence


def test_a_missing_package_is_one_sentence_too(monkeypatch, capsys):
    def missing(*modules):
        raise ImportError("CUDA probes need the extra `probe`: cuda-core not installed")

    monkeypatch.setattr(gpu_module, "check_packages", missing)
    assert cli.main(["run", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == (
        "python -m gpu_probe: CUDA probes need the extra `probe`: cuda-core not installed\n"
    )
