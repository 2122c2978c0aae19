"""Programs compiled for GPUs that are not here.

What XLA alone makes of the usual programs is known (counted once by hand); everything else is compared with that. The
programs of one fixture are compiled by one process, because each start costs seconds.
"""

import functools
import importlib.metadata
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aicf_jax
from pallas_kernels import aot
from pallas_kernels.aot import compile as compile_module
from tests.pallas_kernels.aot.programs import (
    BF16,
    MLP,
    attention,
    aval,
    gemm_relu,
    gradients,
    norm_residual,
    wgmma_product,
)

X, W, B = aval((8192, 4096)), aval((4096, 4096)), aval((4096,))
Q = aval((4, 2048, 16, 64))
TILE = aval((64, 64))


def loop(x, w):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=5)[0]


def branch(p, x):
    return jax.lax.cond(p, jnp.sort, jnp.sin, x)


def unknown_call(x):
    return jax.ffi.ffi_call("nobody_registered_this", aval(x.shape, x.dtype))(x)


PROGRAMS = {
    "gemm_relu": (gemm_relu, (X, W, B)),
    "gemm_relu gradients": (gradients(gemm_relu), (X, W, B, X)),
    "norm_residual gradients": (gradients(norm_residual), (X, X, B, B, X)),
    "attention gradients": (gradients(attention), (Q, Q, Q, Q)),
    "loop": (loop, (aval((128, 128)), aval((128, 128)))),
    "branch": (branch, (aval((), jnp.bool_), aval((128,)))),
    "wgmma": (wgmma_product, (TILE, TILE)),
    "wgmma twice": (lambda a, b: wgmma_product(wgmma_product(a, b), b), (TILE, TILE)),
    "gemm_relu by cuBLASLt": aot.Program(gemm_relu, (X, W, B), {"xla_gpu_enable_triton_gemm": False}),
    "unknown call": (unknown_call, (aval((4,)),)),
    "after the unknown call": (lambda x: x + 1, (aval((4,)),)),
}


WEIGHTS = jnp.ones((4, 4), BF16)
MASKED = jax.jit(lambda x, mode, n: x * n if mode == "scale" else x, static_argnums=(1, 2))


def everything(key, tree, scale, mode, n, nothing, act):
    noise = jax.random.normal(key, (4, 4), BF16)
    return {"y": act(MASKED(tree["x"] @ WEIGHTS + noise, mode, n) * scale), "key": key, "none": nothing}


def kinds():
    keys = jax.random.split(jax.random.key(0), 3)
    arguments = (keys[0], {"x": np.ones((4, 4), BF16)}, 2.0, "scale", 3, None, jax.nn.silu)
    return {
        "everything": (everything, arguments),
        "partial": (functools.partial(MASKED, n=2), (TILE, "scale")),
        "key types": (lambda k: jax.random.bits(k[0]), (jax.eval_shape(lambda: jax.random.split(jax.random.key(1))),)),
        "second order": (jax.grad(lambda x: jax.grad(jnp.tanh)(x)), (1.0,)),
        "nothing": (lambda: (), ()),
        "identity": (lambda x: x, (TILE,)),
    }


KINDS = kinds()


class Everything(dict):
    """The capabilities of a kernel that takes any operation."""

    def __contains__(self, name):
        return True

    def __getitem__(self, name):
        return aicf_jax.kernels.ANY


def run_with_wgmma(op, x, w, *rest):
    return (jnp.maximum(wgmma_product(x, w) + rest[0], 0),)


WGMMA = aicf_jax.Kernel(
    name="wgmma",
    op="gemm_epilogue",
    platforms=("cuda",),
    capabilities=Everything(),
    run=run_with_wgmma,
    cost_bytes=lambda op: 0,
)


def fused():
    policy = aicf_jax.Policy(target="h200", on_failure="raise")
    layer = aicf_jax.fuse(gemm_relu, policy=policy, kernels=(WGMMA,))
    model, x, b = MLP(), aval((256, 512)), aval((64,))
    apply = aicf_jax.fuse(model, policy=policy).apply
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    return {
        "fused": (layer, (TILE, TILE, b)),
        "fused gradients": (gradients(layer), (TILE, TILE, b, TILE)),
        "unfused": (gemm_relu, (TILE, TILE, b)),
        "fused model": (apply, (variables, x)),
        "fused model, gradients": (jax.grad(lambda v, x: jnp.sum(apply(v, x).astype(jnp.float32))), (variables, x)),
    }


@pytest.fixture(scope="module")
def h200():
    return aot.compile_all("h200", {**PROGRAMS, **KINDS, **fused()})


pytestmark = pytest.mark.aot


@pytest.mark.parametrize(
    ("name", "count", "temporaries_mb"),
    [
        ("gemm_relu", 1, 0),
        ("gemm_relu gradients", 5, 67),
        ("norm_residual gradients", 6, 134),
        ("attention gradients", 17, 2684),
    ],
)
def test_what_xla_alone_compiles_to(h200, name, count, temporaries_mb):
    report = h200[name]
    assert report.count == count, report
    # dZ, or the normalized rows, or the weights; what is added to that are sums over rows: at most a hundredth
    assert temporaries_mb * 1e6 <= report.temporaries_bytes <= temporaries_mb * 1.01e6 + 1e6


def test_counts(h200, golden):
    lines = [f"{name}: {r.counts}" for name, r in h200.items() if name in PROGRAMS and name != "unknown call"]
    golden("\n".join(lines))


def test_bytes_between_kernels(h200):
    """One product: both operands and the bias are read, the result is written."""
    report = h200["gemm_relu"]
    assert report.bytes_moved == 2 * (8192 * 4096 + 4096 * 4096 + 4096 + 8192 * 4096)
    assert report.arguments_bytes == 2 * (8192 * 4096 + 4096 * 4096 + 4096)
    assert report.results_bytes == 2 * 8192 * 4096


def test_what_a_loop_launches_is_counted_once_and_marked(h200):
    report = h200["loop"]
    inside = [k for k in report.kernels if k.inside]
    assert inside and all(k.inside[0].endswith("(5 times)") for k in inside)
    assert any(k.kind in ("triton", "cublas") for k in inside)
    assert "(5 times)" in str(report)


def test_branches(h200):
    places = [k.inside[0].split(" ", 1)[1] for k in h200["branch"].kernels if k.inside]
    assert set(places) == {"branch 0", "branch 1"}


def test_resources_of_a_mosaic_kernel(h200):
    (kernel,) = h200["wgmma"].mosaic
    assert h200["wgmma"].names == ("product",)
    assert (kernel.name, kernel.launches, kernel.spill_bytes, kernel.threads) == ("product", 1, 0, 128)
    assert 0 < kernel.registers <= 255
    assert kernel.smem_bytes >= 3 * 64 * 64 * 2  # three tiles, and barriers
    assert kernel.wgmma == 4  # K is 64, and an instruction takes 16 of it
    ((instruction, _),) = kernel.tensor_core
    assert "m64n64k16.f32.bf16.bf16" in instruction


def test_a_mosaic_kernel_of_an_earlier_program_is_described_too(h200):
    (once,), (twice,) = h200["wgmma"].mosaic, h200["wgmma twice"].mosaic
    assert (h200["wgmma twice"].count, twice.launches) == (2, 2)
    assert (twice.registers, twice.smem_bytes) == (once.registers, once.smem_bytes)


def test_one_that_cannot_be_compiled_tells_all_and_stops_nobody(h200):
    error = h200["unknown call"]
    assert isinstance(error, aot.CompileError)
    assert "unknown call cannot be compiled for h200" in str(error)
    assert "nobody_registered_this" in str(error) and "Traceback (most recent call last)" in str(error)
    assert h200["after the unknown call"].count == 1


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_function_of_any_kind(h200):
    """Lambdas, partials, jit with static arguments, keys, NumPy values, Python floats, pytrees, closed-over arrays."""
    for name in KINDS:
        assert isinstance(h200[name], aot.CompileReport), h200[name]
    assert h200["nothing"].count == 0
    assert h200["everything"].results_bytes == 2 * 16 + 8 + 2 * 8  # a matrix, a key, and their addresses


def test_x64():
    with jax.enable_x64(True):
        report = aot.compile_for("h200", lambda x: jnp.sum(x * 2.0), np.ones((1024,)))
    assert report.arguments_bytes == 8 * 1024 and report.results_bytes == 8


@pytest.mark.parametrize(
    "target", ["a100", pytest.param("b200", marks=pytest.mark.slow), pytest.param("h100", marks=pytest.mark.slow)]
)
def test_other_targets(target):
    report = aot.compile_for(target, gradients(gemm_relu), X, W, B, X)
    assert report.target == target and 1 <= report.count <= 8


def test_kernels_see_how_many_multiprocessors_the_target_has():
    from pallas_kernels import _mosaic

    seen = []

    def f(x):
        seen.append(_mosaic.sm_count())
        return x + 1

    compile_module._export(aot.load_target("b200"), f, (TILE,))
    assert seen == [148]


def test_a_fused_function_runs_the_kernels_of_its_target(h200):
    """Traced on a CPU, compiled for a GPU: forward by the kernel, and the backward of the fused operation."""
    assert h200["fused"].counts["mosaic"] == h200["fused gradients"].counts["mosaic"] == 1
    assert "mosaic" not in h200["unfused"].counts
    assert "unfused" in str(h200["fused"].beside(h200["unfused"]))


def test_a_fused_flax_model(h200):
    """Both layers forward, and the gradient of the activation between them, are kernels of ours."""
    forward, backward = h200["fused model"], h200["fused model, gradients"]
    assert forward.counts["mosaic"] == 2 and forward.spill_bytes == 0
    assert all(m.wgmma for m in forward.mosaic)
    assert {m.name for m in backward.mosaic} - {m.name for m in forward.mosaic}


# -- what can go wrong ---------------------------------------------------------------------------------


def test_errors_of_the_function_are_its_own():
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        aot.compile_for("h200", gemm_relu, X, X, B)


def test_a_single_program_that_cannot_be_compiled_raises():
    with pytest.raises(aot.CompileError, match="unknown_call cannot be compiled for h200"):
        aot.compile_for("h200", unknown_call, aval((4,)))


def test_the_time_limit(scratch):
    with pytest.raises(TimeoutError, match=r"longer than timeout_s=0.2 seconds and was stopped"):
        aot.compile_for("h200", gemm_relu, X, W, B, timeout_s=0.2)
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit('no device')", r"(?s)ended with code 1; it printed:\nno device"),
        ("import os; os.kill(os.getpid(), 9)", "ended with SIGKILL"),
    ],
)
def test_a_process_that_dies_is_reported_with_what_it_printed(scratch, tmp_path_factory, monkeypatch, code, message):
    script = tmp_path_factory.mktemp("script") / "child.py"
    script.write_text(code)
    monkeypatch.setattr(compile_module, "_SCRIPT", script)
    with pytest.raises(aot.CompileError, match=message):
        aot.compile_for("h200", gemm_relu, X, W, B)
    assert list(scratch.iterdir()) == []


def test_a_program_for_several_devices():
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    with pytest.raises(ValueError, match="expected a program for one device, found one for 2"):
        aot.compile_for("h200", lambda x: jax.lax.with_sharding_constraint(x, sharding), aval((8,)))


def test_missing_packages_are_named(monkeypatch):
    installed = importlib.metadata.version

    def version(name):
        if name in ("nvidia-nvvm", "absl-py"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.0.1" if name == "jax-cuda13-pjrt" else installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ImportError) as caught:
        aot.compile_for("h200", gemm_relu, X, W, B)
    text = str(caught.value)
    assert "nvidia-nvvm, absl-py not installed; jax-cuda13-pjrt 0.0.1 installed beside jax" in text
    assert f"pip install --no-deps jax-cuda13-plugin=={jax.__version__}" in text
