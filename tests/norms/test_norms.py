"""Norms compute and differentiate like the unfused program, left to XLA or with a kernel and the derived backward."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.test_util import check_grads

import aicf_jax
from aicf_jax.derived import backward_program
from experiments.benchmarks.compare import canonical_hlo
from experiments.benchmarks.measure import temporaries_bytes
from tests.aicf_jax.norm_support import (
    AFFINE,
    EPS,
    KERNELS,
    NEAR_MISSES,
    VARIANCES,
    B,
    G,
    X,
    Z,
    float32_inside,
    gemma,
    layer_norm,
    llama,
    mean,
    rms_norm,
    standardized,
)
from tests.support import UNIT_ROUNDOFF, assert_same, key, normal, quick_jit
from tests.transformations import TRANSFORMS, gradient, transformed

# Sums of 6 over a row and of 6 rows, and a chain of about a dozen roundings (mean, square, root, products), each way.
ROUNDINGS = 24


def residual_layer_norm(x, z, g, b):
    s = x + jnp.sin(z)
    return layer_norm(s, g, b), s


def residual_rms_norm(x, z, g, b):
    s = x + jnp.sin(z)
    return rms_norm(s, g, b, affine="no bias"), jnp.cos(s) * b


def hidden_residual(x, z, g, b):
    return layer_norm(x + z, g, b, affine="as flax does")


def twice_the_same(x, z, g, b):
    return rms_norm(x + x, g, b) * z


def clamped(x, z, g, b):
    return layer_norm(x, g, b, variance="from moments, clamped") * z


def two_axes(x, z, g, b):
    m = mean(x, (-2, -1))
    return (x - m) / jnp.sqrt(jnp.var(x, (-2, -1), keepdims=True) + EPS) * (z[0] * g) + b


def of_one_vector(x, z, g, b):
    """The scale is also one of the addends."""
    return layer_norm(g + b, g, b) * x + z


FUNCTIONS = {
    f.__name__: f
    for f in (
        residual_layer_norm,
        residual_rms_norm,
        hidden_residual,
        twice_the_same,
        clamped,
        two_axes,
        of_one_vector,
    )
}
ARGS = (X, Z, G, B)


def kept_whole(f):
    """Fused, with kernels: nothing is left to XLA, so the derived backward runs."""
    return aicf_jax.fuse(f, kernels=KERNELS)


FUSERS = {"left to XLA": aicf_jax.fuse, "kernel": kept_whole}


# -- values and gradients --------------------------------------------------------------------------------


def rest_slow(names, quick):
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@functools.cache
def reference(name, dtype):
    """Value and pulled-back cotangent in float64, of arguments that are exact in the type."""
    f = FUNCTIONS[name]
    with jax.enable_x64(True):
        args = [jnp.asarray(np.asarray(a.astype(dtype), np.float64)) for a in ARGS]
        return jax.tree.map(np.asarray, quick_jit(lambda *a: (f(*a), vector_jacobian(f, a)))(*args))


def vector_jacobian(f, args):
    out, pull = jax.vjp(f, *args)
    return pull(jax.tree.map(lambda y: normal(20, *y.shape, dtype=y.dtype), out))


def error_of(found, expected):
    """Largest error in units of the largest value; a gradient that is zero in exact arithmetic is noise of the rest."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    floor = max(np.max(np.abs(b)) for _, b in pairs) / 32
    return max(np.max(np.abs(np.asarray(a, np.float64) - b)) / max(np.max(np.abs(b)), floor) for a, b in pairs)


@pytest.mark.parametrize("fuser", rest_slow(FUSERS, ("kernel",)))
@pytest.mark.parametrize("dtype", rest_slow(["float64", "float32", "bfloat16", "float16"], ("float32", "bfloat16")))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_against_float64(name, dtype, fuser):
    with jax.enable_x64(dtype == "float64"):
        args = [jnp.asarray(np.asarray(a), dtype) for a in ARGS]
        f = FUSERS[fuser](FUNCTIONS[name])
        value, grads = quick_jit(lambda *a: (f(*a), vector_jacobian(f, a)))(*args)
    expected = reference(name, dtype)
    # tolerance: unit roundoff x roundings; the cotangent is drawn anew in float64 and rounded once for the program
    assert error_of(value, expected[0]) <= ROUNDINGS * UNIT_ROUNDOFF[dtype]
    assert error_of(grads, expected[1]) <= 4 * ROUNDINGS * UNIT_ROUNDOFF[dtype]


@pytest.mark.parametrize("affine", rest_slow(AFFINE, ("folded", "one plus the scale", "neither")))
def test_gradients_of_every_spelling_of_the_affine_part(affine):
    f = functools.partial(layer_norm, affine=affine)
    fused = quick_jit(lambda *a: gradient(kept_whole(f), a))(X, G, B)
    assert_same(fused, quick_jit(lambda *a: gradient(f, a))(X, G, B), roundings=4 * ROUNDINGS)


@pytest.mark.parametrize("variance", rest_slow(VARIANCES, ("jnp.var", "from moments, clamped")))
def test_gradients_of_every_spelling_of_the_variance(variance):
    f = functools.partial(layer_norm, variance=variance)
    fused = quick_jit(lambda *a: gradient(kept_whole(f), a))(X, G, B)
    assert_same(fused, quick_jit(lambda *a: gradient(f, a))(X, G, B), roundings=4 * ROUNDINGS)


@pytest.mark.parametrize("dtype", rest_slow(["float32", "bfloat16", "float16"], ("bfloat16",)))
@pytest.mark.parametrize("f", [float32_inside, llama, gemma, standardized], ids=lambda f: f.__name__)
def test_float32_statistics_over_low_precision(f, dtype):
    x = X.astype(dtype)
    with jax.numpy_dtype_promotion("standard"):
        fused = quick_jit(lambda *a: (kept_whole(f)(*a), gradient(kept_whole(f), a)))(x, G, B)
        unfused = quick_jit(lambda *a: (f(*a), gradient(f, a)))(x, G, B)
    # tolerance: a dozen roundings to the type of the values, in which the unfused gradients are added up
    assert_same(fused, unfused, roundings=4 * 12 if dtype != "float32" else 4 * ROUNDINGS, dtype=dtype)


# -- exact semantics -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", rest_slow([0.0, 3.0, 0.1], (0.1,)))
@pytest.mark.parametrize("name", ["from moments, clamped", "from moments", "of deviations"])
def test_rows_of_one_value(name, value):
    """The variance is 0 or what rounding leaves of it, and there the clamp has a slope of 1, 1/2 or 0."""
    x = X.at[0].set(value)
    f = functools.partial(layer_norm, variance=name)
    fused = quick_jit(lambda *a: gradient(kept_whole(f), a))(x, G, B)
    # tolerance: the normalized value of such a row is a rounding over sqrt(eps), 300 times larger
    assert_same(fused, quick_jit(lambda *a: gradient(f, a))(x, G, B), roundings=300 * ROUNDINGS)


def test_the_slope_of_the_clamp():
    """Of E[x^2] - m^2 = 0 the clamp passes half: what the derived backward keeps of each row says so."""
    op = aicf_jax.explain(lambda x: layer_norm(x, G, B, variance="from moments, clamped"), X)
    assert "mean, rstd, slope, dY" in op.fusions[0].backward
    x = jnp.asarray([[2.0, 2.0, 2.0, 2.0], [1.0, 2.0, 3.0, 4.0]])
    f = kept_whole(lambda x: layer_norm(x, 1.0, 0.0, variance="from moments, clamped"))
    (traced,) = (e for e in jax.make_jaxpr(f)(x).eqns if e.primitive.name == "fused")
    semantic = traced.params["op"].semantic
    _, (_, _, slope) = semantic.composite.save(traced.params["op"], [x])
    np.testing.assert_array_equal(slope[:, 0], [0.5, 1.0])


@pytest.mark.parametrize("bad", rest_slow([np.nan, np.inf, -np.inf, 1e20], (np.inf, 1e20)))
@pytest.mark.parametrize("name", ["hidden_residual", "twice_the_same", "clamped"])
def test_nan_infinity_and_overflow_end_up_in_the_same_places(name, bad):
    f = FUNCTIONS[name]
    args = (X.at[0, 1, 2].set(bad), Z, G, B)
    fused = quick_jit(lambda *a: (kept_whole(f)(*a), vector_jacobian(kept_whole(f), a)))(*args)
    unfused = quick_jit(lambda *a: (f(*a), vector_jacobian(f, a)))(*args)
    for a, b in zip(jax.tree.leaves(fused), jax.tree.leaves(unfused), strict=True):
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))


def test_statistics_that_are_not_differentiated_are_left_alone():
    names = ("a stopped mean", "a stopped variance", "a stopped deviation")

    def all_three(x, g):
        return [NEAR_MISSES[name][0](x, g, B, Z) for name in names]

    found, expected = (quick_jit(lambda *a, f=f: gradient(f, a))(X, G) for f in (kept_whole(all_three), all_three))
    assert_same(found, expected, roundings=4 * ROUNDINGS)


# -- transformations -------------------------------------------------------------------------------------


@functools.cache
def gradient_of_unfused():
    return quick_jit(lambda *a: gradient(residual_layer_norm, a))(*ARGS)


#: Compiled twice each: the rest are slow tests.
QUICK = (
    "value_and_grad_jit",
    "jvp",
    "vmap_everything",
    "vmap_of_grad_only_first",
    "hessian_vector_product",
    "scan_body",
)


@pytest.mark.parametrize("name", ["residual_layer_norm", pytest.param("residual_rms_norm", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "transform", [t if t in QUICK else pytest.param(t, marks=pytest.mark.slow) for t in TRANSFORMS]
)
def test_transformations(name, transform):
    f = FUNCTIONS[name]
    passes = TRANSFORMS[transform].passes
    found, expected = (transformed(transform, h, ARGS) for h in (kept_whole(f), f))
    assert_same(found, expected, roundings=4 * passes * ROUNDINGS)


@pytest.mark.parametrize("name", rest_slow(["residual_layer_norm", "twice_the_same"], ("residual_layer_norm",)))
def test_second_order_against_finite_differences(name):
    with jax.enable_x64(True):
        args = [jnp.asarray(np.asarray(a[..., :3], np.float64)) for a in ARGS]
        # tolerance: that of finite differences in float64, twice
        check_grads(jax.jit(kept_whole(FUNCTIONS[name])), args, order=2, rtol=1e-4, atol=1e-4)


def test_the_backward_is_one_operation_that_keeps_no_more_than_rows():
    op = jax.make_jaxpr(kept_whole(residual_layer_norm))(*ARGS).eqns[-1].params["op"]
    backward = backward_program(op, (0, 1, 2, 3))
    assert backward.op is not None and backward.op.semantic.name == "layer_norm_grad"
    assert backward.names == ("X", "R", "scale", "bias", "S", "mean", "rstd", "dY", "dS")
    kept = dict(zip(backward.names, backward.op.in_avals, strict=True))
    assert kept["mean"].shape == kept["rstd"].shape == (2, 3, 1)
    only_sum = backward_program(op, (0, 1), (False, True))
    assert only_sum.names[-1] == "dS" and "dY" not in only_sum.names


@pytest.mark.parametrize("which", [0, 1])
def test_the_cotangent_of_one_result_alone(which):
    fused = quick_jit(lambda *a: gradient(lambda *b: kept_whole(residual_layer_norm)(*b)[which], a))
    unfused = quick_jit(lambda *a: gradient(lambda *b: residual_layer_norm(*b)[which], a))
    assert_same(fused(*ARGS), unfused(*ARGS), roundings=4 * ROUNDINGS)


def test_a_verified_program():
    f = aicf_jax.fuse(residual_layer_norm, kernels=KERNELS, policy=aicf_jax.Policy(verify=True))
    assert_same(quick_jit(lambda *a: gradient(f, a))(*ARGS), gradient_of_unfused(), roundings=4 * ROUNDINGS)


# -- modules ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    norm: type = nn.LayerNorm

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = x + nn.Dense(6)(nn.gelu(nn.Dense(8)(self.norm()(x))))
        return self.norm(use_scale=False)(x)


class NnxBlock(nnx.Module):
    def __init__(self, norm, rngs):
        self.norm, self.up, self.down = norm(6, rngs=rngs), nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 6, rngs=rngs)

    def __call__(self, x):
        return self.norm(x + self.down(nnx.gelu(self.up(self.norm(x)))))


@pytest.mark.parametrize("norm", [nn.LayerNorm, pytest.param(nn.RMSNorm, marks=pytest.mark.slow)])
def test_linen_modules(norm):
    module = Block(norm)
    variables = quick_jit(module.init)(key(0), X)
    assert sum(f.op.endswith("_norm") for f in aicf_jax.explain(module, variables, X).fusions) == 3

    def gradients(m):
        return jax.jit(jax.grad(lambda v, x: jnp.sum(jnp.square(m.apply(v, x) - Z)), (0, 1)))(variables, X)

    # tolerance: two products of up to 8 terms and three norms in a row
    assert_same(gradients(kept_whole(module)), gradients(module), roundings=16 * ROUNDINGS)


@pytest.mark.parametrize("norm", [pytest.param(nnx.LayerNorm, marks=pytest.mark.slow), nnx.RMSNorm])
def test_nnx_modules(norm):
    model = NnxBlock(norm, nnx.Rngs(0))
    assert sum(f.op.endswith("_norm") for f in aicf_jax.explain(model, X).fusions) == 2

    def gradients(m):
        return nnx.jit(nnx.grad(lambda m, x: jnp.sum(jnp.square(m(x) - Z))))(m, X)

    found, expected = (dict(nnx.to_flat_state(gradients(m))) for m in (kept_whole(model), model))
    assert_same(
        {k: v[...] for k, v in found.items()}, {k: v[...] for k, v in expected.items()}, roundings=16 * ROUNDINGS
    )


# -- the program that runs -------------------------------------------------------------------------------


def test_left_to_xla_the_program_is_the_unfused_one():
    """Without a gradient, that is: see `tests/test_kept_for_the_backward.py`."""
    module = Block()
    variables = jax.eval_shape(module.init, jax.random.key(0), X)
    fused, unfused = (jax.jit(m.apply).lower(variables, X).compile() for m in (aicf_jax.fuse(module), module))
    assert canonical_hlo(fused.as_text()) == canonical_hlo(unfused.as_text())
    assert temporaries_bytes(fused) == temporaries_bytes(unfused)


def test_sharded_batches():
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
    x, z = (jax.device_put(a, sharding) for a in (X, Z))
    fused = quick_jit(lambda *a: gradient(kept_whole(residual_layer_norm), a))(x, z, G, B)
    assert_same(fused, gradient_of_unfused(), roundings=4 * ROUNDINGS)


def test_under_vmap_a_scale_of_each_example_is_no_part_of_the_norm():
    scales = jnp.stack([G, 2 * G])
    fused = jax.vmap(kept_whole(layer_norm), (0, 0, None))
    text = str(jax.make_jaxpr(fused)(X, scales, B))
    assert text.count("fused[") == 1 and "has_scale=0" in text
    assert_same(fused(X, scales, B), jax.vmap(layer_norm, (0, 0, None))(X, scales, B), roundings=ROUNDINGS)


def test_a_loop_of_norms():
    def f(x, g, b):
        return lax.fori_loop(0, 3, lambda _, c: layer_norm(c, g, b), x)

    assert_same(jax.jit(kept_whole(f))(X, G, B), jax.jit(f)(X, G, B), roundings=3 * ROUNDINGS)


def test_statistics_in_float64_of_float32_are_kept_in_float64():
    def f(x, g):
        wide = x.astype(jnp.float64)
        return (wide * lax.rsqrt(mean(wide * wide) + EPS)).astype(jnp.float32) * g

    with jax.enable_x64(True):
        op = jax.make_jaxpr(kept_whole(f))(X, G).eqns[-1].params["op"]
        assert backward_program(op, (0,)).op.in_avals[-2].dtype == jnp.float64
        fused = quick_jit(lambda *a: gradient(kept_whole(f), a))(X, G)
        assert_same(fused, quick_jit(lambda *a: gradient(f, a))(X, G), roundings=4 * ROUNDINGS)


def test_what_a_kernel_is_asked_for():
    op = jax.make_jaxpr(kept_whole(hidden_residual))(*ARGS).eqns[-1].params["op"]
    assert op.requirements() == {
        "axes": 1,
        "length": 6,
        "row_bytes": 24,
        "arrays": "rows",
        "inputs": ("X", "R", "scale", "bias"),
        "variance": "centered",
        "clamped": False,
        "statistics": "float32",
        "has_residual": True,
        "scale_axes": (-1,),
        "bias_axes": (-1,),
        "input_dtypes": ("float32",) * 4,
        "output_dtypes": ("float32",),
    }


def test_a_square_may_be_a_power():
    def f(x, g):
        return x * lax.rsqrt(mean(x**2.0) + EPS) * g

    assert [x.op for x in aicf_jax.explain(f, X, G, kernels=KERNELS).fusions] == ["rms_norm"]
    x = X.at[0].set(0)
    fused = quick_jit(lambda *a: gradient(kept_whole(f), a))(x, G)
    assert_same(fused, quick_jit(lambda *a: gradient(f, a))(x, G), roundings=4 * ROUNDINGS)
