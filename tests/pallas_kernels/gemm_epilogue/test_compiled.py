"""GEMM epilogues compiled for an H200 that need not be there: kernels, tensor core instructions, no spills."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen

import aicf_jax
from pallas_kernels import aot
from pallas_kernels.gemm_epilogue import backward, forward
from pallas_kernels.gemm_epilogue.cases import COMPILED, COMPILED_GRAD

pytestmark = [pytest.mark.aot, pytest.mark.slow]

H200 = aicf_jax.Policy(target="h200", on_failure="raise")
M, K, N = 8192, 4096, 4096
LAYERS = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "gelu exact": lambda z: jax.nn.gelu(z, approximate=False),
}


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def types_of(case):
    return jax.eval_shape(lambda: case.arrays(jax.random.key(0)))


def value_and_gradients(f):
    def both(args, ct):
        y, pull = jax.vjp(f, *args)
        return y, pull(ct)

    return both


class MLP(linen.Module):
    """As flax users write it: float32 parameters, bfloat16 arithmetic."""

    @linen.compact
    def __call__(self, x):
        x = linen.gelu(linen.Dense(2048, dtype=jnp.bfloat16)(x))
        return linen.Dense(512, dtype=jnp.bfloat16)(x)


def programs():
    """Name -> function and types: kernels with default configurations, then models through `fuse`."""
    found = {}
    for name, case in COMPILED.items():
        found[name] = (lambda a, b, bias, case=case: forward(a, b, bias, **case.options()), types_of(case))
    for name, case in COMPILED_GRAD.items():
        found[f"gradient: {name}"] = (lambda r, t, case=case: backward(r, t, **case.options()), types_of(case))
    args = struct(M, K), struct(K, N), struct(N)
    for name, act in LAYERS.items():
        f = lambda x, w, b, act=act: act(x @ w + b)  # noqa: E731
        found[f"{name} fused"] = (value_and_gradients(aicf_jax.fuse(f, policy=H200)), (args, struct(M, N)))
        found[f"{name} unfused"] = (value_and_gradients(f), (args, struct(M, N)))
    x = struct(1024, 512)
    variables = jax.eval_shape(MLP().init, jax.random.key(0), x)
    apply = aicf_jax.fuse(MLP(), policy=H200).apply
    found["mlp fused"] = (value_and_gradients(apply), ((variables, x), x))
    return found


@pytest.fixture(scope="module")
def reports():
    return aot.compile_all("h200", programs())


@pytest.mark.parametrize("name", COMPILED)
def test_one_kernel_with_wgmma_and_without_a_spill(reports, name):
    report = reports[name]
    assert not isinstance(report, Exception), report
    assert report.counts == {"mosaic": 1} and report.spill_bytes == 0, report
    assert "wgmma" in str(report)


@pytest.mark.parametrize("name", COMPILED_GRAD)
def test_a_gradient_is_one_kernel_without_a_spill(reports, name):
    report = reports[f"gradient: {name}"]
    assert not isinstance(report, Exception), report
    assert report.counts["mosaic"] == 1 and report.spill_bytes == 0, report
    # Few columns are summed in groups of rows, which XLA adds up.
    assert report.count == 1 or name in ("few columns", "ragged"), report


@pytest.mark.parametrize("name", LAYERS)
def test_four_kernels_forward_and_backward_and_one_dz(reports, name):
    fused, unfused = reports[f"{name} fused"], reports[f"{name} unfused"]
    assert fused.count == 4 and fused.counts["mosaic"] == 2, fused.beside(unfused)
    assert fused.count < unfused.count and fused.spill_bytes == 0
    assert fused.temporaries_bytes <= M * N * 2 + 4096


def test_the_kernels_of_a_flax_model(reports):
    report = reports["mlp fused"]
    names = str(report)
    # A kernel that writes over its argument loses its name in jax 0.10.
    gradient = "new_body" if jax.__version_info__ < (0, 11) else "gelu_tanh_grad_and_sum"
    assert "gemm_bias_gelu_tanh" in names and gradient in names and "gemm_bias_none" in names, report
