"""What every model of another library is asked: fused, the same values and gradients, and the fusions a reader expects.

Models run in float64 where they can: then a tolerance of roundings is far below what a wrong program would change.
"""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import pytest

import aicf_jax
from tests.support import ACTIVATION_ROUNDINGS, assert_same, is_inexact, quick_jit


def library(module, requirement, *options):
    """The module, or a skip that says how to install it. Called in a test: collecting the tests imports no library.

    What these libraries warn of while they are imported is their business.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(
            module, reason=" ".join(["pip install", *options, requirement]), exc_type=ImportError
        )


def float64(tree):
    """A tree with its floating point leaves in float64."""
    return jax.tree.map(lambda x: x.astype(jnp.float64) if is_inexact(x) else x, tree)


def quick_initialization():
    """Within it keys are of the generator that compiles at once: the default one is unrolled for each parameter."""
    return jax.default_prng_impl("unsafe_rbg")


def path_roundings(layers, longest_sum, passes=2):
    """Roundings on the longest path: about four sums and four activations or normalizations per layer, and the ends.

    `passes`: forward and backward.
    """
    return passes * (layers + 1) * 4 * (longest_sum + ACTIVATION_ROUNDINGS)


def check(model, run, params, *inputs, expected, roundings, whole=(), dtype=None):
    """Holds `fuse(model)` against the model: eagerly, under jit, and the gradient of a loss in the parameters.

    Args:
      model: the library's model, as its user holds it.
      run: ``run(model)`` is a function of ``(params, *inputs)`` that returns the outputs.
      params: float64.
      *inputs: of the model.
      expected: operation -> at least how often a reader of the model expects it.
      roundings: on the longest path, see `tests.support.assert_same`.
      whole: as `expected`, for the fused loss: what the model and its loss are together.
      dtype: the lowest precision inside the model, where its results do not show it.
    """
    fused = aicf_jax.fuse(model)
    assert_fusions(aicf_jax.explain(run(model), params, *inputs), expected)
    assert_same(run(fused)(params, *inputs), run(model)(params, *inputs), roundings=roundings, dtype=dtype)
    want = quick_jit(outputs_and_gradient(run(model)))(params, *inputs)
    got = quick_jit(outputs_and_gradient(run(fused)))(params, *inputs)
    assert_same(got, want, roundings=roundings, dtype=dtype)
    if whole:
        check_function(next_token_loss(run(model)), params, *inputs, expected=whole, roundings=roundings)


def check_function(function, params, *inputs, expected, roundings):
    """The same for a function of ``(params, *inputs)`` that is fused as a whole and returns a number."""
    assert_fusions(aicf_jax.explain(function, params, *inputs), expected)
    want = quick_jit(jax.value_and_grad(function))(params, *inputs)
    got = quick_jit(jax.value_and_grad(aicf_jax.fuse(function)))(params, *inputs)
    assert_same(got, want, roundings=roundings)


def functional(model):
    """An nnx model as a function of its parameters and inputs; the state that a call leaves is part of the result."""
    from flax import nnx

    graphdef, _, rest = nnx.split(model, nnx.Param, ...)

    def run(params, *inputs):
        merged = nnx.merge(graphdef, params, rest, copy=True)
        return merged(*inputs), nnx.state(merged, nnx.Not(nnx.Param))

    return run


def outputs_and_gradient(function):
    """Outputs of a model, and the gradient of a sum of squares of them in the parameters."""

    def both(params, *inputs):
        def loss(params):
            outputs = function(params, *inputs)
            leaves = [x for x in jax.tree.leaves(outputs) if is_inexact(x)]
            return sum(jnp.mean(jnp.square(x)) for x in leaves), outputs

        gradient, outputs = jax.grad(loss, has_aux=True)(params)
        return outputs, gradient

    return both


def next_token_loss(logits_of):
    """Mean cross entropy with the next token (after the last one the first), as optax spells it."""
    import optax

    def loss(params, ids, *inputs):
        logits = logits_of(params, ids, *inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(ids, -1, axis=1)).mean()

    return loss


def assert_fusions(report, expected):
    """Every operation at least as often as expected; otherwise the failure prints what was found and refused."""
    assert report.failure is None, report.failure
    counts = {op: report.count(op) for op in sorted({*expected, *(f.op for f in report.fusions)})}
    short = {op: n for op, n in expected.items() if counts[op] < n}
    refused = [f"{r.pattern} {r.code} at {r.site}: expected {r.expected}, found {r.found}" for r in report.refusals]
    assert not short, "\n  ".join([f"expected {expected}, found {counts}; refused:", *refused])
