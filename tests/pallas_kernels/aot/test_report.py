"""Reports: as text, as JSON, side by side; targets; and what Mosaic GPU writes, read back."""

import dataclasses
import json

import pytest

from pallas_kernels import aot
from pallas_kernels.aot import resources
from pallas_kernels.aot.report import bytes_text

SPILLING = """
ptxas info    : (C7504) Potential Performance Loss: 'setmaxnreg' ignored.
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'add_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for add_mosaic_gpu_kernel
ptxas         .     16 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 154 registers, used 16 barriers, 17 bytes smem
info    : used 150 registers, used 16 barriers, 0 stack, 1025 bytes smem, 960 bytes cmem[0], 0 bytes lmem
"""
PTX = """
.maxntid 384, 1, 1
@%p1 wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, p, 1, 1, 0, 1;
{ wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, p, 1, 1, 0, 1; }
wgmma.wait_group.sync.aligned 0;
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};
"""
LAUNCH = """
  %c384 = arith.constant 384 : index
  %size = arith.constant 2048 : i32
  %4 = gpu.launch async [%3] blocks(%a, %b, %c) threads(%d, %e, %f) dynamic_shared_memory_size %size {
"""


def write_dump(folder, name, text=SPILLING, ptx=PTX, launch=LAUNCH):
    for suffix, content in (("ptxas", text), ("ptx", ptx), ("mlir-passes.log", launch)):
        (folder / f"{name}.{suffix}").write_text(content)


@pytest.fixture
def kernel(tmp_path):
    write_dump(tmp_path, "add_0")
    return dataclasses.replace(resources.read_dump(tmp_path)[0], launches=1)


@pytest.fixture
def report(kernel):
    launch = aot.KernelLaunch("add", "mosaic", "jit(f)/add", 3000, 1000)
    inside = aot.KernelLaunch("gemm", "cublas", "", 10, 5, ("while.3 (12 times)",))
    return aot.CompileReport("f", "h200", (launch, inside), (kernel,), 2_500_000, 3000, 1000, "0.0")


def test_resources_of_a_mosaic_kernel(kernel):
    assert (kernel.name, kernel.registers, kernel.threads) == ("add", 154, 384)
    assert (kernel.spill_store_bytes, kernel.spill_load_bytes, kernel.stack_bytes) == (24, 40, 16)
    assert kernel.spill_bytes == 64
    assert kernel.smem_bytes == 17 + 2048  # what the kernel declares, and what the host asks for at the launch
    assert kernel.tensor_core == (
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", 1),
        ("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16", 2),
    )
    assert kernel.wgmma == 2
    assert kernel.warnings == ("'setmaxnreg' ignored.",)


def test_kernels_of_one_name_are_in_the_order_of_their_numbers(tmp_path):
    for number, registers in ((10, 30), (2, 20), (0, 10)):
        write_dump(tmp_path, f"add_{number}", SPILLING.replace("154", str(registers)))
    assert [k.registers for k in resources.read_dump(tmp_path)] == [10, 20, 30]


def test_a_kernel_without_dynamic_shared_memory(tmp_path):
    write_dump(tmp_path, "add_0", launch="gpu.launch blocks() threads() {")
    assert resources.read_dump(tmp_path)[0].smem_bytes == 17


def test_an_unexpected_dump_is_shown(tmp_path):
    write_dump(tmp_path, "add_0", text="ptxas fatal: no")
    with pytest.raises(ValueError, match=r"(?s)add_0.ptxas: expected .*registers.*ptxas fatal: no"):
        resources.read_dump(tmp_path)


def test_numbers_of_a_report(report):
    assert (report.count, report.counts, report.names) == (2, {"cublas": 1, "mosaic": 1}, ("add", "gemm"))
    assert (report.bytes_moved, report.spill_bytes) == (4015, 64)


def test_the_report_as_text(report, golden):
    golden(str(report))


def test_the_report_as_data(report):
    data = json.loads(report.to_json())
    assert data["count"] == 2 and data["temporaries_bytes"] == 2_500_000
    assert data["kernels"][1]["inside"] == ["while.3 (12 times)"]
    assert data["mosaic"][0]["tensor_core"]["wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"] == 2


def test_reports_side_by_side(report, golden):
    other = aot.CompileReport("unfused", "h200", report.kernels[1:] * 3, (), 5_000_000, 3000, 1000)
    both = report.beside(other)
    golden(str(both))
    assert [r["name"] for r in json.loads(both.to_json())["reports"]] == ["f", "unfused"]
    assert len(both.beside(report).reports) == 3


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (67_108_864, "67.1 MB"), (2_684e6, "2.7 GB")])
def test_sizes_for_people(count, text):
    assert bytes_text(int(count)) == text


def test_targets():
    assert aot.targets() == ("a100", "b200", "h100", "h200", "l4")
    facts = {name: aot.load_target(name) for name in aot.targets()}
    assert {name: t.sm_count for name, t in facts.items()} == {
        "a100": 108,
        "b200": 148,
        "h100": 132,
        "h200": 132,
        "l4": 58,
    }
    assert facts["h200"].device_kind == "NVIDIA H200" and facts["h200"].smem_bytes == 232_448
    assert facts["a100"].smem_bytes == 166_912


def test_an_unknown_target():
    with pytest.raises(ValueError, match="target: expected one of a100, b200, h100, h200, l4, found 'v100'"):
        aot.compile_for("v100", lambda x: x, 1.0)
