"""What a training step keeps between forward and backward: no more than the derived backwards read."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals
from jax.test_util import check_grads

import aicf_jax
from aicf_jax.recompute import late
from tests.support import normal

X = normal(1, 4, 2048, 32)  # 1 MiB
SMALL = X[:, :-1]


def kept_shapes(capsys, f, *args):
    """Shapes of what is kept and is no argument of `f`."""
    capsys.readouterr()
    print_saved_residuals(f, *args)
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    outputs = [line for line in lines if "from the argument" not in line and "from a literal" not in line]
    return sorted(tuple(map(int, re.findall(r"\d+", re.search(r"\[(.*?)\]", line)[1]))) for line in outputs)


@pytest.mark.parametrize(("norm", "vectors"), [(nn.LayerNorm, 3), (nn.RMSNorm, 1)])
def test_a_norm_keeps_what_it_normalizes_and_a_few_numbers_for_each_row(capsys, norm, vectors):
    model = norm()
    variables = model.init(jax.random.key(0), X)
    fused, unfused = (lambda v, x, m=m: m.apply(v, jnp.sin(x)).sum() for m in (aicf_jax.fuse(model), model))
    # sin's own derivative keeps one array of full size; the norm's argument is the other.
    assert kept_shapes(capsys, fused, variables, X) == [(4, 2048, 1)] * vectors + [X.shape] * 2
    assert kept_shapes(capsys, unfused, variables, X).count(X.shape) > 2  # else there would be nothing to gain


def test_a_small_norm_is_differentiated_as_unfused(capsys):
    model = nn.LayerNorm()
    variables = model.init(jax.random.key(0), SMALL)
    fused, unfused = (lambda v, x, m=m: m.apply(v, x).sum() for m in (aicf_jax.fuse(model), model))
    assert kept_shapes(capsys, fused, variables, SMALL) == kept_shapes(capsys, unfused, variables, SMALL)


@pytest.mark.parametrize("activation", [nn.gelu, nn.silu, nn.softplus, nn.elu, nn.relu, nn.sigmoid, jnp.tanh])
def test_an_activation_keeps_its_input_or_its_output_and_nothing_else(capsys, activation):
    model = nn.Dense(16)
    variables = model.init(jax.random.key(0), X)
    f = aicf_jax.fuse(lambda v, x: activation(model.apply(v, x)))
    assert kept_shapes(capsys, lambda v: f(v, X).sum(), variables) == [(4, 2048, 16), X.shape]


@pytest.mark.parametrize(("activation", "recomputes"), [(nn.gelu, True), (nn.silu, True), (nn.relu, False)])
def test_what_is_computed_again_is_not_merged_with_the_forward(activation, recomputes):
    """XLA would otherwise keep tanh of the forward pass alive, which the derivative computes too."""
    f = aicf_jax.fuse(lambda x, w, b: activation(x @ w + b))

    def program(x):
        return jax.jit(jax.grad(lambda w: f(x, w, jnp.zeros(32)).sum())).lower(normal(2, 32, 32)).as_text()

    # A number of the cotangent is asked for.
    assert ("is_finite" in program(X)) == recomputes
    assert "is_finite" not in program(SMALL)


def test_what_a_norm_computes_again_waits_for_its_cotangent():
    """XLA for CPUs may otherwise normalize once more in the forward, and keep an array of the input's size."""
    norm = nn.LayerNorm()
    variables = norm.init(jax.random.key(0), X)
    model = aicf_jax.fuse(lambda v, x: norm.apply(v, jnp.sin(x)))
    lowered = jax.jit(jax.grad(lambda v: (model(v, X) ** 2).sum())).lower(variables)
    assert re.search(r"is_finite", lowered.as_text())
    assert "is_finite" not in jax.jit(lambda v: model(v, X)).lower(variables).as_text()


def test_late_is_the_same_numbers_in_every_transformation():
    x, after = normal(3, 3), normal(4, 1, 4) * jnp.nan
    f = lambda x: late(x, after) * 2  # noqa: E731
    for y in (f(x), jax.jit(f)(x), jax.vmap(f)(x), jax.vmap(late, (None, 0))(x, jnp.ones((2, 3)))[0] * 2):
        np.testing.assert_array_equal(y, x * 2)
    assert late(x, jnp.zeros(0)) is x
    np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(x), jnp.full(3, 2.0))
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda a: late(x, a).sum() + 3 * a))(jnp.float32(1)), 3.0)
    check_grads(lambda x: late(x, x) ** 2, (np.float64(1.5),), order=2, rtol=1e-3, eps=1e-3)
