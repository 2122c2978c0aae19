"""Fused programs partition as their unfused twins: same values, same output shardings, no additional collectives."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import aicf_jax
from tests.support import ACTIVATION_ROUNDINGS, assert_same, normal

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
BATCH, D, HIDDEN = 16, 8, 24
# tolerance of every comparison: unit roundoff x (sums over 8 and 24 forward, 16 rows and both again backward, with
# one activation each way); sums over devices are part of these sums
ROUNDINGS = 2 * (D + HIDDEN) + BATCH + 2 * ACTIVATION_ROUNDINGS
# name: (mesh axes and sizes, shardings of x, w1, b1, w2, b2)
LAYOUTS = {
    "data_parallel": ({"data": 8}, (P("data"), P(), P(), P(), P())),
    "tensor_parallel": ({"model": 8}, (P(), P(None, "model"), P("model"), P("model", None), P())),
    "data_and_tensor_parallel": (
        {"data": 2, "model": 4},
        (P("data"), P(None, "model"), P("model"), P("model", None), P()),
    ),
    "fully_sharded_parameters": ({"data": 8}, (P("data"), P("data", None), P("data"), P("data", None), P("data"))),
    "contracted_axis_sharded": ({"model": 8}, (P(None, "model"), P("model", None), P(), P(), P())),
}


def mesh_of(axes):
    devices = jax.devices()
    assert len(devices) >= 8, "set XLA_FLAGS=--xla_force_host_platform_device_count=8 before jax starts"
    return Mesh(np.array(devices[:8]).reshape(tuple(axes.values())), tuple(axes))


def mlp(x, w1, b1, w2, b2):
    return jax.nn.gelu(x @ w1 + b1) @ w2 + b2


def arguments():
    return (
        normal(0, BATCH, D),
        normal(1, D, HIDDEN, scale=0.3),
        normal(2, HIDDEN),
        normal(3, HIDDEN, D, scale=0.3),
        normal(4, D),
    )


def value(f):
    return f


def value_and_grad(f):
    return jax.value_and_grad(lambda *a: (f(*a) ** 2).sum(), argnums=(0, 1, 2, 3, 4))


def collectives(compiled):
    text = compiled.as_text()
    return sum(len(re.findall(rf" {name}(?:-start)?\(", text)) for name in COLLECTIVES)


def compare_partitioned(program, fused, unfused, args):
    """Both under jit: values, shardings and number of collectives."""
    got, want = (jax.jit(program(f)).lower(*args).compile() for f in (fused, unfused))
    assert collectives(got) <= collectives(want)
    fused_result, result = got(*args), want(*args)
    assert_same(fused_result, result, roundings=ROUNDINGS)
    for a, b in zip(jax.tree.leaves(fused_result), jax.tree.leaves(result), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), (a.sharding, b.sharding)


@pytest.mark.parametrize("program", [value, value_and_grad])
@pytest.mark.parametrize("axes, specs", LAYOUTS.values(), ids=LAYOUTS)
def test_jit_with_named_shardings(program, axes, specs):
    mesh = mesh_of(axes)
    args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arguments(), specs, strict=True)]
    compare_partitioned(program, aicf_jax.fuse(mlp), mlp, args)


def test_the_partitioned_program_has_collectives_at_all():
    """Otherwise counting them would prove nothing."""
    axes, specs = LAYOUTS["tensor_parallel"]
    mesh = mesh_of(axes)
    args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arguments(), specs, strict=True)]
    assert collectives(jax.jit(aicf_jax.fuse(mlp)).lower(*args).compile()) > 0


def data_parallel_local(wrap):
    return wrap(mlp), (P("data"), P(), P(), P(), P()), P("data")


def tensor_parallel_local(wrap):
    """Megatron's MLP, https://arxiv.org/abs/1909.08053: columns, then rows, then one sum over devices."""
    first, second = wrap(lambda x, w, b: jax.nn.gelu(x @ w + b)), wrap(lambda h, w: h @ w)

    def local(x, w1, b1, w2, b2):
        return jax.lax.psum(second(first(x, w1, b1), w2), "data") + b2

    return local, (P(), P(None, "data"), P("data"), P("data", None), P()), P()


@pytest.mark.parametrize("program", [value, value_and_grad])
@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no_check_vma"])
@pytest.mark.parametrize("build", [data_parallel_local, tensor_parallel_local], ids=["data", "tensor"])
def test_fused_inside_shard_map(program, check_vma, build):
    mesh = mesh_of({"data": 8})

    def mapped(wrap):
        local, in_specs, out_specs = build(wrap)
        return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)

    compare_partitioned(program, mapped(aicf_jax.fuse), mapped(lambda f: f), arguments())


@pytest.mark.parametrize("program", [value, value_and_grad])
@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no_check_vma"])
@pytest.mark.parametrize("build", [data_parallel_local, tensor_parallel_local], ids=["data", "tensor"])
def test_shard_map_inside_fused(program, check_vma, build):
    local, in_specs, out_specs = build(lambda f: f)
    mapped = jax.shard_map(
        local, mesh=mesh_of({"data": 8}), in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )
    compare_partitioned(program, aicf_jax.fuse(mapped), mapped, arguments())


@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no_check_vma"])
def test_gradients_taken_inside_shard_map_are_reduced_once(check_vma):
    mesh = mesh_of({"data": 8})

    def mapped(f):
        def local(x, *params):
            def loss(*p):
                out = f(x, *p)
                total = (out**2).sum()
                return jax.lax.psum(total, "data") if check_vma else total

            grads = jax.grad(loss, argnums=(0, 1, 2, 3))(*params)
            return grads if check_vma else jax.tree.map(lambda g: jax.lax.psum(g, "data"), grads)

        return jax.shard_map(
            local, mesh=mesh, in_specs=(P("data"), P(), P(), P(), P()), out_specs=P(), check_vma=check_vma
        )

    compare_partitioned(value, mapped(aicf_jax.fuse(mlp)), mapped(mlp), arguments())
    whole = jax.jit(jax.grad(lambda x, *p: (mlp(x, *p) ** 2).sum(), argnums=(1, 2, 3, 4)))(*arguments())
    assert_same(jax.jit(mapped(aicf_jax.fuse(mlp)))(*arguments()), whole, roundings=ROUNDINGS)


@pytest.mark.parametrize("program", [value, value_and_grad])
def test_a_sharding_constraint_on_the_hidden_layer_is_kept(program):
    mesh = mesh_of({"data": 2, "model": 4})

    def constrained(x, w1, b1, w2, b2):
        h = jax.nn.relu(x @ w1 + b1)
        h = jax.lax.with_sharding_constraint(h, NamedSharding(mesh, P("data", "model")))
        return h @ w2 + b2

    compare_partitioned(program, aicf_jax.fuse(constrained), constrained, arguments())


def test_vmap_with_a_named_axis():
    def f(x, w):
        return jax.nn.silu(x @ w - jax.lax.pmean(x @ w, "batch"))

    args = normal(0, 4, 3, D), normal(1, D, 5)
    run = lambda g: jax.jit(jax.vmap(g, in_axes=(0, None), axis_name="batch"))(*args)  # noqa: E731
    assert_same(run(aicf_jax.fuse(f)), run(f), roundings=ROUNDINGS)


def test_eager_call_keeps_the_sharding_of_its_result():
    mesh = mesh_of({"data": 8})
    x = jax.device_put(normal(0, BATCH, D), NamedSharding(mesh, P("data")))
    w, b = (jax.device_put(a, NamedSharding(mesh, P())) for a in (normal(1, D, 4), jnp.ones(4)))
    f = lambda x, w, b: jax.nn.relu(x @ w + b)  # noqa: E731
    got, want = aicf_jax.fuse(f)(x, w, b), f(x, w, b)
    assert_same(got, want, roundings=ROUNDINGS)
    assert got.sharding.is_equivalent_to(want.sharding, 2)


LARGE = normal(5, 4, 2048, 32)  # 1 MiB: norms have a derived backward


def scaled_norm(x, scale):
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-6) * scale


VARIES = {
    "norm": (scaled_norm, LARGE, normal(6, 8, 32)),
    "product": (lambda x, w: jax.nn.gelu(x @ w + w[0]), LARGE[:, :5], normal(7, 8, 32, 16)),
    "weight": (lambda w, x: x @ w + w[0], normal(7, 32, 16), normal(8, 8, 4, 5, 32)),
}


@pytest.mark.parametrize("name", VARIES)
@pytest.mark.parametrize("devices", [1, 8])
def test_gradients_of_what_does_not_vary_beside_what_does(monkeypatch, name, devices):
    """The cotangent of an argument that all parts of a shard_map share is summed over them, once."""
    f, shared, own = VARIES[name]
    own = own[:devices]
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    monkeypatch.setattr(jax, "device_count", lambda *args: devices)
    aicf_jax.clear_caches()

    def gradient(g):
        def total(shared, own):
            local = jax.shard_map(
                lambda a, b: g(a, b[0])[None], mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
            )
            y = local(shared, own)
            return (y**2 * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum()

        return jax.jit(jax.grad(total, argnums=(0, 1)))(shared, own)

    # sums over 16 to 8192 terms, in another order
    for found, expected in zip(gradient(aicf_jax.fuse(f)), gradient(f), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * float(jnp.abs(expected).max()))
    aicf_jax.clear_caches()


@pytest.mark.parametrize("spec", [P("data"), P(None, "data")], ids=str)
def test_a_large_norm_communicates_no_more_than_unfused(spec):
    """Its backward waits for the cotangent, and must not fetch a number of it from another device for that."""
    mesh = mesh_of({"data": 8})
    args = [
        jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((jnp.tile(LARGE, (2, 1, 1)), spec), (normal(6, 32), P()))
    ]

    def gradient(f):
        return jax.jit(jax.grad(lambda *a: (f(*a) ** 3).sum(), argnums=(0, 1))).lower(*args).compile()

    assert collectives(gradient(aicf_jax.fuse(scaled_norm))) <= collectives(gradient(scaled_norm))
