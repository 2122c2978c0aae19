"""The Mosaic GPU kernels as candidates for GEMM epilogues: what they take, and that arrays find their places.

The kernels themselves are tested in `tests/pallas_kernels`; here their equations in plain jax stand in for them on a
CPU, but for one test in the simulator.
"""

import contextlib
import dataclasses
import math
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import aicf_jax
from aicf_jax.kernels import mosaic_gemm_epilogue, mosaic_gemm_epilogue_grad, triton_gemm_epilogue
from pallas_kernels import _compat, _mosaic, gemm_epilogue
from pallas_kernels.gemm_epilogue import ForwardConfig, portable, reference

FORWARD, GRADIENT = mosaic_gemm_epilogue.KERNEL, mosaic_gemm_epilogue_grad.KERNEL
H200 = aicf_jax.Policy(target="h200", on_failure="raise")
ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu_tanh": jax.nn.gelu,
    "gelu_exact": lambda z: jax.nn.gelu(z, approximate=False),
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "sigmoid from Z": lambda z: 1 / (1 + jnp.exp(-z)),
    "elu": jax.nn.elu,
    "leaky_relu": lambda z: jax.nn.leaky_relu(z, 0.2),
    "softplus": jax.nn.softplus,
}


def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def plain_forward(a, b, bias, *, out_dtype, z_dtype, **options):
    y, z = reference.forward(a, b, bias, **options)
    return (y.astype(out_dtype), *(() if z_dtype is None else (z.astype(z_dtype),)))


def plain_backward(residual, dy, *, dz_dtype, db_dtype, in_place, **options):
    assert in_place == (options["activation"] not in ("relu", "tanh", "sigmoid") or not options["from_output"])
    dz, db = reference.backward(residual, dy, **options)
    if in_place and residual.dtype == dz_dtype:
        overwritten = jax.new_ref(residual)
        overwritten[...] = dz.astype(dz_dtype)
        return jax.freeze(overwritten), db.astype(db_dtype)
    return dz.astype(dz_dtype), db.astype(db_dtype)


def on_a_cpu(kernel, forward=plain_forward, backward=plain_backward):
    """The kernel with these functions in place of Mosaic's."""

    def patched(f):
        def run(op, *inputs):
            with (
                mock.patch.object(gemm_epilogue, "forward", forward),
                mock.patch.object(portable, "forward", forward),
                mock.patch.object(gemm_epilogue, "backward", backward),
            ):
                return f(op, *inputs)

        return f and run

    return dataclasses.replace(
        kernel, platforms=("cpu",), targets=None, available=None, run=patched(kernel.run), save=patched(kernel.save)
    )


KERNELS = on_a_cpu(FORWARD), on_a_cpu(GRADIENT)
TRITON = (on_a_cpu(triton_gemm_epilogue.KERNEL),)


def fused(f):
    return aicf_jax.fuse(f, kernels=KERNELS, policy=aicf_jax.Policy(on_failure="raise"))


def kernel_of(f, *args, policy=H200):
    report = aicf_jax.explain(f, *args, policy=policy)
    return [fusion.kernel for fusion in report.fusions]


def refusal_of(f, *args):
    report = aicf_jax.explain(f, *args, policy=H200)
    assert [fusion.kernel for fusion in report.fusions] == ["xla"]
    return next(r for r in report.refusals if r.stage == "select")


def dense(x, w, b):
    return jax.nn.gelu(x @ w + b)


# -- selection -------------------------------------------------------------------------------------------

X, W, B = struct(128, 64), struct(64, 96), struct(96)
# Smooth functions: which way a relu goes may hang on the rounding of the product.
TAKEN = {
    "plain": (dense, X, W, B),
    "float16": (dense, *(struct(*a.shape, dtype="float16") for a in (X, W, B))),
    "three dimensions": (dense, struct(4, 32, 64), W, B),
    "no bias": (lambda x, w: jnp.tanh(x @ w), X, W),
    "no activation": (lambda x, w, b: x @ w + b, X, W, B),
    "transposed weights": (lambda x, w, b: jax.nn.silu(x @ w.T + b), X, struct(96, 64), B),
    "float32 between": (
        lambda x, w, b: jax.nn.silu(jnp.dot(x, w, preferred_element_type=jnp.float32) + b).astype(x.dtype),
        X, W, struct(96, dtype="float32"),
    ),
    "rounded product": (
        lambda x, w, b: jax.nn.silu(jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype) + b), X, W, B,
    ),
    "batch": (lambda x, w: jax.nn.silu(jnp.einsum("bmk,bkn->bmn", x, w)), struct(4, 32, 64), struct(4, 64, 96)),
    "several features": (
        lambda x, w, b: jax.nn.silu(jnp.einsum("mk,khd->mhd", x, w) + b), X, struct(64, 6, 16), struct(6, 16),
    ),
    "left operand stored by columns": (
        lambda x, w, b: jax.nn.silu(jax.lax.dot_general(x, w, (((0,), (0,)), ((), ()))) + b), struct(64, 128), W, B,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_an_h200_gets_the_kernel(name):
    assert kernel_of(*TAKEN[name]) == ["mosaic_gemm_epilogue"]


@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_layers_of_flax(param_dtype):
    module = linen.Sequential([linen.Dense(96, dtype=jnp.bfloat16, param_dtype=param_dtype), linen.gelu])
    variables = jax.eval_shape(module.init, jax.random.key(0), X)
    report = aicf_jax.explain(module, variables, X, policy=H200)
    assert [f.kernel for f in report.fusions] == ["mosaic_gemm_epilogue"]
    layer = nnx.Linear(64, 96, dtype=jnp.bfloat16, param_dtype=param_dtype, rngs=nnx.Rngs(0))
    assert kernel_of(lambda x: nnx.relu(layer(x)), X) == ["mosaic_gemm_epilogue"]


@pytest.mark.parametrize(
    ("target", "codes"), [(None, []), ("cpu", []), ("cuda", []), ("a100", ["target"]), ("b200", ["target"])]
)
def test_other_machines_do_not_get_it_and_hear_of_it_where_they_were_named(target, codes):
    report = aicf_jax.explain(dense, X, W, B, policy=aicf_jax.Policy(target=target))
    assert [f.kernel for f in report.fusions] == ["xla"]
    assert [r.code for r in report.refusals if "mosaic" in r.detail] == codes


OVERFLOWING = {
    "softplus": lambda z: jnp.log1p(jnp.exp(z)),
    "silu": lambda z: z / (1 + jnp.exp(-z)),
    "sigmoid": lambda z: 1 / (1 + jnp.exp(-z)),
    "elu": lambda z: jnp.where(z > 0, z, jnp.expm1(z)),
}


@pytest.mark.parametrize("name", OVERFLOWING)
def test_a_formula_that_overflows_where_jaxs_own_does_not_is_not_taken(name):
    """The kernel would be finite where the equations, or their derivative, are not."""
    refusal = refusal_of(lambda x, w, b: OVERFLOWING[name](x @ w + b), X, W, B)
    assert refusal.code == "capability" and "formula='overflowing'" in refusal.found


@pytest.mark.parametrize("activation", [jax.nn.softplus, jax.nn.silu, jax.nn.sigmoid, jax.nn.elu, jax.nn.gelu])
def test_formulas_of_jax_are_taken_forward_and_backward(activation):
    f = aicf_jax.fuse(lambda x, w, b: activation(x @ w + b), policy=H200)
    program = str(jax.make_jaxpr(jax.grad(lambda w: f(jnp.ones(X.shape, X.dtype), w, jnp.ones(96, X.dtype)).sum()))(W))
    assert kernel_of(lambda x, w, b: activation(x @ w + b), X, W, B) == ["mosaic_gemm_epilogue"]
    assert "activation_grad" in program or "gemm_epilogue_grad" in program


@pytest.mark.parametrize(
    ("args", "found"),
    [
        pytest.param((struct(60, 64), W, B), "m=60", id="rows"),
        pytest.param((struct(128, 56), struct(56, 96), B), "k=56", id="depth"),
        pytest.param((X, struct(64, 40), struct(40)), "n=40", id="columns"),
        pytest.param(tuple(struct(*a.shape, dtype="float32") for a in (X, W, B)), "float32", id="type"),
        pytest.param((struct(0, 64), W, B), "matrices=None", id="nothing"),
    ],
)
def test_what_it_does_not_take(args, found):
    refusal = refusal_of(dense, *args)
    assert refusal.code == "capability" and found in refusal.found


def test_a_bias_of_another_shape_is_not_taken():
    f = lambda x, w, b: jax.nn.relu(jnp.einsum("mk,khd->mhd", x, w) + b)  # noqa: E731
    assert "bias='other'" in refusal_of(f, X, struct(64, 6, 16), struct(16)).found


def test_a_policy_of_bitwise_results_gets_none():
    policy = aicf_jax.Policy(target="h200", numerics="bitwise")
    assert kernel_of(dense, X, W, B, policy=policy) == []


# -- values and gradients --------------------------------------------------------------------------------


def assert_near(got, want, roundings):
    """Within so many roundings to 16 bits of the largest number in sight: the unfused program rounds each step."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.shape == w.shape and g.dtype == w.dtype
        g, w = (np.asarray(x).astype(np.float64) for x in (g, w))
        np.testing.assert_allclose(g, w, rtol=0, atol=roundings * 2.0**-9 * max(1, np.abs(w).max()))


def value_and_gradients(f):
    def both(*args):
        y, pull = jax.vjp(f, *args)
        return y, pull(jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype))

    return jax.jit(both)


def quick(names, *chosen):
    """All names, those that are not chosen only where slow tests run."""
    return [n if n in chosen else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", quick(ACTIVATIONS, "gelu_exact", "sigmoid from Z"))
def test_forward_and_backward(name):
    f = lambda x, w, b: ACTIVATIONS[name](x @ w + b)  # noqa: E731
    args = normal(0, 2, 16, 32), normal(1, 32, 16) * 0.2, normal(2, 16)
    # Every step of the unfused program rounds, the longest activation has some ten of them.
    assert_near(value_and_gradients(fused(f))(*args), value_and_gradients(f)(*args), 16)


@pytest.mark.parametrize("name", quick(TAKEN, "batch", "several features", "float32 between"))
def test_arrays_find_their_places(name):
    f, *types = TAKEN[name]
    args = [normal(i, *t.shape, dtype=t.dtype) * (0.2 if i == 1 else 1) for i, t in enumerate(types)]
    assert_near(value_and_gradients(fused(f))(*args), value_and_gradients(f)(*args), 16)


def test_the_gradient_is_taken_and_z_is_kept_by_the_forward():
    gradient = jax.grad(lambda *args: fused(dense)(*args).sum(), (0, 1, 2))
    text = str(jax.make_jaxpr(gradient)(*(normal(0, *t.shape) for t in (X, W, B))))
    assert "gemm_epilogue_grad" in text and "residual=True" in text


@pytest.mark.slow
def test_in_the_simulator():
    """As operations call it; inside of `fuse` the simulator, which calls back to Python, cannot run."""
    config = ForwardConfig(64, 128, 64, 2, "n", sm_count=1)

    def simulated(*args, **options):
        return FORWARD_FUNCTION(*args, **options, config=config, interpret=_mosaic.interpret())

    args = normal(0, 64, 64), normal(1, 64, 128) * 0.2, normal(2, 128)
    op = next(e for e in jax.make_jaxpr(fused(dense))(*args).eqns if e.primitive.name == "fused").params["op"]
    results, saved = on_a_cpu(FORWARD, simulated).save(op, *args)
    assert_near(results, (dense(*args),), 16)
    assert_near(saved, (args[0] @ args[1] + args[2],), 4)
    assert not _compat.races_found()


FORWARD_FUNCTION = gemm_epilogue.forward


# -- several devices -------------------------------------------------------------------------------------

COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


def collectives(compiled):
    """Arrays that are sent; one operation may send several."""
    return sum(m[1].count("[") for m in re.finditer(rf"= ([^=]*) (?:{COLLECTIVES})(?:-start)?\(", compiled.as_text()))


def marked(f, bits):
    """A stand-in that rounds to so many bits, more than bfloat16 has, which is seen in the compiled program."""

    def run(*args, **options):
        return tuple(
            jax.lax.reduce_precision(x.astype("float32"), 8, bits).astype(x.dtype) for x in f(*args, **options)
        )

    return run


RUNS, RUNS_BACKWARD = "mantissa_bits=20", "mantissa_bits=19"
MARKED = on_a_cpu(FORWARD, marked(plain_forward, 20)), on_a_cpu(GRADIENT, backward=marked(plain_backward, 19))
#: Shapes of x and w; mesh; how x, w and b are split; whether the parts are the kernel's, forward and backward.
LAYOUTS = {
    "rows": ((64, 32), (32, 16), {"data": 8}, P("data"), P(), P(), True),
    "columns": ((64, 32), (32, 64), {"model": 4}, P(), P(None, "model"), P("model"), True),
    "rows and columns": ((64, 32), (32, 32), {"data": 4, "model": 2}, P("data"), P(None, "model"), P("model"), True),
    "columns, of which all have the bias": ((64, 32), (32, 64), {"model": 4}, P(), P(None, "model"), P(), True),
    "two dimensions of rows": (
        (4, 32, 32),
        (32, 16),
        {"data": 2, "sequence": 4},
        P("data", "sequence"),
        P(),
        P(),
        True,
    ),
    "one copy each": ((64, 32), (32, 16), {"data": 8}, P(), P(), P(), True),
    "depth": ((64, 32), (32, 16), {"model": 4}, P(None, "model"), P("model"), P(), False),
    "rows and depth": ((64, 32), (32, 16), {"data": 2, "model": 4}, P("data", "model"), P("model"), P(), False),
    "parts that are too small": ((16, 32), (32, 16), {"data": 8}, P("data"), P(), P(), False),
    "weights split over rows of x": ((64, 32), (32, 16), {"data": 8}, P("data"), P("data"), P(), True),
}


@pytest.mark.parametrize("activation", [jnp.tanh, pytest.param(jax.nn.gelu, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", quick(LAYOUTS, "rows and columns", "depth", "parts that are too small"))
def test_each_device_runs_the_kernel_on_its_part(name, activation):
    """And nothing is sent that the unfused program does not send."""
    x, w, axes, *specs, taken = LAYOUTS[name]
    mesh = Mesh(np.array(jax.devices()[: math.prod(axes.values())]).reshape(tuple(axes.values())), tuple(axes))
    args = normal(0, *x), normal(1, *w) * 0.2, normal(2, w[-1])
    args = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, specs, strict=True)]

    def f(x, w, b):
        return activation(x @ w + b)

    on_parts = aicf_jax.fuse(f, kernels=MARKED, policy=aicf_jax.Policy(on_failure="raise"))
    for program in (lambda f: f, value_and_gradients):
        got, want = (jax.jit(program(g)).lower(*args).compile() for g in (on_parts, f))
        assert (RUNS in got.as_text()) == taken
        assert collectives(got) <= collectives(want)
        assert_near(got(*args), want(*args), 16)
        assert got(*args)[0].sharding.is_equivalent_to(want(*args)[0].sharding, len(x))
    assert (RUNS_BACKWARD in got.as_text()) == (taken or "depth" in name)


@pytest.mark.parametrize("is_set", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_on_parts_dz_is_written_over_z(is_set):
    """A ref in the function of a part; and a mesh that is set is there, and no description of a device."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    specs = P("data"), P(), P()
    args = [normal(0, 64, 16), normal(1, 16, 16) * 0.2, normal(2, 16)]
    args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs, strict=True)]
    on_parts = aicf_jax.fuse(dense, kernels=MARKED, policy=aicf_jax.Policy(on_failure="raise"))
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        compiled = value_and_gradients(on_parts).lower(*args).compile()
        assert RUNS in compiled.as_text() and RUNS_BACKWARD in compiled.as_text()
        assert_near(compiled(*args), value_and_gradients(dense)(*args), 16)


ONE_ARRAY = {
    "both operands": (lambda x: jnp.tanh(x @ x), (64, 64), P("data"), KERNELS),
    "the right one transposed": (lambda x: jnp.tanh(x @ x.T), (64, 64), P("data"), KERNELS),
    "operand and bias": (lambda x: jax.nn.silu(x @ jnp.eye(16, dtype=x.dtype) + x), (1, 16), P(None, "data"), TRITON),
}


@pytest.mark.parametrize("name", quick(ONE_ARRAY, "both operands"))
def test_one_array_in_two_roles_is_left_to_xla_on_several_devices(name):
    """No way to split it is right for both."""
    f, shape, spec, kernels = ONE_ARRAY[name]
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    x = jax.device_put(normal(0, *shape) * 0.2, NamedSharding(mesh, spec))
    on_parts = aicf_jax.fuse(f, kernels=kernels, policy=aicf_jax.Policy(on_failure="raise"))
    assert_near(jax.jit(on_parts)(x), jax.jit(f)(x), 16)


def test_explicit_axes_and_arrays_that_are_split_by_hand_run_the_equations():
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    args = normal(0, 64, 16), normal(1, 16, 16) * 0.2, normal(2, 16)
    with jax.set_mesh(mesh):
        split = [jax.device_put(a, s) for a, s in zip(args, (P("a"), P(None, "b"), P("b")), strict=True)]
        found = jax.jit(fused(dense))(*split)
    assert_near(found, dense(*args), 16)


def test_a_batch_of_products_is_split_by_product():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    x, w = (jax.device_put(normal(i, 4, 16, 16), NamedSharding(mesh, P("data"))) for i in range(2))

    def f(x, w):
        return jax.nn.relu(jnp.einsum("bmk,bkn->bmn", x, w))

    compiled = jax.jit(aicf_jax.fuse(f, kernels=MARKED)).lower(x, w).compile()
    assert RUNS in compiled.as_text() and collectives(compiled) == 0
    assert_near(compiled(x, w), f(x, w), 16)


def test_in_shard_map_the_kernel_runs():
    f = aicf_jax.fuse(lambda x, w, b: jnp.tanh(x @ w + b), kernels=MARKED)
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    args = [jax.device_put(normal(0, 64, 32), NamedSharding(mesh, P("data"))), normal(1, 32, 16), normal(2, 16)]
    mapped = jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"))
    assert RUNS in jax.jit(mapped).lower(*args).compile().as_text()
