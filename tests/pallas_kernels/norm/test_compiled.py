"""Norms compiled for an H200 that need not be there: how many kernels, and that none spills a register."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen

import aicf_jax
from pallas_kernels import aot
from pallas_kernels.norm import backward, forward
from pallas_kernels.norm.cases import COMPILED

pytestmark = [pytest.mark.aot, pytest.mark.slow]

H200 = aicf_jax.Policy(target="h200", on_failure="raise")


def struct(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def forward_of(case):
    def f(x, scale, bias, residual):
        found = forward(
            x,
            scale,
            bias,
            residual,
            eps=1e-5,
            variance=case.variance,
            clamped=case.clamped,
            with_sum=case.with_sum,
            with_statistics=True,
        )
        return [a for a in found if a is not None]

    return f


def backward_of(case):
    def f(dy, x, rstd, mean, slope, scale, residual, dsum):
        found = backward(dy, x, rstd, mean, slope, scale, residual, dsum, dscale=jnp.float32, dbias=jnp.float32)
        return list(found)

    return f


def programs():
    """Name -> function and types: each case forward and backward, then models through `fuse`."""
    found = {}
    for name, case in COMPILED.items():
        a = jax.eval_shape(lambda case=case: case.arrays(jax.random.key(0)))
        row = struct((case.count,), jnp.float32)
        found[f"{name} forward"] = (forward_of(case), (a["x"], a["scale"], a["bias"], a["residual"]))
        statistics = (row, None if case.variance == "mean_square" else row, row if case.clamped else None)
        residual = None if case.with_sum else a["residual"]
        given = (a["dy"], a["x"], *statistics, a["scale"], residual, a["dsum"])
        found[f"{name} backward"] = (backward_of(case), given)
    x, p = struct((8192, 4096)), struct((4096,))
    for name, (f, args) in {
        "layer norm": (layer_norm, (x, x, p, p)),
        "layer norm and sum": (layer_norm_and_sum, (x, x, p, p)),
        "root mean square": (rms_norm, (x, p)),
    }.items():
        given = (args, jax.eval_shape(f, *args))
        found[f"{name} fused"] = (value_and_gradients(aicf_jax.fuse(f, policy=H200)), given)
        found[f"{name} unfused"] = (value_and_gradients(f), given)
    return found


def layer_norm(x, r, scale, bias):
    return layer_norm_and_sum(x, r, scale, bias)[0]


def layer_norm_and_sum(x, r, scale, bias):
    """As in a block of a transformer: the sum goes on."""
    s = x + r
    module = linen.LayerNorm(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    return module.apply({"params": {"scale": scale, "bias": bias}}, s), s


def rms_norm(x, scale):
    module = linen.RMSNorm(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    return module.apply({"params": {"scale": scale}}, x)


def value_and_gradients(f):
    def both(args, cotangents):
        y, pull = jax.vjp(f, *args)
        found = dict(
            zip(("dx", "dr", "dscale", "dbias") if len(args) == 4 else ("dx", "dscale"), pull(cotangents), strict=True)
        )
        found.pop("dr", None)  # it is dX: returned too it would be copied
        return y, found

    return both


@pytest.fixture(scope="module")
def reports():
    return aot.compile_all("h200", programs())


@pytest.mark.parametrize("name", COMPILED)
def test_one_kernel_forward_and_two_backward_without_a_spill(reports, name):
    for direction, count in (("forward", 1), ("backward", 2)):
        report = reports[f"{name} {direction}"]
        assert not isinstance(report, Exception), report
        assert report.spill_bytes == 0, report
        whole = COMPILED[name].length % 64 == 0
        assert report.counts.get("mosaic") == count and (report.count == count or not whole), report


@pytest.mark.parametrize("name", ["layer norm", "layer norm and sum", "root mean square"])
def test_three_kernels_through_fuse(reports, name):
    fused, unfused = reports[f"{name} fused"], reports[f"{name} unfused"]
    assert fused.counts == {"mosaic": 3}, fused.beside(unfused)
    assert fused.count < unfused.count
    assert fused.spill_bytes == 0
