"""Norms in their normal form: every spelling is one node, and what is not a norm, or not safely so, is none."""

import functools

import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from aicf_jax import OpFlags
from aicf_jax.normalize import normalize
from tests.aicf_jax.attention_support import evaluate, graph_of, normal, only, ops_of
from tests.aicf_jax.norm_support import (
    AFFINE,
    BATCH_NORMS,
    EPS,
    MEANS,
    NEAR_MISSES,
    ROOTS,
    VARIANCES,
    B,
    G,
    X,
    Z,
    divided,
    float32_inside,
    gemma,
    layer_norm,
    llama,
    mean,
    rms_norm,
    standardized,
)


def norm_of(f, *args):
    graph = graph_of(f, *args)
    return graph, only(graph, "layer_norm", "rms_norm")


def assert_one_norm(f, name, *args):
    """One node, whose own equations are the whole function; the rule finds nothing new in its own result."""
    graph, node = norm_of(f, *args)
    assert node.op == name
    assert graph.results == node.outputs
    assert str(normalize(graph)) == str(graph)
    if set(node.inputs) <= set(graph.arguments):
        own = evaluate(graph, node, *(args[graph.arguments.index(v)] for v in node.inputs))
        # What is a call of its own is compiled, and may be contracted: a dozen roundings.
        np.testing.assert_allclose(
            own, f(*args), rtol=12 * jnp.finfo(own.dtype).eps, atol=12 * jnp.finfo(own.dtype).eps
        )
    return node


@pytest.mark.parametrize("average", MEANS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("variance", VARIANCES)
def test_statistics(average, variance):
    node = assert_one_norm(functools.partial(layer_norm, average=average, variance=variance), "layer_norm", X, G, B)
    formula = "moments" if "moments" in variance else "centered"
    assert (node.attr("variance"), node.attr("clamped")) == (formula, "clamped" in variance)


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("affine", AFFINE)
def test_the_reciprocal_deviation_and_what_it_multiplies(root, affine):
    node = assert_one_norm(functools.partial(layer_norm, root=root, affine=affine), "layer_norm", X, G, B)
    assert node.attr("axes") == 1 and node.attr("eps") == EPS
    assert node.attr("scale") == (None if affine in ("no scale", "neither") else (-1,))
    assert node.attr("bias") == (None if affine in ("no bias", "neither") else (-1,))


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("affine", [name for name in AFFINE if name not in ("folded", "distributed")])
def test_root_mean_squares(root, affine):
    node = assert_one_norm(functools.partial(rms_norm, root=root, affine=affine), "rms_norm", X, G, B)
    assert node.attr("variance") == "mean_square" and node.attr("eps") == EPS


@pytest.mark.parametrize("f", [divided, standardized])
def test_other_spellings(f):
    assert_one_norm(f, "layer_norm", X, G, B)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("f", "name"), [(float32_inside, "layer_norm"), (llama, "rms_norm"), (gemma, "rms_norm")])
def test_statistics_in_float32_are_part_of_the_norm_with_their_casts(f, name, dtype):
    with jax.numpy_dtype_promotion("standard"):
        graph, node = norm_of(f, X.astype(dtype), G, B)
    assert node.op == name and node.inputs[0] == graph.arguments[0]
    assert graph.results == node.outputs and node.attr("statistics") == "float32"


def test_float64():
    with jax.enable_x64(True):
        args = [np.asarray(a, np.float64) for a in (X, G, B)]
        node = assert_one_norm(layer_norm, "layer_norm", *map(jnp.asarray, args))
    assert node.attr("statistics") == "float64"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_trailing_axes(count):
    axes = tuple(range(-count, 0))

    def f(x, g):
        m = mean(x, axes)
        return (x - m) * lax.rsqrt(mean((x - m) ** 2, axes) + EPS) * g

    _, node = norm_of(f, X, normal(4, *X.shape[-count:]))
    assert node.attr("axes") == count and node.attr("scale") == axes
    _, node = norm_of(f, X, G)
    assert node.attr("scale") == (-1,)  # a scale of the last axis only


def test_what_is_rounded_first_is_the_value_that_is_normalized():
    graph, node = norm_of(lambda x, g, b: layer_norm(x.astype(jnp.bfloat16).astype(jnp.float32), g, b), X, G, B)
    assert graph.values[node.inputs[0]].aval.dtype == jnp.bfloat16


def test_shapes_of_one():
    x = normal(5, 2, 1)
    assert norm_of(layer_norm, x, jnp.ones(1), jnp.ones(1))[1].attr("scale") == ()
    assert norm_of(layer_norm, normal(5, 6), G, B)[1].attr("axes") == 1
    assert norm_of(layer_norm, normal(5, 1, 1, 6), G, B)[1].attr("axes") == 1


def norms_of(f, *args):
    """Its norms; with a type of its own nnx converts parameters first."""
    assert set(ops_of(f, *args)) <= {"layer_norm", "rms_norm", "convert_element_type"}
    return [op for op in ops_of(f, *args) if op.endswith("norm")]


LAYERS = [
    (nn.LayerNorm, nnx.LayerNorm, "layer_norm"),
    (nn.RMSNorm, nnx.RMSNorm, "rms_norm"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"use_scale": False}, {"use_fast_variance": False}, {"dtype": jnp.bfloat16}])
@pytest.mark.parametrize(("linen", "nnx_layer", "name"), LAYERS, ids=["layer", "rms"])
def test_library_layers(linen, nnx_layer, name, options, dtype):
    x = X.astype(dtype)
    module = linen(**options)
    assert norms_of(module.apply, module.init(jax.random.key(0), x), x) == [name]
    definition, state = nnx.split(nnx_layer(6, **options, rngs=nnx.Rngs(0)))
    assert norms_of(lambda s, x: nnx.merge(definition, s)(x), state, x) == [name]


def test_library_layers_over_several_axes():
    for options, scale in (({"reduction_axes": (-2, -1), "feature_axes": (-2, -1)}, (-2, -1)), ({}, (-1,))):
        module = nn.LayerNorm(**options)
        _, node = norm_of(module.apply, module.init(jax.random.key(0), X), X)
        assert node.attr("scale") == scale
    module = nn.LayerNorm(reduction_axes=(-2, -1), feature_axes=-1, use_bias=False)
    _, node = norm_of(module.apply, module.init(jax.random.key(0), X), X)
    assert (node.attr("axes"), node.attr("scale"), node.attr("bias")) == (2, (-1,), None)


# -- what stays outside ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3, 1), (2, 1, 6), (2, 3, 6)], ids=str)
def test_a_scale_that_does_not_run_along_the_normalized_axes_alone_stays_outside(shape):
    graph, node = norm_of(layer_norm, X, normal(6, *shape), B)
    assert node.attr("scale") is None and node.attr("bias") is None
    assert {"mul", "add"} <= {n.op for n in graph.nodes}


def test_one_array_as_scale_and_bias_is_the_scale():
    _, node = norm_of(lambda x, g: layer_norm(x, g, g), X, G)
    assert node.attr("bias") is None and len(node.inputs) == 2


def test_what_grows_the_result_stays_outside():
    _, node = norm_of(layer_norm, normal(7, 4, 1), normal(8, 5), normal(9, 5))
    assert node.attr("scale") is None


def test_two_norms_of_one_value_are_two_nodes():
    assert ops_of(lambda x, g, b: (layer_norm(x, g, b), layer_norm(x, b, g)), X, G, B) == ["layer_norm"] * 2


def test_a_shared_normalized_value_is_the_norm():
    def f(x, g, b):
        y = layer_norm(x, g, b, affine="neither")
        return y * g, y * b

    assert [op for op in ops_of(f, X, G, B) if op == "layer_norm"] == ["layer_norm"]


# -- residuals -------------------------------------------------------------------------------------------


def marked(f, *args):
    return [n.op for n in graph_of(f, *args).nodes if n.flags & OpFlags.IS_RESIDUAL]


def test_an_addition_before_a_norm_is_its_residual():
    assert marked(lambda x, z, g, b: layer_norm(x + z, g, b), X, Z, G, B) == ["add"]
    assert marked(lambda x, z, g, b: (layer_norm(x + z, g, b), rms_norm(x + z, g, b)), X, Z, G, B) == ["add", "add"]


@pytest.mark.parametrize(
    "f",
    [
        lambda x, z, g, b: layer_norm(x * z, g, b),
        lambda x, z, g, b: layer_norm(x + g, g, b),  # a bias
        lambda x, z, g, b: layer_norm(x + z[0], g, b),  # broadcast over the batch
        lambda x, z, g, b: layer_norm(x + 1.0, g, b),
        lambda x, z, g, b: (lambda s: layer_norm(s, jnp.sum(s, (0, 1)), b))(x + z),  # the scale rests on the sum
    ],
)
def test_what_is_no_residual(f):
    assert marked(f, X, Z, G, B) == []


# -- near misses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_say_why(name):
    f, code = NEAR_MISSES[name]
    graph = graph_of(f, X, G, B, Z)
    (node,) = (n for n in graph.nodes if n.flags & OpFlags.IS_NEAR_NORM)
    assert node.attr("code") == code and node.attr("expected") and node.attr("found")
    assert not any(n.flags & OpFlags.IS_NORMALIZATION for n in graph.nodes)
    assert str(normalize(graph)) == str(graph)


@pytest.mark.parametrize("name", BATCH_NORMS)
def test_statistics_over_other_axes_are_a_batch_norm(name):
    graph = graph_of(BATCH_NORMS[name], X, G, B, Z)
    assert [n.op for n in graph.nodes if n.flags & OpFlags.IS_BATCH_NORM] == ["batch_norm"]
    assert not any(n.flags & (OpFlags.IS_NEAR_NORM | OpFlags.IS_NORMALIZATION) for n in graph.nodes)
    assert str(normalize(graph)) == str(graph)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, g, b: jnp.exp(x) / jnp.sum(jnp.exp(x), -1, keepdims=True),
        lambda x, g, b: x / mean(x) * g,
        lambda x, g, b: x - mean(x),
        lambda x, g, b: jnp.sqrt(mean(x * x)),
        lambda x, g, b: x / jnp.sqrt(x.shape[-1]) * g,
        lambda x, g, b: x * lax.rsqrt(x * x + EPS),
    ],
)
def test_what_resembles_no_norm_is_not_mentioned(f):
    flags = OpFlags.IS_NEAR_NORM | OpFlags.IS_NORMALIZATION
    assert not any(n.flags & flags for n in graph_of(f, X, G, B).nodes)


def test_a_norm_of_what_was_centered_by_another_mean_is_a_root_mean_square():
    def f(x, z, g):
        c = x - mean(z)
        return c * lax.rsqrt(mean(c * c) + EPS) * g

    assert "rms_norm" in ops_of(f, X, Z, G)


# -- any spelling ----------------------------------------------------------------------------------------


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    st.sampled_from(MEANS),
    st.sampled_from(sorted(VARIANCES)),
    st.sampled_from(sorted(ROOTS)),
    st.sampled_from(sorted(AFFINE)),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from([None, "std plus eps", "N - 1", "variance of another", "a stopped mean", "N - 1 of a batch"]),
)
def test_any_spelling_is_one_norm_and_its_near_misses_are_none(average, variance, root, affine, dtype, miss):
    spelled = functools.partial(layer_norm, average=average, variance=variance, root=root, affine=affine)

    def f(x, g, b, z):
        y = spelled(x.astype(jnp.float32), g, b).astype(dtype)
        return y if miss is None else (y, NEAR_MISSES[miss][0](y.astype(jnp.float32), g, b, z))

    with jax.numpy_dtype_promotion("standard"):
        graph = graph_of(f, X.astype(dtype), G, B, Z)
    assert [n.op for n in graph.nodes if n.flags & OpFlags.IS_NORMALIZATION] == ["layer_norm"]
    near = [n.attr("code") for n in graph.nodes if n.flags & OpFlags.IS_NEAR_NORM]
    if miss is None:
        assert near == []
    else:
        # Algebra looks through x s + t, which is then another value than the one that the statistics are of.
        assert near in ([NEAR_MISSES[miss][1]], ["other_value"] if affine == "folded" else None)
