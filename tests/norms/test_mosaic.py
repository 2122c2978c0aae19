"""The Mosaic GPU kernels as candidates for norms: which operations they take, and that arrays find their places.

The kernels themselves are tested in `tests/pallas_kernels`; here their equations in plain jax stand in for them on a
CPU, but for one test in the simulator.
"""

import dataclasses
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import aicf_jax
from aicf_jax.derived import backward_program
from aicf_jax.kernels import mosaic_layer_norm, mosaic_layer_norm_grad, mosaic_rms_norm, mosaic_rms_norm_grad
from pallas_kernels import _mosaic, norm
from pallas_kernels.norm import reference
from tests.aicf_jax.norm_support import EPS, B, G, X, Z, layer_norm, mean, rms_norm
from tests.support import assert_same, normal, quick_jit
from tests.transformations import TRANSFORMS, transformed

MOSAIC = tuple(m.KERNEL for m in (mosaic_layer_norm, mosaic_layer_norm_grad, mosaic_rms_norm, mosaic_rms_norm_grad))
H200 = aicf_jax.Policy(target="h200", on_failure="raise")

# As in test_norms.
ROUNDINGS = 24


def plain_forward(x, scale=None, bias=None, residual=None, *, dtype, with_sum, with_statistics, **options):
    found = reference.forward(x, scale, bias, residual, **options)
    kept = found._asdict() if with_statistics else dict.fromkeys(found._fields)
    total = found.sum.astype(x.dtype) if with_sum else None
    return norm.Forward(**{**kept, "y": found.y.astype(dtype), "sum": total})


def plain_backward(dy, x, *args, with_dx, dscale, dbias, scale=None, residual=None, dsum=None):
    found = reference.backward(dy, x, *args, scale=scale, residual=residual, dsum=dsum)
    dx = found.dx.astype(x.dtype) if with_dx else None
    return norm.Backward(
        dx, *(None if d is None else a.astype(d) for a, d in zip(found[1:], (dscale, dbias), strict=True))
    )


def on_a_cpu(kernel, forward, backward):
    """The kernel with these functions in place of Mosaic's."""

    def patched(f):
        def run(op, *inputs):
            with mock.patch.object(norm, "forward", forward), mock.patch.object(norm, "backward", backward):
                return f(op, *inputs)

        return f and run

    return dataclasses.replace(
        kernel,
        platforms=("cpu",),
        targets=None,
        run=patched(kernel.run),
        save=patched(kernel.save),
        cost_bytes=None,  # rows here are short, and would have to be padded
    )


KERNELS = tuple(on_a_cpu(k, plain_forward, plain_backward) for k in MOSAIC)


def fused(f):
    return aicf_jax.fuse(f, kernels=KERNELS, policy=aicf_jax.Policy(on_failure="raise"))


def with_sum(x, z, g, b):
    s = x + z
    return layer_norm(s, g, b, affine="as flax does"), s


def summed_again(x, z, g, b):
    return rms_norm(x + z, g, b, affine="no bias")


def clamped(x, z, g, b):
    return layer_norm(x, g, b, variance="from moments, clamped") * z


def two_axes(x, z, g, b):
    """The scale varies along one of the two."""
    m = mean(x, (-2, -1))
    return (x - m) / jnp.sqrt(jnp.var(x, (-2, -1), keepdims=True) + EPS) * g + z[0] * b


def no_parameters(x, z, g, b):
    return rms_norm(x * z, 1.0, 0.0, affine="neither") * g


FUNCTIONS = {f.__name__: f for f in (with_sum, summed_again, clamped, two_axes, no_parameters)}
ARGS = (X, Z, G, B)


def kernels_of(f, *args, policy=H200, **options):
    """Names of the kernels that are taken, forward and backward."""
    report = aicf_jax.explain(f, *args, policy=policy, **options)
    return [report.fusions[0].kernel, *re.findall(r"kernel (\w+)", report.fusions[0].backward)]


def refusals_of(f, *args):
    report = aicf_jax.explain(f, *args, policy=H200)
    return [(r.code, r.found) for r in report.refusals if r.stage == "select" and "mosaic" in r.detail]


# -- selection -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_an_h200_gets_the_kernels(dtype):
    x, p = jax.ShapeDtypeStruct((8, 512), dtype), jax.ShapeDtypeStruct((512,), "float32")
    assert kernels_of(lambda x, z, g, b: layer_norm(x + z, g, b).astype(dtype), x, x, p, p) == [
        "mosaic_layer_norm",
        "mosaic_layer_norm_grad",
    ]
    assert kernels_of(lambda x, g: rms_norm(x, g, 0.0, affine="no bias").astype(dtype), x, p) == [
        "mosaic_rms_norm",
        "mosaic_rms_norm_grad",
    ]


@pytest.mark.parametrize(
    ("target", "codes"), [(None, []), ("cpu", []), ("cuda", []), ("a100", ["target"]), ("b200", ["target"])]
)
def test_other_machines_do_not_get_them_and_hear_of_it_where_they_were_named(target, codes):
    report = aicf_jax.explain(with_sum, *ARGS, policy=aicf_jax.Policy(target=target))
    assert [f.kernel for f in report.fusions] == ["xla"]
    assert [r.code for r in report.refusals if "mosaic" in r.detail] == codes


def test_what_they_do_not_take():
    x, g = jnp.ones((4, 512)), jnp.ones(512)
    assert [c for c, _ in refusals_of(lambda x: layer_norm(x + x, 1.0, 0.0, affine="neither"), x)] == ["capability"]
    long = jax.ShapeDtypeStruct((4, 8200), "bfloat16")
    assert refusals_of(lambda x: layer_norm(x, 1.0, 0.0, affine="neither"), long) == [("capability", "length=8200")]
    # Padding rows of 6 elements to 32 costs more than one kernel saves.
    assert refusals_of(lambda x, g: layer_norm(x, g, 0.0, affine="no bias"), X, G)[0][0] == "no_gain"
    with jax.enable_x64(True):
        wide = refusals_of(lambda x, g: rms_norm(x, g, 0.0, affine="no bias"), *map(jnp.float64, (x, g)))
    assert wide[0][0] == "capability" and "input_dtypes=('float64', 'float64')" in wide[0][1]


def test_a_gradient_for_each_element_of_a_batch_is_left_to_xla():
    f = fused(lambda x, g: layer_norm(x, g, 0.0, affine="no bias").sum())
    each = jax.make_jaxpr(jax.vmap(jax.grad(f, 1), (0, None)))(X, G)
    ops = [e.params["op"] for e in each.eqns if e.primitive.name == "fused"]
    assert [dict(o.choices)["cpu"] for o in ops if o.semantic.name == "layer_norm_grad"] == ["xla"]


# -- values and gradients --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_arrays_find_their_places(name, dtype):
    f, args = FUNCTIONS[name], [a.astype(dtype) for a in ARGS]

    def both(f):
        def program(*args):
            out, pull = jax.vjp(f, *args)
            return out, pull(jax.tree.map(lambda y: normal(5, *y.shape, dtype=y.dtype), out))

        return quick_jit(program)

    assert_same(both(fused(f))(*args), both(f)(*args), roundings=ROUNDINGS)


def test_only_the_cotangents_that_are_asked_for():
    def loss(x, z, g, b):
        return (with_sum(x, z, g, b)[0] * Z).sum()

    for k in range(4):
        got, want = (quick_jit(jax.grad(f, k))(*ARGS) for f in (fused(loss), loss))
        assert_same(got, want, roundings=ROUNDINGS)
    # Only the sum has a cotangent: the norm has none.
    f = lambda x, z: with_sum(x, z, G, B)[1]  # noqa: E731
    got, want = (quick_jit(jax.grad(lambda *a, f=f: (f(*a) ** 2).sum()))(X, Z) for f in (fused(f), f))
    assert_same(got, want, roundings=ROUNDINGS)


@pytest.mark.slow
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transformations(transform):
    got, want = (transformed(transform, f, ARGS) for f in (fused(summed_again), summed_again))
    assert_same(got, want, roundings=TRANSFORMS[transform].passes * ROUNDINGS)


@pytest.mark.slow
def test_in_the_simulator():
    """As operations call them; inside of `fuse` the simulator, which calls back to Python, cannot run."""

    def simulated(f):
        return lambda *args, **options: f(*args, **options, interpret=_mosaic.interpret())

    forward, backward, *_ = (on_a_cpu(k, simulated(norm.forward), simulated(norm.backward)) for k in MOSAIC)
    args = normal(0, 3, 4, 40), normal(1, 3, 4, 40), normal(2, 40), normal(3, 40)
    op = jax.make_jaxpr(fused(with_sum))(*args).eqns[-1].params["op"]
    results, saved = forward.save(op, *args)
    want, pull = jax.vjp(with_sum, *args)
    assert_same(list(results), list(want), roundings=ROUNDINGS)
    gradient = backward_program(op, (0, 1, 2, 3), (True, True)).op
    cotangents = normal(4, 3, 4, 40), normal(5, 3, 4, 40)
    found = backward.run(gradient, *args, results[1], *saved, *cotangents)
    assert_same(list(found), list(pull(cotangents)), roundings=ROUNDINGS)


# -- several devices -------------------------------------------------------------------------------------


def marked(f, name):
    """A stand-in that leaves its name in the compiled program."""

    def run(*args, **options):
        with jax.named_scope(name):
            return f(*args, **options)

    return run


FORWARD, BACKWARD = "norm_kernel_forward", "norm_kernel_backward"
MARKED = tuple(on_a_cpu(k, marked(plain_forward, FORWARD), marked(plain_backward, BACKWARD)) for k in MOSAIC)


def runs(compiled, name=FORWARD):
    return name in compiled.as_text()


COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def collectives(compiled):
    return sum(len(re.findall(rf" {name}(?:-start)?\(", compiled.as_text())) for name in COLLECTIVES)


LAYOUTS = {
    "rows": ({"data": 8}, P("data"), P()),
    "rows along two dimensions": ({"data": 2, "sequence": 4}, P("data", "sequence"), P()),
    "rows along the second": ({"data": 8}, P(None, "data"), P()),
    "sharded parameters": ({"data": 8}, P("data"), P("data")),
    "two axes of a mesh": ({"a": 2, "b": 4}, P(("a", "b")), P()),
    "one copy each": ({"data": 8}, P(), P()),
}


@pytest.mark.parametrize(
    "axes, rows, parameter",
    [
        pytest.param(*layout, id=name, marks=() if name == "rows along two dimensions" else pytest.mark.slow)
        for name, layout in LAYOUTS.items()
    ],
)
def test_each_device_runs_the_kernel_on_its_rows(axes, rows, parameter):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(tuple(axes.values())), tuple(axes))
    specs = (rows, rows, parameter, parameter)
    args = [normal(0, 16, 8, 8), normal(1, 16, 8, 8), normal(2, 8), normal(3, 8)]
    args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs, strict=True)]

    def gradients(f):
        return lambda *a: jax.vjp(f, *a)[1](a[:2])

    f = aicf_jax.fuse(with_sum, kernels=MARKED, policy=aicf_jax.Policy(on_failure="raise"))
    for program in (lambda f: f, gradients):
        got, want = (jax.jit(program(g)).lower(*args).compile() for g in (f, with_sum))
        assert runs(got) and runs(got, BACKWARD) == (program is gradients)
        assert collectives(got) <= collectives(want)
        found, expected = got(*args), want(*args)
        # sums over 128 rows of 8, on each device and over them
        assert_same(found, expected, roundings=128 + 8 * ROUNDINGS)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim), (a.sharding, b.sharding)


def test_rows_that_are_split_themselves_are_gathered():
    mesh = Mesh(np.array(jax.devices()[:8]), ("model",))
    x, g = normal(0, 16, 8), normal(1, 8)
    f = aicf_jax.fuse(lambda x, g: rms_norm(x, g, 0.0, affine="no bias"), kernels=MARKED)
    split = jax.device_put(x, NamedSharding(mesh, P(None, "model")))
    assert_same(jax.jit(f)(split, g), f(x, g), roundings=ROUNDINGS)


def test_without_a_rule_the_equations_are_split_and_in_shard_map_the_kernel_runs():
    kernels = tuple(dataclasses.replace(k, partition=None) for k in MARKED)
    f = aicf_jax.fuse(lambda x, g: rms_norm(x, g, 0.0, affine="no bias"), kernels=kernels)
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    x, g = normal(0, 16, 8), jax.device_put(normal(1, 8), NamedSharding(mesh, P()))
    split = jax.device_put(x, NamedSharding(mesh, P("data")))
    mapped = jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    with_mesh, on_one, in_parts = (
        jax.jit(h).lower(*a).compile() for h, a in ((f, (split, g)), (f, (x, normal(1, 8))), (mapped, (split, g)))
    )
    assert (runs(with_mesh), runs(on_one), runs(in_parts)) == (False, True, True)
    assert collectives(with_mesh) == 0
