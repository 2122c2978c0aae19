"""Typed templates: what cannot be built, and what text the rest becomes."""

import dataclasses

import pytest

from gpu_probe.cuda.gpu import Clock, Fill
from gpu_probe.cuda.template import Template
from gpu_probe.probes import cuda_bandwidth, cuda_exp, cuda_latency, cuda_occupancy, cuda_scheduler, cuda_tensor
from tests.gpu_probe.cuda.fake_gpu import MODEL

ALL = (*MODEL, Fill, Clock)


@pytest.mark.parametrize("template", ALL, ids=lambda t: t.__name__)
def test_a_template_is_a_frozen_dataclass_with_one_kernel_of_its_name(template):
    made = template()
    assert dataclasses.is_dataclass(made) and hash(made) == hash(template())
    assert made.source.count("__global__") == 1 and f"{made.name}(" in made.source
    assert made.name.startswith("probe_") and "$" not in made.source
    assert all(p in ("u32", "u64") or p.endswith("*") for p in made.parameters)


@pytest.mark.parametrize(
    ("template", "fields", "message"),
    [
        (cuda_latency.Chase, {"unroll": 0}, r"Chase\.unroll: expected a whole number from 1 to 128, found 0"),
        (cuda_latency.Chase, {"unroll": True}, "found True"),
        (cuda_scheduler.MultiplyAdds, {"ilp": 3}, r"MultiplyAdds\.ilp: expected one of 1, 2, 4, 8, found 3"),
        (cuda_tensor.WarpProducts, {"dtype": "f64"}, "expected one of 'bf16', 'f16', 'tf32', 's8', found 'f64'"),
        (cuda_tensor.GroupProducts, {"n": 100}, r"GroupProducts\.n: expected one of 8"),
        (cuda_bandwidth.Move, {"what": "write"}, "expected one of 'read', 'copy'"),
    ],
)
def test_a_template_checks_its_fields(template, fields, message):
    with pytest.raises(ValueError, match=message):
        template(**fields)


def test_parameters_stand_in_text_and_name():
    assert cuda_occupancy.Stream(4).name == "probe_occupancy_loads4"
    assert "uint4 v[4];" in cuda_occupancy.Stream(4).source
    assert cuda_latency.Chase().parameters == ("const u64*", "u64*", "u32", "u32")
    assert cuda_exp.Exponentials(ilp=2, steps=8).count == 16


def test_a_product_is_as_large_as_its_instruction_says():
    group, warp = cuda_tensor.GroupProducts("e4m3", 128), cuda_tensor.WarpProducts("tf32")
    assert "m64n128k32.f32.e4m3.e4m3" in group.source and group.flops == 2 * 64 * 128 * 32 * 16
    assert "m16n8k8.row.col.f32.tf32.tf32.f32" in warp.source and warp.flops == 2 * 16 * 8 * 8 * 16
    assert group.smem_bytes == 128 * 128 + 2 * 64 * 128 + 1024


def test_a_text_without_its_kernel_is_found():
    @dataclasses.dataclass(frozen=True)
    class Wrong(Template):
        NAME = "probe_wrong"
        TEXT = 'extern "C" __global__ void other() {}'

    with pytest.raises(ValueError, match="no __global__ function probe_wrong"):
        _ = Wrong().parameters
