"""Batch norm in training: recognized with its running statistics, and equal to the unfused program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.test_util import check_grads

import aicf_jax
from tests.families import assert_identical_programs, plain_kernels
from tests.support import ACTIVATION_ROUNDINGS, ACTIVATIONS, assert_same, key, normal, quick_jit
from tests.transformations import TRANSFORMS, assert_fused_same, gradient, transformed

AXES = (0, 1, 2)
SHAPE = (2, 3, 3, 4)
# Sums of 18 elements twice, and of as many products backward; ten roundings of the affine function and the root.
ROUNDINGS = 2 * 18 + 10 + ACTIVATION_ROUNDINGS
EPS = 1e-3


def centered(x, m):
    return jnp.mean(jnp.square(x - m), AXES)


def moments(x, m):
    return jnp.mean(x * x, AXES) - m * m


def clamped(x, m):
    return jnp.maximum(0.0, jnp.mean(lax.square(x), AXES) - lax.square(m))


def normalized(name, variance=clamped, kept=True, eps=EPS):
    """``act((x - mean) * rstd * scale + bias)`` with what a running average takes."""

    def normalized(x, scale, bias):
        m = jnp.mean(x, AXES)
        v = variance(x, m)
        y = ACTIVATIONS[name]((x - m) * (lax.rsqrt(v + eps) * scale) + bias)
        return (y, 0.9 * scale + 0.1 * m, 0.1 * v) if kept else y

    return normalized


def arguments(dtype=jnp.float32):
    return normal(0, *SHAPE, dtype=dtype) + 1, normal(1, 4, dtype=dtype), normal(2, 4, dtype=dtype)


def only(report):
    (fusion,) = report.fusions
    return fusion


SPELLINGS = {
    "jnp.var": lambda x, s, b: (x - x.mean(AXES)) / jnp.sqrt(x.var(AXES) + EPS) * s + b,
    "dimensions kept": lambda x, s, b: (
        (x - x.mean(AXES, keepdims=True)) * lax.rsqrt(x.var(AXES, keepdims=True) + EPS) * s + b
    ),
    "no scale": lambda x, s, b: (x - x.mean(AXES)) * lax.rsqrt(x.var(AXES) + EPS) + b,
    "neither": lambda x, s, b: (x - x.mean(AXES)) / jnp.sqrt(x.var(AXES) + EPS),
    "folded": lambda x, s, b: (
        x * (s * lax.rsqrt(x.var(AXES) + EPS)) + (b - x.mean(AXES) * (s * lax.rsqrt(x.var(AXES) + EPS)))
    ),
    "channels first": lambda x, s, b: (
        (x - x.mean((0, 2, 3), keepdims=True)) / jnp.sqrt(x.var((0, 2, 3), keepdims=True) + EPS) * s[:3, None, None]
    ),
    "of an image": lambda x, s, b: (
        (x - x.mean((1, 2), keepdims=True)) / jnp.sqrt(x.var((1, 2), keepdims=True) + EPS) * s + b
    ),
    "of the batch alone": lambda x, s, b: (x - x.mean(0)) / jnp.sqrt(x.var(0) + EPS),
}


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_spellings(name, activation):
    def f(x, s, b):
        return ACTIVATIONS[activation](SPELLINGS[name](x, s, b))

    args = arguments()
    fusion = only(aicf_jax.explain(f, *args))
    assert fusion.op == "batch_norm" and f"activation={activation}" in str(fusion.attrs)
    got, want = (quick_jit(g)(*args) for g in (aicf_jax.fuse(f), f))
    assert_same(got, want, roundings=ROUNDINGS)


@pytest.mark.parametrize("variance", [centered, moments, clamped])
def test_mean_and_variance_may_be_results(variance):
    args = arguments()
    fusion = only(aicf_jax.explain(normalized("silu", variance), *args))
    kept = 1 + 4 * (3 if variance is clamped else 2)
    assert f"kept={kept}" in str(fusion.attrs) and f"clamped={int(variance is clamped)}" in str(fusion.attrs)
    assert "kept=0" in str(only(aicf_jax.explain(normalized("silu", variance, kept=False), *args)).attrs)


# -- equal to the unfused program ----------------------------------------------------------------------------------

QUICK = {"vmap_everything", "grad_of_grad", "scan_body", "remat_dots_saveable"}


@pytest.mark.parametrize(
    "transform", [t if t in QUICK else pytest.param(t, marks=pytest.mark.slow) for t in TRANSFORMS]
)
def test_transform_of_fused_equals_transform_of_unfused(transform):
    assert_fused_same(normalized("silu"), arguments(), transform, roundings=2 * ROUNDINGS)


@pytest.mark.parametrize(
    ("variance", "name"),
    [(clamped, "relu"), *(pytest.param(v, n, marks=pytest.mark.slow) for v in (centered, moments) for n in ("silu",))],
)
def test_left_to_xla_it_is_the_unfused_program(variance, name):
    f, args = normalized(name, variance), arguments()
    assert only(aicf_jax.explain(f, *args)).kernel == "xla"
    assert_identical_programs(f, *args, where=(0, 1, 2))


@pytest.mark.parametrize(
    ("variance", "name", "kept"),
    [
        (clamped, "relu", True),
        *(
            pytest.param(v, n, k, marks=pytest.mark.slow)
            for v in (clamped, centered, moments)
            for n in ("silu", "none", "leaky_relu")
            for k in (True, False)
        ),
    ],
)
def test_with_kernels_of_its_own(variance, name, kept):
    """The derived backward, which otherwise does not run: value, cotangents, tangents, both batched, second order."""
    f, args = normalized(name, variance, kept), arguments()
    fused = aicf_jax.fuse(f, kernels=plain_kernels(f, *args))
    assert only(aicf_jax.explain(fused, *args)).kernel == "plain_batch_norm"
    assert str(jax.make_jaxpr(lambda *a: gradient(fused, a))(*args)).count("batch_norm_grad") == 1
    names = ("vjp", "jvp", "vmap_of_grad_everything", "hessian_vector_product")
    assert_same(transformed(names, fused, args), transformed(names, f, args), roundings=4 * ROUNDINGS)


@pytest.mark.parametrize("name", ["relu", pytest.param("silu", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", pytest.param("float16", marks=pytest.mark.slow), pytest.param("float64", marks=pytest.mark.slow)],
)
def test_precisions_with_statistics_in_float32(name, dtype):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = jnp.promote_types(dtype, jnp.float32)

        def f(x, scale, bias):
            y, m, v = normalized("none")(x.astype(wide), scale.astype(wide), bias.astype(wide))
            return ACTIVATIONS[name](y.astype(x.dtype)), m, v

        args = arguments(dtype)
        fused = aicf_jax.fuse(f, kernels=plain_kernels(f, *args))
        assert only(aicf_jax.explain(fused, *args)).kernel == "plain_batch_norm"
        # Results, cotangents of the activation and of x are rounded to the type, a relu decides by the very same Z.
        roundings = 4 * ROUNDINGS if dtype == "float64" else 8
        got, want = transformed(("vjp",), fused, args), transformed(("vjp",), f, args)
        assert_same(got, want, roundings=roundings, dtype=dtype)


@pytest.mark.slow
def test_derivatives_against_finite_differences():
    with jax.enable_x64(True):
        for variance in (centered, moments):
            f, args = normalized("silu", variance), arguments(jnp.float64)
            check_grads(aicf_jax.fuse(f, kernels=plain_kernels(f, *args)), args, order=2)


def test_a_constant_channel_has_the_slope_of_the_clamp():
    """Its variance is 0, where the derivative of max(0, v) is one half."""
    f = normalized("none", eps=1.0)
    x, scale, bias = arguments()
    args = x.at[..., 1].set(2.0), scale, bias
    fused = aicf_jax.fuse(f, kernels=plain_kernels(f, *args))
    assert_same(transformed(("vjp",), fused, args), transformed(("vjp",), f, args), roundings=4 * ROUNDINGS)


def test_bitwise_leaves_it_as_written():
    report = aicf_jax.explain(normalized("relu"), *arguments(), policy=aicf_jax.Policy(numerics="bitwise"))
    assert not report.fusions and {r.code for r in report.refusals} == {"numerics"}


# -- models --------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    dtype: object = None
    axis_name: str | None = None
    use_fast_variance: bool = True

    @nn.compact
    def __call__(self, x):
        norm = functools.partial(
            nn.BatchNorm,
            use_running_average=False,
            dtype=self.dtype,
            axis_name=self.axis_name,
            use_fast_variance=self.use_fast_variance,
        )
        y = nn.relu(norm()(nn.Conv(4, (3, 3), use_bias=False, dtype=self.dtype)(x)))
        return nn.silu(norm()(nn.Conv(4, (1, 1), dtype=self.dtype)(y)))


@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_linen_values_gradients_and_running_averages(dtype, fast):
    module, x = Net(dtype=dtype, use_fast_variance=fast), normal(0, 2, 6, 6, 3)
    variables = module.init(key(0), x)
    report = aicf_jax.explain(lambda v, x: module.apply(v, x, mutable=["batch_stats"]), variables, x)
    assert report.count("batch_norm") == 2 and report.count("conv_epilogue") == 1  # one convolution has a bias
    assert {f.attrs.split("activation=")[1].split()[0] for f in report.fusions if f.op == "batch_norm"} == {
        "relu",
        "silu",
    }

    def step(m):
        def loss(p, s, x):
            y, updated = m.apply({"params": p, "batch_stats": s}, x, mutable=["batch_stats"])
            return jnp.sum(y.astype(jnp.float32) ** 2), (y, updated)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"], variables["batch_stats"], x)

    run = lambda m: jax.jit(lambda v, x: m.apply(v, x, mutable=["batch_stats"]))(variables, x)  # noqa: E731
    fused = aicf_jax.fuse(module)
    assert_same(run(fused), run(module), roundings=0)
    # Where it is differentiated, which bfloat16 roundings XLA leaves out depends on the order of the equations.
    assert_same(step(fused), step(module), roundings=0 if dtype is None else 24, dtype=dtype)


def test_statistics_of_several_devices_come_from_outside():
    """They are averaged between what makes them and what uses them: that is no norm of one array."""
    module, x = Net(axis_name="devices"), normal(0, 3, 2, 6, 6, 3)
    variables = Net().init(key(0), x[0])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:3]), ("devices",))
    one, split = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("devices")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(one, split), out_specs=(split, one))
    def f(v, x):
        return module.apply(v, x[0], mutable=["batch_stats"])

    report = aicf_jax.explain(f, variables, x)
    assert report.count("batch_norm") == 0
    assert {r.code for r in report.refusals if r.pattern.startswith("conv")} == {"synchronized_statistics"}
    got, want = (jax.jit(g)(variables, x) for g in (aicf_jax.fuse(f), f))
    assert_same(got, want, roundings=0)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.conv, self.norm = nnx.Conv(3, 4, (3, 3), rngs=rngs), nnx.BatchNorm(4, momentum=0.9, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.norm(self.conv(x)))


def test_nnx_training_steps_leave_the_same_state():
    x = normal(0, 2, 6, 6, 3)
    assert aicf_jax.explain(NnxNet(nnx.Rngs(0)), x).count("batch_norm") == 1
    found = []
    for wrap in (aicf_jax.fuse, lambda m: m):
        model = wrap(NnxNet(nnx.Rngs(0)))
        step = nnx.jit(nnx.value_and_grad(lambda m, x: jnp.sum(m(x) ** 2)))
        out = [step(model, x + i) for i in range(2)]
        found.append((jax.tree.leaves(out), jax.tree.leaves(nnx.state(model))))
    assert_same(found[0], found[1], roundings=0)


# -- what resembles it ---------------------------------------------------------------------------------------------


def over(statistic, scale=lambda s: s):
    def f(x, s, b):
        m = x.mean(AXES)
        return (x - m) * lax.rsqrt(statistic(x, m) + EPS) * scale(s) + b

    return f


def square_kept(x, s, b):
    q, m = jnp.mean(x * x, AXES), x.mean(AXES)
    return (x - m) * lax.rsqrt(q - m * m + EPS) * s + b, jnp.cumsum(q)


def normalized_kept(x, s, b):
    y = (x - x.mean(AXES)) * lax.rsqrt(x.var(AXES) + EPS)
    return jax.nn.relu(y * s + b), jnp.cumsum(y * s, 0)


NEAR = {
    "ddof": (over(lambda x, m: x.var(AXES, ddof=1)), "axes_not_trailing"),
    "stopped": (over(lambda x, m: lax.stop_gradient(x.var(AXES))), "stopped_statistics"),
    "the mean square is kept": (square_kept, "statistics_reused"),
    "a scale along the width": (over(centered, lambda s: s[:3, None]), None),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_misses(name):
    f, code = NEAR[name]
    args = arguments()
    report = aicf_jax.explain(f, *args)
    codes = {r.code for r in report.refusals}
    if code is not None:
        assert report.count("batch_norm") == 0 and codes == {code}
    else:  # the norm ends before it
        assert report.count("batch_norm") == 1
    got, want = (jax.jit(g)(*args) for g in (aicf_jax.fuse(f), f))
    assert_same(got, want, roundings=0)


def test_a_normalized_value_that_is_kept_ends_it():
    args = arguments()
    report = aicf_jax.explain(normalized_kept, *args)
    assert report.count("batch_norm") == 1
    got, want = (jax.jit(g)(*args) for g in (aicf_jax.fuse(normalized_kept), normalized_kept))
    assert_same(got, want, roundings=0)


def test_an_array_without_channels_is_refused():
    args = np.zeros((2, 3, 3, 0), "float32"), np.zeros(0, "float32"), np.zeros(0, "float32")
    report = aicf_jax.explain(normalized("relu"), *args)
    assert not report.fusions and {r.code for r in report.refusals} == {"empty"}
