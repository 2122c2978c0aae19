"""The portable kernels compiled for an A100 and an L4, with their default configurations: nothing is run."""

import importlib
import re
import subprocess

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import _triton, aot
from pallas_kernels.gemm_epilogue import portable as gemm
from pallas_kernels.norm import portable as norm

triton = pytest.importorskip("triton", reason="needs Triton, which the extra `gpu` installs for Python 3.12 and later")

lowers = pytest.mark.skipif(_triton.unavailable() is not None, reason=f"jax-triton: {_triton.unavailable()}")


def compiled(kernel, arrays, constants, capability, warps, stages=1):
    """``(PTX, registers, bytes of spills)``. Arrays are aligned, as jax's are."""
    kernel = getattr(importlib.import_module(kernel[0]), kernel[1])
    names = [p.name for p in kernel.params]
    signature = {n: arrays.get(n, "constexpr") for n in names}
    absent = {n: None for n in names if n not in arrays and n not in constants}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in arrays}
    found = triton.compile(
        triton.compiler.ASTSource(kernel, signature, {**absent, **constants}, aligned),
        target=triton.backends.compiler.GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True},
    )
    ptx = found.asm["ptx"]
    command = [triton.knobs.nvidia.ptxas.path, "-v", f"-arch=sm_{capability}", "-", "-o", "/dev/null"]
    report = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    return ptx, int(re.findall(r"Used (\d+) registers", report)[0]), sum(map(int, spills))


def tile_constants(c, m, n, k, activation):
    return {
        **{"m": m, "n": n, "k": k, "trans_a": False, "trans_b": False, "bias_along": "n"},
        **{"activation": activation, "alpha": 0.5, "group": c.group},
        **{"block_m": c.block_m, "block_n": c.block_n, "block_k": c.block_k},
    }


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89])
@pytest.mark.parametrize("shape", [(8192, 4096, 1024), (1000, 1000, 1000), (8, 4096, 4096)])
@pytest.mark.parametrize("activation", ["relu", "gelu_exact"])
def test_gemm_epilogue_spills_nothing(capability, shape, activation):
    c = gemm.default_tiles(1, *shape[:2], 108)
    arrays = dict.fromkeys(("a", "b", "bias", "y", "z"), "*bf16")
    constants = tile_constants(c, *shape, activation)
    ptx, _, spills = compiled((gemm._MODULE, "gemm_epilogue"), arrays, constants, capability, c.warps, c.stages)
    assert spills == 0
    assert "mma.sync" in ptx and "cp.async" in ptx  # tensor cores, loads ahead


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89])
@pytest.mark.parametrize("shape", [(8192, 4096), (8192, 8192), (8191, 1599), (65536, 256)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_norms_spill_nothing(capability, shape, dtype):
    c = norm.default(*shape, sm_count=108)
    arrays = {**dict.fromkeys(("x", "residual", "y", "sum"), f"*{dtype}")}
    arrays |= dict.fromkeys(("scale", "bias", "mean", "rstd", "slope"), "*fp32")
    sizes = {"count": shape[0], "length": shape[1], "rows": c.rows, "width": 1 << (shape[1] - 1).bit_length()}
    formula = {"eps": 1e-5, "variance": "moments", "clamped": True}
    assert compiled((norm._MODULE, "norm_forward"), arrays, {**sizes, **formula}, capability, c.warps)[2] == 0
    c = norm.default(*shape, backward=True, sm_count=108)
    arrays = {**dict.fromkeys(("dy", "x", "dsum", "dx"), f"*{dtype}")}
    arrays |= dict.fromkeys(("scale", "rstd", "mean", "dscale", "dbias"), "*fp32")
    sizes |= {"rows": c.rows, "steps": c.steps}
    assert compiled((norm._MODULE, "norm_backward"), arrays, sizes, capability, c.warps)[2] == 0


def test_a_small_gradient_compiles():
    arrays = dict.fromkeys(("residual", "dy", "dz", "sums"), "*fp16")
    constants = {"m": 40, "n": 24, "activation": "silu", "alpha": 0.0, "activate": False}
    constants |= {"block_m": 16, "block_n": 16, "steps": 2}
    assert compiled((gemm._MODULE, "gemm_epilogue_grad"), arrays, constants, 80, 1)[2] == 0


@lowers
@pytest.mark.parametrize(("target", "capability"), [("a100", 80), ("l4", 89)])
def test_a_described_gpu_says_what_to_compile_for(target, capability):
    described = aot.load_target(target)
    assert described.compute_capability == capability
    device = jax.sharding.AbstractDevice(device_kind=described.device_kind, num_cores=1, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        assert _triton.compute_capability() == capability
    assert _triton.compute_capability() in (None, _triton.OLDEST)


@lowers
@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("target", ["a100", "l4"])
def test_a_fused_layer_compiled_for_the_gpu_launches_them(target):
    import aicf_jax

    def layer(x, w, b, g, dy):
        def f(x, w, b, g):
            y = jax.nn.gelu(x @ w + b)
            wide = y.astype(jnp.float32)
            r = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
            return (wide * r * g).astype(y.dtype)

        fused = aicf_jax.fuse(f, policy=aicf_jax.Policy(target=target, on_failure="raise"))
        y, vjp = jax.vjp(fused, x, w, b, g)
        return y, vjp(dy)

    types = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((512, 256), (256, 1000), (1000,), (1000,), (512, 1000))]
    report = aot.compile_for(target, layer, *types)
    # The product, its activation's gradient, the norm and its gradient.
    assert report.names.count("triton_kernel_call") == 4
