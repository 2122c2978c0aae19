"""A fused linen module is used exactly as the module: init, apply and its options, bind, and as a part of others."""

import inspect

import jax
import numpy as np
import pytest
from flax import linen as nn

import aicf_jax
from tests.models.linen_models import MLP, MODELS, DenseBatchNorm, DropoutMLP, SetupMLP
from tests.support import assert_same, key, normal, quick_jit

X = normal(0, 5, 7)
# tolerance of every comparison of values here: unit roundoff x (two or three products of at most 16 + activations)
ROUNDINGS = 100


def both(module):
    variables = quick_jit(module.init)(key(0), X)
    return aicf_jax.fuse(module), module, variables


@pytest.mark.parametrize("name", MODELS)
def test_init_is_unchanged_bit_for_bit(name):
    module, shape, _ = MODELS[name]
    x, fused = normal(0, *shape), aicf_jax.fuse(module)
    rngs = {"params": key(0), "dropout": key(1)}
    assert_same(quick_jit(fused.init)(rngs, x), quick_jit(module.init)(rngs, x), roundings=0)


def test_eager_init_is_unchanged_bit_for_bit():
    module = SetupMLP()
    assert_same(aicf_jax.fuse(module).init(jax.random.key(0), X), module.init(jax.random.key(0), X), roundings=0)


def test_init_with_output_and_lazy_init():
    fused, module, _ = both(MLP())
    assert_same(fused.init_with_output(key(0), X), module.init_with_output(key(0), X), roundings=ROUNDINGS)
    spec = jax.ShapeDtypeStruct(X.shape, X.dtype)
    assert_same(fused.lazy_init(key(0), spec), module.lazy_init(key(0), spec), roundings=0)


@pytest.mark.parametrize(
    "mutable", [False, [], ["batch_stats"], "batch_stats", True, ["batch_stats", "intermediates"]], ids=str
)
def test_apply_with_mutable(mutable):
    fused, module, variables = both(DenseBatchNorm())
    train = mutable not in (False, [])
    assert_same(
        fused.apply(variables, X, train=train, mutable=mutable),
        module.apply(variables, X, train=train, mutable=mutable),
        roundings=ROUNDINGS,
    )


def test_apply_does_not_change_the_variables_it_is_given():
    fused, _, variables = both(DenseBatchNorm())
    before = jax.tree.map(np.array, variables)
    fused.apply(variables, X, train=True, mutable=["batch_stats"])
    jax.tree.map(np.testing.assert_array_equal, variables, before)


def test_apply_with_positional_and_keyword_arguments():
    fused, module, variables = both(DropoutMLP())
    rngs = {"dropout": key(3)}
    calls = [
        ((X,), {}),
        ((X, False), {}),
        ((X,), {"scale": 2.5}),
        ((), {"x": X}),
        ((X, True), {"rngs": rngs}),
        ((X,), {"train": True, "rngs": rngs, "scale": 0.5}),
        ((X, True), {"rngs": key(5)}),
    ]
    for args, kwargs in calls:
        assert_same(
            fused.apply(variables, *args, **kwargs), module.apply(variables, *args, **kwargs), roundings=ROUNDINGS
        )


def test_a_missing_rng_fails_as_unfused():
    fused, module, variables = both(DropoutMLP())
    with pytest.raises(Exception) as unfused_error:
        module.apply(variables, X, train=True)
    with pytest.raises(type(unfused_error.value)):
        fused.apply(variables, X, train=True)


@pytest.mark.parametrize(
    "method",
    ["encode", SetupMLP.encode, lambda self, x: self.decode(self.encode(x)) + 1],
    ids=["by name", "by function", "by lambda"],
)
def test_apply_with_method(method):
    fused, module, variables = both(SetupMLP())
    assert_same(
        fused.apply(variables, X, method=method), module.apply(variables, X, method=method), roundings=ROUNDINGS
    )


@pytest.mark.parametrize("capture", [True, lambda module, name: isinstance(module, nn.Dense)], ids=["all", "filter"])
def test_capture_intermediates(capture):
    fused, module, variables = both(MLP())
    options = dict(capture_intermediates=capture, mutable=["intermediates"])
    assert_same(fused.apply(variables, X, **options), module.apply(variables, X, **options), roundings=ROUNDINGS)


def test_sow_and_perturb():
    class Sown(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.relu(nn.Dense(6)(x))
            self.sow("intermediates", "h", h)
            return nn.Dense(3)(self.perturb("h_gradient", h))

    fused, module, variables = both(Sown())
    options = dict(mutable=["intermediates"])
    assert_same(fused.apply(variables, X, **options), module.apply(variables, X, **options), roundings=ROUNDINGS)


def test_bind():
    fused, module, variables = both(SetupMLP())
    bound, want = fused.bind(variables), module.bind(variables)
    assert_same(bound(X), want(X), roundings=ROUNDINGS)
    assert_same(bound.encode(X), want.encode(X), roundings=ROUNDINGS)
    assert_same(aicf_jax.fuse(want)(X), want(X), roundings=ROUNDINGS)


def test_attributes_of_the_module_are_those_of_the_fused_one():
    fused = aicf_jax.fuse(DropoutMLP(rate=0.25))
    assert fused.rate == 0.25
    assert inspect.signature(fused.__call__) == inspect.signature(DropoutMLP(rate=0.25).__call__)
    assert fused.clone(rate=0.5).rate == 0.5


def test_two_fused_modules_of_the_same_configuration_are_equal_and_hash_alike():
    """They are static arguments of users' jit functions: an unequal one would compile again at each call."""
    assert aicf_jax.fuse(MLP()) == aicf_jax.fuse(MLP())
    assert hash(aicf_jax.fuse(MLP())) == hash(aicf_jax.fuse(MLP()))
    assert aicf_jax.fuse(DropoutMLP(rate=0.1)) != aicf_jax.fuse(DropoutMLP(rate=0.2))


def as_attribute(wrap, lift=lambda cls: cls):
    class Inner(MLP):
        pass

    class Parent(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(nn.relu(self.inner(x)))

    return lift(Parent)(wrap(Inner()))


def in_compact(wrap, lift=lambda cls: cls):
    class Parent(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = wrap(MLP())(x)
            return nn.Dense(2)(nn.relu(h) + wrap(MLP(name="second"))(x))

    return lift(Parent)()


def in_setup(wrap, lift=lambda cls: cls):
    class Parent(nn.Module):
        def setup(self):
            self.first = wrap(MLP())
            self.rest = [wrap(SetupMLP()), nn.Dense(2)]

        def __call__(self, x):
            return self.rest[1](self.rest[0](self.first(x)))

    return lift(Parent)()


def shared(wrap, lift=lambda cls: cls):
    class Parent(nn.Module):
        @nn.compact
        def __call__(self, x):
            inner = wrap(MLP())
            return inner(x) + inner(x[::-1])

    return lift(Parent)()


@pytest.mark.parametrize("lift", [lambda cls: cls, nn.jit, nn.remat], ids=["plain", "nn.jit", "nn.remat"])
@pytest.mark.parametrize("build", [as_attribute, in_compact, in_setup, shared], ids=lambda f: f.__name__)
def test_a_fused_module_is_a_submodule_with_the_unfused_parameter_tree(build, lift):
    fused, module = build(aicf_jax.fuse, lift), build(lambda m: m, lift)
    variables = quick_jit(module.init)(key(0), X)
    assert_same(quick_jit(fused.init)(key(0), X), variables, roundings=0)

    def value_and_gradient(target):
        return quick_jit(jax.value_and_grad(lambda v: (target.apply(v, X) ** 2).sum()))(variables)

    # tolerance: as above, two modules in a row, forward and backward
    assert_same(value_and_gradient(fused), value_and_gradient(module), roundings=4 * ROUNDINGS)


@pytest.mark.parametrize("build", [as_attribute, in_compact, in_setup, shared], ids=lambda f: f.__name__)
def test_fusing_the_parent_of_fused_modules(build):
    twice, module = aicf_jax.fuse(build(aicf_jax.fuse)), build(lambda m: m)
    variables = quick_jit(module.init)(key(0), X)
    assert_same(quick_jit(twice.init)(key(0), X), variables, roundings=0)
    assert_same(twice.apply(variables, X), module.apply(variables, X), roundings=2 * ROUNDINGS)


def test_a_fused_submodule_with_statistics_and_dropout():
    def build(wrap):
        class Parent(nn.Module):
            @nn.compact
            def __call__(self, x, train=False):
                h = wrap(DenseBatchNorm())(x, train=train)
                return wrap(DropoutMLP())(h, train)

        return Parent()

    fused, module = build(aicf_jax.fuse), build(lambda m: m)
    variables = quick_jit(module.init)(key(0), X)
    options = dict(train=True, mutable=["batch_stats"], rngs={"dropout": key(1)})
    assert_same(fused.apply(variables, X, **options), module.apply(variables, X, **options), roundings=2 * ROUNDINGS)


def test_an_nn_jitted_or_rematted_class_is_fused():
    for lift in (nn.jit, nn.remat):
        fused, module, variables = both(lift(SetupMLP)())
        assert_same(fused.apply(variables, X), module.apply(variables, X), roundings=ROUNDINGS)


def test_tabulate_and_eval_shape():
    fused, module, variables = both(MLP())
    assert jax.eval_shape(fused.apply, variables, X) == jax.eval_shape(module.apply, variables, X)
    assert "Dense_0" in fused.tabulate(key(0), X)
