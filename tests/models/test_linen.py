"""linen models, fused: values, updated statistics, gradients, tangents and Hessian-vector products as unfused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import aicf_jax
from tests.models.linen_models import MLP, MODELS, DenseBatchNorm, DropoutMLP
from tests.support import assert_same, key, normal, quick_jit, tangents_like
from tests.transformations import transformed

KEY = 7
# every model in eval mode; in train mode those for which it makes a difference
MODES = [(name, False) for name in MODELS] + [
    (name, True) for name in ("dropout_mlp", "resnet_block", "dense_batch_norm")
]


@functools.cache
def setup(name):
    module, shape, roundings = MODELS[name]
    x = normal(0, *shape)
    variables = quick_jit(module.init)(key(0), x)
    # statistics and biases away from their initial zeros and ones
    variables = jax.tree.map(lambda v, t: v + 0.1 * jnp.abs(t), variables, tangents_like(variables))
    return module, variables, x, roundings


def forward(module, variables, train):
    """`apply` as a function of what is differentiated: parameters and input."""
    state = {name: tree for name, tree in variables.items() if name != "params"}

    def run(params, x):
        rngs = {"dropout": key(KEY)} if train else None
        mutable = list(state) if train and state else False
        return module.apply({"params": params, **state}, x, train=train, rngs=rngs, mutable=mutable)

    return run


@pytest.mark.parametrize("name, train", MODES)
def test_values_and_derivatives(name, train):
    """Value, tangent, gradient and Hessian-vector product."""
    module, variables, x, roundings = setup(name)

    names, args = ("jvp", "hessian_vector_product"), (variables["params"], x)
    fused = aicf_jax.fuse(module)
    # tolerance: unit roundoff x roundings on the longest path x four passes for second order
    assert_same(
        transformed(names, forward(fused, variables, train), args),
        transformed(names, forward(module, variables, train), args),
        roundings=4 * roundings,
    )


EAGER = [("mlp", False), ("setup_mlp", False), ("dropout_mlp", True), ("dense_batch_norm", True)]


@pytest.mark.parametrize("name, train", EAGER)
def test_eager_apply_and_its_gradient(name, train):
    module, variables, x, roundings = setup(name)
    for transform in ("value", "grad"):
        args = variables["params"], x
        # tolerance: unit roundoff x roundings on the longest path, forward and backward
        assert_same(
            transformed(transform, forward(aicf_jax.fuse(module), variables, train), args),
            transformed(transform, forward(module, variables, train), args),
            roundings=2 * roundings,
        )


@pytest.mark.parametrize("name", ["mlp", "setup_mlp", "scanned_stack"])
def test_fusing_the_apply_method_equals_fusing_the_module(name):
    module, variables, x, roundings = setup(name)
    # tolerance: unit roundoff x roundings on the longest path
    assert_same(aicf_jax.fuse(module.apply)(variables, x), module.apply(variables, x), roundings=roundings)


@pytest.mark.parametrize("name, count", [("mlp", 3), ("dropout_mlp", 2), ("setup_mlp", 2), ("mixer", 5)])
def test_every_dense_layer_is_one_fused_operation(name, count):
    module, variables, x, _ = setup(name)
    report = aicf_jax.explain(module, variables, x)
    assert report.count("gemm_epilogue") == count, str(report)
    assert aicf_jax.explain(aicf_jax.fuse(module), variables, x).count("gemm_epilogue") == count


def test_dropout_draws_the_same_mask_from_the_same_key():
    module, variables, x, _ = setup("dropout_mlp")
    fused = aicf_jax.fuse(module)

    def hidden(target, seed):
        _, state = target.apply(
            variables, x, train=True, rngs={"dropout": key(seed)}, capture_intermediates=True, mutable=["intermediates"]
        )
        return state["intermediates"]["Dropout_0"]["__call__"][0]

    np.testing.assert_array_equal(hidden(fused, KEY) == 0, hidden(module, KEY) == 0)
    assert (hidden(fused, KEY + 1) != hidden(fused, KEY)).any(), "the key is baked in"


def test_batch_statistics_are_updated_as_unfused():
    module, variables, x, roundings = setup("dense_batch_norm")
    fused = aicf_jax.fuse(module)
    _, got = fused.apply(variables, x, train=True, mutable=["batch_stats"])
    _, want = module.apply(variables, x, train=True, mutable=["batch_stats"])
    # tolerance: unit roundoff x (dense over 7, statistics over 6 rows, each with a division or root)
    assert_same(got, want, roundings=roundings)
    assert (got["batch_stats"]["BatchNorm_0"]["mean"] != variables["batch_stats"]["BatchNorm_0"]["mean"]).any()


@pytest.mark.parametrize("module", [MLP(), DenseBatchNorm(), DropoutMLP()], ids=lambda m: type(m).__name__)
def test_three_training_steps_give_the_same_losses_parameters_and_statistics(module):
    x, y = normal(0, 6, 7), normal(1, 6, 3)
    variables = quick_jit(module.init)(key(0), x)
    optimizer = optax.sgd(0.1, momentum=0.9)

    def train(target):
        params = variables["params"]
        stats = {name: tree for name, tree in variables.items() if name != "params"}

        @jax.jit
        def step(params, stats, opt_state, dropout_key):
            def loss(params):
                out, new = target.apply(
                    {"params": params, **stats}, x, train=True, rngs={"dropout": dropout_key}, mutable=["batch_stats"]
                )
                return jnp.mean((out - y) ** 2), new

            (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), new, opt_state, value

        opt_state, losses = optimizer.init(params), []
        for i in range(3):
            params, stats, opt_state, value = step(params, stats, opt_state, key(i))
            losses.append(value)
        return losses, params, stats

    # tolerance: unit roundoff x roundings of a forward and backward pass (about 300) x 3 steps that feed each other
    assert_same(train(aicf_jax.fuse(module)), train(module), roundings=900)


@pytest.mark.parametrize("name", ["mlp", "scanned_stack"])
@pytest.mark.parametrize("transform", ["vmap_only_first", "vmap_of_grad_everything"])
def test_batching_over_parameters_and_inputs(name, transform):
    module, variables, x, roundings = setup(name)
    args = variables["params"], x
    # tolerance: unit roundoff x roundings on the longest path x forward and backward
    assert_same(
        transformed(transform, forward(aicf_jax.fuse(module), variables, False), args),
        transformed(transform, forward(module, variables, False), args),
        roundings=2 * roundings,
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
def test_low_precision_compute_with_float32_parameters(dtype):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3, dtype=dtype)(nn.gelu(nn.Dense(8, dtype=dtype)(x)))

    module, x = Net(), normal(0, 5, 7)
    params = quick_jit(module.init)(key(0), x)
    fused = aicf_jax.fuse(module)
    # tolerance: products accumulate in float32; about 12 roundings to the compute dtype in a row (two layers forward)
    assert_same(fused.apply(params, x), module.apply(params, x), roundings=12)
    # and as many again backward, rounded to the compute dtype although the gradient is returned as float32
    names = ("grad",)
    got, want = (transformed(names, lambda p, f=f: f.apply(p, x), (params,)) for f in (fused, module))
    assert_same(got, want, roundings=24, dtype=dtype)
