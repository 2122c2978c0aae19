"""A fused nnx module is an instance of its class that shares its variables; functions over modules can be fused too."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import aicf_jax
from tests.models.nnx_models import MLP, MODELS, create
from tests.support import assert_same, key, normal

# tolerance of every comparison of values here: unit roundoff x (two or three products of at most 16 + activations)
ROUNDINGS = 150


def paths(module):
    return [path for path, _ in nnx.to_flat_state(nnx.state(module))]


@pytest.mark.parametrize("name", MODELS)
def test_type_and_state_paths(name):
    model, _ = create(name)
    fused = aicf_jax.fuse(model)
    assert isinstance(fused, type(model))
    assert paths(fused) == paths(model)
    assert_same(nnx.state(fused), nnx.state(model), roundings=0)


def test_attributes_methods_and_submodules_are_reachable():
    model, x = create("mlp")
    fused = aicf_jax.fuse(model)
    assert isinstance(fused.head, nnx.Linear) and len(fused.layers) == 2
    assert fused.head.kernel is model.head.kernel
    assert_same(fused.features(x), model.features(x), roundings=ROUNDINGS)


def test_the_original_is_left_as_it_was():
    model, _ = create("mlp")
    aicf_jax.fuse(model)
    assert type(model) is MLP and "__call__" not in vars(model)


def test_updates_of_the_original_are_seen_by_the_fused_module():
    model, x = create("mlp")
    fused = aicf_jax.fuse(model)
    before = fused(x)
    model.head.kernel[...] = model.head.kernel[...] * 2 + 1
    assert_same(fused(x), model(x), roundings=ROUNDINGS)
    assert not jnp.allclose(before, fused(x)), "stale parameters"


def test_updates_of_the_fused_module_are_seen_by_the_original():
    model, x = create("mlp")
    fused = aicf_jax.fuse(model)
    fused.head.bias[...] = jnp.ones(3)
    nnx.update(fused, {"layers": {0: {"bias": jnp.full(8, 0.5)}}})
    assert_same(model.head.bias[...], jnp.ones(3), roundings=0)
    assert_same(model.layers[0].bias[...], jnp.full(8, 0.5), roundings=0)
    assert_same(fused(x), model(x), roundings=ROUNDINGS)


def test_a_replaced_submodule_of_a_submodule_is_seen():
    model, x = create("mlp")
    fused = aicf_jax.fuse(model)
    fused(x)
    model.layers[0] = nnx.Linear(7, 8, rngs=nnx.Rngs(key(5)))
    assert_same(fused(x), model(x), roundings=ROUNDINGS)


def test_train_and_eval_switch():
    fused_model, x = create("dense_batch_norm", train=True)
    model, _ = create("dense_batch_norm", train=True)
    fused = aicf_jax.fuse(fused_model)
    for mode in ("eval", "train", "eval"):
        getattr(fused, mode)()
        getattr(model, mode)()
        assert_same(fused(x), model(x), roundings=3 * ROUNDINGS)
        assert_same(nnx.state(fused), nnx.state(model), roundings=3 * ROUNDINGS)


def test_split_merge_and_clone():
    model, x = create("mlp")
    fused = aicf_jax.fuse(model)
    graphdef, state = nnx.split(fused)
    for other in (nnx.merge(graphdef, state, copy=True), nnx.clone(fused), copy.deepcopy(fused)):
        assert isinstance(other, MLP)
        assert_same(other(x), model(x), roundings=ROUNDINGS)
        other.head.bias[...] = jnp.ones(3)
    assert_same(fused(x), model(x), roundings=ROUNDINGS)


def test_rng_counts_advance_by_the_same_number():
    fused_model, x = create("dropout_mlp", train=True)
    model, _ = create("dropout_mlp", train=True)
    fused = aicf_jax.fuse(fused_model)
    outputs = []
    for _ in range(3):
        outputs.append(fused(x))
        assert_same(outputs[-1], model(x), roundings=ROUNDINGS)
        assert_same(nnx.state(fused_model, nnx.RngCount), nnx.state(model, nnx.RngCount), roundings=0)
    assert not jnp.allclose(outputs[0], outputs[1]), "the same mask twice"


def test_a_fused_module_inside_another_module():
    class Parent(nnx.Module):
        def __init__(self, inner, rngs):
            self.inner, self.head = inner, nnx.Linear(3, 2, rngs=rngs)

        def __call__(self, x):
            return self.head(nnx.silu(self.inner(x)))

    model, x = create("mlp")
    fused = Parent(aicf_jax.fuse(model), nnx.Rngs(key(1)))
    unfused = Parent(model, nnx.Rngs(key(1)))
    twice = aicf_jax.fuse(fused)
    assert paths(fused) == paths(unfused) == paths(twice)
    for parent in (fused, twice):
        assert_same(parent(x), unfused(x), roundings=ROUNDINGS)
    step = nnx.jit(nnx.grad(lambda m: (m(x) ** 2).sum()))
    assert_same(jax.tree.leaves(step(twice)), jax.tree.leaves(step(unfused)), roundings=2 * ROUNDINGS)


# -- fused functions over modules ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name, train", [("mlp", False), ("dropout_mlp", True), ("dense_batch_norm", True)])
def test_a_module_as_argument_of_a_fused_function(name, train):
    fused_model, x = create(name, train)
    model, _ = create(name, train)

    def apply(model, x, *, scale=1.0):
        return model(x) * scale

    fused = aicf_jax.fuse(apply)
    for scale in (1.0, 2.0):
        assert_same(fused(fused_model, x, scale=scale), apply(model, x, scale=scale), roundings=2 * ROUNDINGS)
        assert_same(nnx.state(fused_model), nnx.state(model), roundings=2 * ROUNDINGS)


@pytest.mark.parametrize("name, train", [("mlp", False), ("dropout_mlp", True), ("dense_batch_norm", True)])
def test_a_module_closed_over_by_a_fused_lambda(name, train):
    """The lambda mutates the module through its closure: the same mutations as unfused."""
    fused_model, x = create(name, train)
    model, _ = create(name, train)
    fused = aicf_jax.fuse(lambda x: fused_model(x))
    for _ in range(2):
        assert_same(fused(x), model(x), roundings=2 * ROUNDINGS)
        assert_same(nnx.state(fused_model), nnx.state(model), roundings=2 * ROUNDINGS)


def test_a_closed_over_module_is_never_stale():
    model, x = create("mlp")
    fused = aicf_jax.fuse(lambda x: model(x))
    before = fused(x)
    model.head.kernel[...] = model.head.kernel[...] * 2 + 1
    assert_same(fused(x), model(x), roundings=ROUNDINGS)
    assert not jnp.allclose(before, fused(x))


def test_a_closed_over_module_under_nnx_jit_and_nnx_grad():
    model, x = create("mlp")

    def gradient(wrap):
        loss = lambda m: (wrap(lambda x: m(x))(x) ** 2).sum()  # noqa: E731
        return nnx.jit(nnx.value_and_grad(loss))(model), nnx.grad(loss)(model)

    assert_same(gradient(aicf_jax.fuse), gradient(lambda f: f), roundings=2 * ROUNDINGS)


def test_a_module_that_cannot_be_found_is_mutated_as_unfused_or_refused_with_the_remedy():
    """Behind an object that is not searched. A stale or silently different value is never an answer."""

    class Hidden:
        __slots__ = ("get",)

        def __init__(self, model):
            self.get = iter([model] * 3).__next__

    fused_model, x = create("dropout_mlp", train=True)
    model, _ = create("dropout_mlp", train=True)
    hidden = Hidden(fused_model)
    try:
        got = aicf_jax.fuse(lambda x: hidden.get()(x))(x)
    except Exception as error:
        assert "argument" in str(error) and "fuse" in str(error), "the message does not name the remedy"
    else:
        assert_same(got, model(x), roundings=ROUNDINGS)
        assert_same(nnx.state(fused_model), nnx.state(model), roundings=0)


def test_a_function_that_creates_and_returns_a_module():
    def build(x):
        model = MLP(nnx.Rngs(key(0)))
        return nnx.split(model)[1], model(x)

    x = normal(0, 5, 7)
    assert_same(aicf_jax.fuse(build)(x), build(x), roundings=ROUNDINGS)


class NoPytree(nnx.Module, pytree=False):
    def __init__(self, rngs):
        self.layers = [nnx.Linear(4, 4, rngs=rngs)]

    def __call__(self, x):
        return nnx.relu(self.layers[0](x))


def test_a_module_that_is_no_pytree_stays_none():
    """Its attributes may hold modules in plain lists, so its fused class must not be a pytree either."""
    model, x = NoPytree(nnx.Rngs(0)), jnp.ones((2, 4))
    fused = aicf_jax.fuse(model)
    assert jax.tree.leaves(fused) == [fused]
    graphdef, state = nnx.split(fused)
    assert jax.tree.structure(state) == jax.tree.structure(nnx.state(model))
    np.testing.assert_array_equal(nnx.merge(graphdef, state)(x), model(x))
    gradient = nnx.grad(lambda m: m(x).sum())(fused)
    assert jax.tree.structure(gradient) == jax.tree.structure(nnx.grad(lambda m: m(x).sum())(model))
