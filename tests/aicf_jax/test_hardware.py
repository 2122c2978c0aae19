"""A property map in the policy: what it changes in tiles, kernel choice and explain. Without one nothing changes."""

import dataclasses
import html
import json
import pickle
import sys

import jax
import jax.numpy as jnp
import pytest

import aicf_jax
import mcir
from aicf_jax import Policy, hardware
from aicf_jax.hardware import Need
from aicf_jax.kernels import mosaic_gemm_epilogue
from aicf_jax.ops import _programs
from gpu_probe import Property, PropertyMap


def of(kind="cpu", **properties):
    """A map with values in the unit of each name's vocabulary."""
    values = {k.replace("__", "."): Property(*v, "datasheet", "test") for k, v in properties.items()}
    return PropertyMap({"kind": kind, "name": f"test {kind}"}, values)


CPU = of(
    l3__size=(1, "MiB"),
    dram__bw_copy=(10, "GB/s"),
    gemm__float32=(100, "GFLOP/s"),
    sfu__exp_rate=(1, "G/s"),
    launch__loop_step=(10, "us"),
)


def attention(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def shapes(length, heads=8):
    return [jax.ShapeDtypeStruct((1, length, heads, 64), "float32")] * 3


def dense(x, w, b):
    return jax.nn.relu(x @ w + b)


DENSE = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 1024), (1024, 4096), (4096,))]


def fusion(f, args, **policy):
    (found,) = aicf_jax.explain(f, *args, policy=Policy(**policy)).fusions
    return found


class TestPolicy:
    def test_takes_a_map_its_path_or_a_shipped_name(self, tmp_path):
        CPU.save(tmp_path / "map.json")
        policies = [Policy(hardware=x) for x in (CPU, tmp_path / "map.json", str(tmp_path / "map.json"))]
        assert policies[0] == policies[1] == policies[2] and len(set(map(hash, policies))) == 1
        assert pickle.loads(pickle.dumps(policies[0])) == policies[0] != Policy()
        assert Policy(hardware="h200").properties("cuda").name == "NVIDIA H200"

    def test_refuses_what_is_no_map(self, tmp_path):
        with pytest.raises(ValueError, match=r"Policy\(hardware=...\): .*expected a file, a folder that has map.json"):
            Policy(hardware="z80")
        with pytest.raises(ValueError, match=r"Policy\(hardware=...\): expected a PropertyMap or its path, found 3"):
            Policy(hardware=3)

    def test_a_map_is_for_its_own_kind_of_device(self):
        assert Policy(hardware=CPU).properties("cuda") is None
        assert Policy(hardware="h200").properties("cpu") is None and Policy().properties("cpu") is None

    @pytest.mark.parametrize(
        ("found", "target", "note"),
        [
            (
                "h200",
                "cpu",
                "the property map of NVIDIA H200 is of another kind of device (cuda) than the program's (cpu)",
            ),
            (CPU, "h200", "the property map of test cpu is of another kind of device (cpu) than the program's (cuda)"),
            ("h200", "a100", "the property map is of NVIDIA H200, the target is a100"),
            ("h200", "h200", ""),
            ("h200", "gpu", ""),
            (None, "cpu", ""),
        ],
    )
    def test_one_that_is_not_used_or_of_another_machine_is_told_of(self, found, target, note):
        report = aicf_jax.explain(jnp.sin, 1.0, policy=Policy(hardware=found, target=target))
        assert report.hardware.startswith(note) and bool(report.hardware) == bool(note)
        assert report.hardware in str(report) and json.loads(report.to_json())["hardware"] == report.hardware
        assert html.escape(report.hardware, quote=False) in report.to_html().replace("&#x27;", "'").replace(
            "&#39;", "'"
        )
        assert ("hardware: " in str(report)) == ("Hardware: " in report.to_html()) == bool(note)


class TestTiles:
    def test_follow_the_measured_cache(self):
        found = {
            size: mcir.parse(fusion(attention, shapes(2048), target="cpu", hardware=of(l3__size=(size, "MiB"))).program)
            for size in (2, 64)
        }
        blocks = {size: {a.name: a.block for a in program.axes} for size, program in found.items()}
        assert blocks[2]["i"] * blocks[2]["j"] < blocks[64]["i"] * blocks[64]["j"]
        assert found[64].peak_bytes() <= 64 * 2**20

    @pytest.mark.parametrize("rows", [512, 256])
    def test_a_small_cache_does_not_put_products_on_one_core(self, rows, monkeypatch):
        """Tiles of products that all cores share overflow it, up to 8 MiB; how many rows those have is jax's affair."""
        monkeypatch.setattr(sys.modules["mcir.schedule"], "rows_of_products", lambda: rows)
        aicf_jax.clear_caches()
        program = mcir.parse(fusion(attention, shapes(2048), target="cpu", hardware=of(l3__size=(1, "MiB"))).program)
        aicf_jax.clear_caches()
        assert program.axis("i").block == rows and program.axis("j").block >= 256
        assert 2**20 < program.peak_bytes() <= 2**23

    @pytest.mark.parametrize("is_one", [True, False])
    def test_batches_are_walked_where_there_is_one_device(self, is_one, monkeypatch):
        """Over several devices arrays may be split along them."""
        monkeypatch.setattr(_programs, "_is_one_device", lambda: is_one)
        monkeypatch.setattr(sys.modules["mcir.schedule"], "rows_of_products", lambda: 512)
        aicf_jax.clear_caches()
        args = [jax.ShapeDtypeStruct((3, 1024, 8, 64), "float32")] * 3
        program = mcir.parse(fusion(attention, args, target="cpu", hardware=of(l3__size=(16, "MiB"))).program)
        aicf_jax.clear_caches()
        batches, heads = (program.axis(a).block for a in "bh")
        assert (batches, heads) == ((1, 8) if is_one else (3, 8))
        assert program.peak_bytes() <= (2**23 if is_one else 2**24)

    def test_without_a_map_are_those_of_the_host(self):
        plain = fusion(attention, shapes(2048), target="cpu")
        assert plain.hardware == ""
        other = fusion(attention, shapes(2048), target="cpu", hardware="h200")
        assert other.program == plain.program and other.hardware == ""

    @pytest.mark.slow
    def test_values_stay_the_same(self):
        q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 256, 2, 16))
        fused = aicf_jax.fuse(attention, policy=Policy(hardware=of(l3__size=(64, "KiB"))))
        assert fusion(attention, (q, k, v), hardware=of(l3__size=(64, "KiB"))).kernel == "streamed_attention"
        # sums of 16 and of up to 256 terms of weights that add up to one
        assert jnp.allclose(fused(q, k, v), attention(q, k, v), atol=256 * 2**-24 * 4)


class TestChoice:
    def test_a_smaller_cache_makes_streaming_worth_it(self):
        """Scores of 512 x 512 for 8 heads are 8 MiB: they stay in a cache of 64 MiB and not in one of 1 MiB."""
        large, small = (
            fusion(attention, shapes(512), target="cpu", hardware=of(l3__size=(n, "MiB"), dram__bw=(10, "GB/s")))
            for n in (64, 1)
        )
        assert (large.kernel, small.kernel) == ("xla", "streamed_attention")

    def test_the_refusal_tells_seconds(self):
        policy = Policy(target="cpu", hardware=of(l3__size=(64, "MiB"), dram__bw=(10, "GB/s")))
        (refusal,) = aicf_jax.explain(attention, *shapes(512), policy=policy).refusals
        assert refusal.code == "no_gain" and "as xla takes" in refusal.expected and "us for" in refusal.found

    def test_a_kernel_that_launches_more_takes_longer(self):
        """10 us each: 50 launches take longer than the three that the equations take as written."""
        many = dataclasses.replace(mosaic_gemm_epilogue.KERNEL, launches=50)
        policy = Policy(target="h200", hardware=of("cuda", dram__bw=(4800, "GB/s"), launch__graph=(10, "us")))
        chosen = [
            aicf_jax.explain(dense, *DENSE, policy=policy, kernels=(k,)) for k in (mosaic_gemm_epilogue.KERNEL, many)
        ]
        assert [r.fusions[0].kernel for r in chosen] == ["mosaic_gemm_epilogue", "xla"]
        assert chosen[1].refusals[-1].code == "no_gain"

    def test_launches_count_on_a_gpu_and_only_there(self):
        gpu = of("cuda", dram__bw=(1, "TB/s"), launch__stream=(2, "us"))
        assert hardware.ranking_seconds(gpu, 10**6, 3) == pytest.approx(7e-6)
        assert hardware.ranking_seconds(CPU, 10**6, 3) == pytest.approx(1e-4)
        assert hardware.ranking_seconds(of(), 1, 1) is hardware.ranking_seconds(None, 1, 1) is None


class TestLegality:
    def test_shared_memory_and_tensor_cores(self):
        assert fusion(dense, DENSE, target="h200", hardware="h200").kernel == "mosaic_gemm_epilogue"
        report = aicf_jax.explain(dense, *DENSE, policy=Policy(target="h200", hardware="a100"))
        refusal = next(r for r in report.refusals if r.code == "hardware")
        assert refusal.expected == "smem.max_per_block of at least 227 KiB"
        assert refusal.found == "163 KiB (datasheet, NVIDIA A100-SXM4-80GB)"

    @pytest.mark.parametrize(
        ("need", "unmet"),
        [
            (
                Need("smem.max_per_block", 2**20, "B"),
                ("smem.max_per_block of at least 1 MiB", "1 KiB (datasheet, test cuda)"),
            ),
            (Need("smem.max_per_block", 1024, "B"), None),
            (Need("tensor.float64", 0, "FLOP/s"), ("tensor.float64 of test cuda", "only tensor.bfloat16")),
            (Need("tensor.bfloat16", 0, "FLOP/s"), None),
            (Need("vector.float32", 0, "FLOP/s"), None),  # a map without any of the family says nothing
            (Need("l2.size", 1, "B"), None),
        ],
    )
    def test_needs(self, need, unmet):
        found = of("cuda", smem__max_per_block=(1, "KiB"), tensor__bfloat16=(1, "TFLOP/s"))
        assert need.unmet(found) == unmet


class TestExplain:
    def test_parts_sources_and_what_is_missing(self):
        text = fusion(dense, DENSE, target="h200", hardware="h200").hardware
        assert text.splitlines()[0].startswith("NVIDIA H200: ")
        assert "dram.bw 4.8 TB/s (datasheet), tensor.bfloat16 989.4 TFLOP/s (datasheet)" in text
        assert text.splitlines()[-1] == "missing launch.graph or launch.stream"
        # 2 m n k operations at 989.4 TFLOP/s
        assert "products: 34.73 us" in text

    def test_tiles_and_exponentials(self):
        found = fusion(attention, shapes(512), target="cpu", hardware=CPU)
        tiles = (
            "tiles by l3.size 1 MiB (datasheet), dram.bw_copy 10 GB/s (datasheet), launch.loop_step 10 us (datasheet)"
        )
        assert tiles in found.hardware and "exponentials: " in found.hardware and "missing" not in found.hardware
        poor = fusion(attention, shapes(512), target="cpu", hardware=of(l2__size=(1, "MiB"))).hardware
        assert "missing dram.bw_copy or dram.bw_read or dram.bw, gemm.float32" in poor and "launch.loop_step" in poor

    def test_convolutions_count_as_products(self):
        def conv(x, w, b):
            out = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return jax.nn.relu(out + b)

        args = [jax.ShapeDtypeStruct(s, "float32") for s in ((1, 8, 8, 4), (3, 3, 4, 16), (16,))]
        text = fusion(conv, args, target="cpu", hardware=CPU).hardware
        # 2 * 8 * 8 * 16 results of 3 * 3 * 4 terms at 100 GFLOP/s
        assert "products: 737.3 ns" in text
