"""nnx models, fused: values, mutated state, gradients, tangents, Hessian-vector products and training as unfused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import aicf_jax
from tests.models.nnx_models import MODELS, create
from tests.support import assert_same, key, normal, quick_jit
from tests.transformations import TRANSFORMS, transformed

# every model in eval mode; in train mode those for which it makes a difference
MODES = [(name, False) for name in MODELS] + [
    (name, True) for name in ("dropout_mlp", "resnet_block", "dense_batch_norm")
]
EAGER = [("mlp", False), ("remat_stack", False), ("dropout_mlp", True), ("dense_batch_norm", True)]


def functional(model):
    """The model as a function of what is differentiated; the state it leaves behind is part of the result."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def run(params, x):
        merged = nnx.merge(graphdef, params, rest, copy=True)
        out = merged(x)
        return out, nnx.state(merged, nnx.Not(nnx.Param))

    return run, params


@pytest.mark.parametrize("name, train", MODES)
def test_values_state_and_derivatives(name, train):
    """Value, state, tangent, gradient and Hessian-vector product, through split and merge of the fused module."""

    def derivatives(wrap):
        model, x = create(name, train)
        run, params = functional(wrap(model))

        def outputs(params, x):
            return run(params, x)[0]

        def all_of_them(params, x):
            return run(params, x), [TRANSFORMS[t](outputs, (params, x)) for t in ("jvp", "hessian_vector_product")]

        return quick_jit(all_of_them)(params, x)

    # tolerance: unit roundoff x roundings on the longest path x four passes for second order
    assert_same(derivatives(aicf_jax.fuse), derivatives(lambda m: m), roundings=4 * MODELS[name][2])


@pytest.mark.parametrize("name, train", EAGER)
def test_eager_call_and_the_state_it_leaves(name, train):
    """Two calls in a row: dropout draws two masks, statistics move twice."""
    fused_model, x = create(name, train)
    model, _ = create(name, train)
    fused = aicf_jax.fuse(fused_model)
    for _ in range(2):
        # tolerance: unit roundoff x roundings on the longest path, twice because statistics feed the second call
        assert_same(fused(x), model(x), roundings=2 * MODELS[name][2])
        assert_same(nnx.state(fused), nnx.state(model), roundings=2 * MODELS[name][2])
        assert_same(nnx.state(fused_model), nnx.state(model), roundings=2 * MODELS[name][2])


@pytest.mark.parametrize("name, train", EAGER)
def test_nnx_jit_and_nnx_value_and_grad(name, train):
    def run(wrap):
        model, x = create(name, train)
        model = wrap(model)
        forward = nnx.jit(lambda m, x: m(x))
        step = nnx.jit(nnx.value_and_grad(lambda m, x: (m(x) ** 2).sum()))
        return forward(model, x), step(model, x), nnx.state(model)

    # tolerance: unit roundoff x roundings on the longest path x forward and backward, two calls
    assert_same(run(aicf_jax.fuse), run(lambda m: m), roundings=4 * MODELS[name][2])


@pytest.mark.parametrize("name", ["mlp", "dropout_mlp"])
def test_eager_nnx_grad_with_respect_to_the_fused_module(name):
    def run(wrap):
        model, x = create(name, train=True)
        return nnx.grad(lambda m: (m(x) ** 2).sum())(wrap(model))

    # tolerance: unit roundoff x roundings on the longest path x forward and backward
    assert_same(run(aicf_jax.fuse), run(lambda m: m), roundings=2 * MODELS[name][2])


@pytest.mark.parametrize(
    "name, jit", [("mlp", True), ("mlp", False), ("dropout_mlp", True), ("dense_batch_norm", True)]
)
def test_three_optimizer_steps_give_the_same_losses_and_state(name, jit):
    def train(wrap):
        model, x = create(name, train=True)
        model, y = wrap(model), normal(1, x.shape[0], 3)
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

        def step(model, optimizer):
            loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
            optimizer.update(model, grads)
            return loss

        step = nnx.jit(step) if jit else step
        return [step(model, optimizer) for _ in range(3)], nnx.state(model), nnx.state(optimizer)

    # tolerance: unit roundoff x roundings of a forward and backward pass (about 300) x 3 steps that feed each other
    assert_same(train(aicf_jax.fuse), train(lambda m: m), roundings=900)


@pytest.mark.parametrize("name, count", [("mlp", 3), ("dropout_mlp", 2), ("mixer", 4)])
def test_every_linear_layer_is_one_fused_operation(name, count):
    model, x = create(name)
    report = aicf_jax.explain(model, x)
    assert report.count("gemm_epilogue") == count, str(report)
    assert aicf_jax.explain(aicf_jax.fuse(model), x).count("gemm_epilogue") == count


def test_explain_changes_no_state():
    for name in ("dropout_mlp", "dense_batch_norm"):
        model, x = create(name, train=True)
        before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey))))
        aicf_jax.explain(model, x)
        jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey))), before)


def test_batching_a_fused_module_over_inputs_and_over_parameters():
    def run(wrap):
        model, x = create("mlp")
        f, params = functional(wrap(model))
        f_out = lambda p, x: f(p, x)[0]  # noqa: E731
        return transformed(("vmap_only_first", "vmap_of_grad_everything"), f_out, (params, x))

    # tolerance: unit roundoff x roundings on the longest path x forward and backward
    assert_same(run(aicf_jax.fuse), run(lambda m: m), roundings=2 * MODELS["mlp"][2])


def test_an_ensemble_created_by_nnx_vmap():
    """Fused modules with stacked parameters, called under nnx.vmap."""

    def run(wrap):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def create_stacked(rngs):
            return MODELS["mlp"][0](rngs)

        models = wrap(create_stacked(nnx.Rngs(key(0))))
        return nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(models, normal(0, 5, 7))

    # tolerance: unit roundoff x roundings on the longest path
    assert_same(run(aicf_jax.fuse), run(lambda m: m), roundings=MODELS["mlp"][2])
