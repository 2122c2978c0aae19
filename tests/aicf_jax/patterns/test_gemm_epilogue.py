"""The GEMM epilogue family: what is recognized, what is left alone and why, in every enclosing construct."""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.scipy.special import erf, erfc
from jax.scipy.stats import norm

import aicf_jax


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


X, W, B, U = normal(0, 6, 6), normal(1, 6, 6), normal(2, 6), normal(3, 6, 6)


def fused(f, *args):
    """Activations of the fused operations of a call."""
    report = aicf_jax.explain(f, *args)
    assert all(f.op == "gemm_epilogue" for f in report.fusions)
    return [dict(a.split("=") for a in f.attrs.split())["activation"] for f in report.fusions]


def codes(f, *args):
    return [r.code for r in aicf_jax.explain(f, *args).refusals]


SPELLINGS = {
    "relu": [jax.nn.relu, nn.relu, nnx.relu],
    "gelu_tanh": [
        jax.nn.gelu,
        nn.gelu,
        lambda z: 0.5 * z * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * jnp.power(z, 3)))),
        lambda z: 0.5 * z * (1 + jnp.tanh(z * 0.7978845608 * (1 + 0.044715 * z * z))),
    ],
    "gelu_exact": [
        lambda z: jax.nn.gelu(z, approximate=False),
        lambda z: 0.5 * z * (1 + erf(z / np.sqrt(2))),
        lambda z: z * 0.5 * (1 + erf(z * 0.7071067811865476)),
        lambda z: 0.5 * z * erfc(-z * np.sqrt(0.5)),
        lambda z: z * norm.cdf(z),
    ],
    "silu": [jax.nn.silu, nn.swish, lambda z: z * jax.nn.sigmoid(z), lambda z: z / (1 + jnp.exp(-z))],
    "tanh": [jnp.tanh, nn.tanh, jax.lax.tanh],
    "sigmoid": [jax.nn.sigmoid, jax.lax.logistic, lambda z: 1 / (1 + jnp.exp(-z))],
    "elu": [jax.nn.elu, lambda z: jax.nn.elu(z, 0.3), lambda z: jnp.where(z > 0, z, jnp.expm1(z))],
    "leaky_relu": [jax.nn.leaky_relu, lambda z: jax.nn.leaky_relu(z, 0.2), lambda z: jnp.where(z > 0, z, 0.3 * z)],
    "softplus": [jax.nn.softplus, lambda z: jnp.logaddexp(z, 0.0)],
    "none": [lambda z: z],
}
CASES = [(name, f) for name, functions in SPELLINGS.items() for f in functions]
IDS = [f"{name}-{i}" for name, functions in SPELLINGS.items() for i in range(len(functions))]


@pytest.mark.parametrize(("name", "act"), CASES, ids=IDS)
def test_every_spelling_is_the_same_operation(name, act):
    assert fused(lambda x, w, b: act(x @ w + b), X, W, B) == [name]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", [n for n in SPELLINGS])
def test_low_precision_spellings_too(name, dtype):
    act = SPELLINGS[name][0]
    args = [a.astype(dtype) for a in (X, W, B)]
    assert fused(lambda x, w, b: act(x @ w + b), *args) == [name]


def test_double_precision():
    with jax.enable_x64(True):
        args = [jnp.asarray(np.asarray(a, np.float64)) for a in (X, W, B)]
        assert fused(lambda x, w, b: jax.nn.gelu(x @ w + b, approximate=False), *args) == ["gelu_exact"]


def test_parameters_of_an_activation_are_attributes():
    report = aicf_jax.explain(lambda x, w: jax.nn.leaky_relu(x @ w, 0.25), X, W)
    assert "alpha=0.25" in report.fusions[0].attrs


class TestAnyProductThatIsAGemm:
    @pytest.mark.parametrize(
        "f",
        [
            lambda x, w, b: jax.nn.relu(x @ w),
            lambda x, w, b: jax.nn.relu(b + x @ w),
            lambda x, w, b: jax.nn.relu(x @ w.T + b),
            lambda x, w, b: jax.nn.relu(x.T @ w + b),
            lambda x, w, b: jax.nn.relu(jnp.einsum("ik,jk->ij", x, w) + b),
            lambda x, w, b: jax.nn.relu(jnp.einsum("ki,kj->ij", x, w) + b[None, :]),
            lambda x, w, b: jax.nn.relu(jnp.stack([x, x]) @ w + b),
            lambda x, w, b: jax.nn.relu(jnp.stack([x, x])[None] @ w + b.reshape(1, 1, 1, 6)),
            lambda x, w, b: jax.nn.relu(x[0] @ w + b),
            lambda x, w, b: jax.nn.relu(x[:1] @ w + b),
            lambda x, w, b: jax.nn.relu((x @ w).T + b[:, None]),
            lambda x, w, b: jax.nn.relu((x @ w).reshape(2, 3, 6) + b),
            lambda x, w, b: jax.nn.relu((x @ w).reshape(6, 2, 3) + b.reshape(2, 3)),
            lambda x, w, b: jax.nn.relu(jnp.einsum("bik,bkj->bij", x.reshape(1, 6, 6), w.reshape(1, 6, 6)) + b),
            lambda x, w, b: jax.nn.relu(jnp.einsum("td,edf->tef", x, jnp.stack([w, w])) + jnp.stack([b, b])),
            lambda x, w, b: jax.nn.relu(jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))) + b),
            lambda x, w, b: jax.nn.relu((x @ w + b).astype(jnp.bfloat16)),
        ],
    )
    def test_is_recognized(self, f):
        assert fused(f, X, W, B) == ["relu"]

    def test_flax_layers(self):
        x = jnp.ones((2, 3, 4, 5))
        for layer in (
            nn.Dense(6),
            nn.Dense(6, dtype=jnp.bfloat16),
            nn.DenseGeneral((2, 3)),
            nn.DenseGeneral(6, (-2, -1)),
        ):
            variables = layer.init(jax.random.key(0), x)
            assert fused(lambda v, x, layer=layer: nn.gelu(layer.apply(v, x)), variables, x) == ["gelu_tanh"]
        layer = nnx.Linear(5, 6, rngs=nnx.Rngs(0))
        assert fused(lambda x: nnx.silu(layer(x)), x) == ["silu"]
        general = nnx.LinearGeneral((4, 5), (2, 3), axis=(-2, -1), rngs=nnx.Rngs(0))
        assert fused(lambda x: nnx.silu(general(x)), x) == ["silu"]

    def test_wide_accumulation(self):
        def f(x, w, b):
            z = jax.lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32) + b
            return jax.nn.relu(z).astype(jnp.bfloat16)

        assert fused(f, X.astype(jnp.bfloat16), W.astype(jnp.bfloat16), B) == ["relu"]


def another_consumer(x, w, b):
    z = x @ w + b
    return jax.nn.gelu(z), jnp.cumsum(z)


def another_consumer_before_the_bias(x, w, b):
    y = x @ w
    return jax.nn.relu(y + b), jnp.cumsum(y)


def intermediate_is_a_result(x, w, b):
    z = x @ w + b
    return jax.nn.relu(z), z


def product_is_a_result(x, w, b):
    y = x @ w
    return jax.nn.relu(y + b), y


def bias_over_rows(x, w, b):
    return jax.nn.relu(x @ w + b[:, None])


def bias_over_rows_without_activation(x, w, b):
    return x @ w + b[:, None]


def activation_joins(x, w, b):
    return (x @ w + b) + jax.nn.relu(U)


def activation_of_the_unbiased_product(x, w, b):
    y = x @ w
    return jax.nn.relu(y) + (y + b)


def maximum_is_not_relu(x, w, b):
    return jnp.maximum(x @ w + b, 0)


NEAR_MISSES = {
    another_consumer: "multiple_consumers",
    another_consumer_before_the_bias: "multiple_consumers",
    intermediate_is_a_result: "escapes",
    product_is_a_result: "escapes",
    bias_over_rows: "bias_axis",
    bias_over_rows_without_activation: "bias_axis",
    activation_joins: "activation_on_another_branch",
    activation_of_the_unbiased_product: "activation_on_another_branch",
    maximum_is_not_relu: "tie_gradient",
}


@pytest.mark.parametrize("f", NEAR_MISSES, ids=lambda f: f.__name__)
class TestNearMisses:
    def test_are_refused_with_their_code_and_line(self, f):
        report = aicf_jax.explain(f, X, W, B)
        assert report.count("gemm_epilogue") == 0
        (refusal,) = report.refusals
        assert refusal.code == NEAR_MISSES[f]
        assert refusal.expected and refusal.found and refusal.expected != refusal.found
        lines, start = inspect.getsourcelines(f)
        path, _, rest = refusal.site.rpartition(":")
        assert path == __file__
        assert start <= int(rest.split()[0]) < start + len(lines)

    def test_keep_values_and_gradients(self, f):
        def loss(g):
            return lambda *a: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(g(*a)))

        # Nothing was rewritten, so both sides are one program to XLA: equal bits.
        got = jax.jit(jax.value_and_grad(loss(aicf_jax.fuse(f)), (0, 1, 2)))(X, W, B)
        want = jax.jit(jax.value_and_grad(loss(f), (0, 1, 2)))(X, W, B)
        assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, got, want)))


def test_relu_and_maximum_differ_where_the_product_is_zero():
    zeros = jnp.zeros((2, 6))
    for act, slope in ((jax.nn.relu, 0.0), (lambda z: jnp.maximum(z, 0), 0.5)):
        f = aicf_jax.fuse(lambda x, w, b, act=act: act(x @ w + b).sum())
        assert float(jax.grad(f, 2)(zeros, W, jnp.zeros(6))[0]) == 2 * slope


@pytest.mark.parametrize(
    ("f", "why"),
    [
        (lambda x, w, b: jax.nn.relu(x @ w + U), "a residual is no bias"),
        (lambda x, w, b: jax.nn.relu6(x @ w + b), "relu6 is not in the family"),
        (lambda x, w, b: jax.nn.relu(x + b), "no product"),
        (lambda x, w, b: jax.nn.relu(jnp.vdot(x, w) + b), "a dot product"),
        (lambda x, w, b: jax.nn.relu(jnp.outer(b, b) + b), "an outer product contracts nothing"),
        (lambda x, w, b: jax.nn.relu(x.astype(int) @ w.astype(int)), "integers"),
    ],
)
def test_other_shapes_of_program_are_left_alone(f, why):
    assert "relu" not in fused(f, X, W, B), why


def test_an_unknown_function_after_the_bias_leaves_the_bias_fused():
    assert fused(lambda x, w, b: (lambda h: h * jax.nn.sigmoid(1.702 * h))(x @ w + b), X, W, B) == ["none"]


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w, b: 0.5 * (x @ w + b),
        lambda x, w, b: b[0] * (x @ w + b),
        lambda x, w, b: (x @ w + b) / 8.0,
        lambda x, w, b: jax.nn.relu(0.5 * (x @ w + b)),
        lambda x, w, b: jax.nn.relu(b[0] * (x @ w + b)),
    ],
)
def test_a_scale_after_the_bias_leaves_the_bias_fused(f):
    """As of queries, which flax scales before attention; the activation after the scale is not fused and it is said."""
    assert fused(f, X, W, B) == ["none"]
    assert codes(f, X, W, B) == ["scale_after_bias"]
    for g in (f, jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1, 2))):
        got, want = aicf_jax.fuse(g)(X, W, B), g(X, W, B)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), got, want)


def test_a_user_rule_is_never_taken_for_an_activation():
    @jax.custom_jvp
    def mine(z):
        return jnp.maximum(z, 0.0)

    mine.defjvp(lambda p, t: (mine(*p), 7.0 * t[0]))
    f = aicf_jax.fuse(lambda x, w, b: mine(x @ w + b))
    assert fused(f, X, W, B) == ["none"]
    assert jnp.array_equal(jax.grad(lambda b: f(X, W, b).sum())(B), jnp.full(6, 42.0))


def layer(x, w, b):
    return jax.nn.relu(x @ w + b)


CONSTRUCTS = {
    "jit": lambda x, w, b: jax.jit(layer)(x, w, b),
    "scan": lambda x, w, b: jax.lax.scan(lambda c, _: (layer(c, w, b), c.sum()), x, None, length=3),
    "while": lambda x, w, b: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, layer(c[1], w, b)), (0, x)),
    "fori": lambda x, w, b: jax.lax.fori_loop(0, 3, lambda i, c: layer(c, w, b), x),
    "cond": lambda x, w, b: jax.lax.cond(b[0] > 0, layer, lambda x, w, b: x, x, w, b),
    "remat": lambda x, w, b: jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)(x, w, b),
    "vmap": lambda x, w, b: jax.vmap(layer, (0, None, None))(jnp.stack([x, x]), w, b),
    "custom_vjp": lambda x, w, b: with_own_rule(x, w, b),
}


@jax.custom_vjp
def with_own_rule(x, w, b):
    return layer(x, w, b)


with_own_rule.defvjp(lambda *a: (layer(*a), a), lambda a, g: (g, a[1], a[2]))


@pytest.mark.parametrize("name", CONSTRUCTS)
class TestInsideConstructs:
    def test_the_body_is_rewritten_and_the_construct_kept(self, name):
        f = CONSTRUCTS[name]
        assert fused(f, X, W, B) == ["relu"]

        def outside(g):
            return [e.primitive.name for e in jax.make_jaxpr(g)(X, W, B).eqns]

        if name != "vmap":  # vmap leaves no construct behind
            assert outside(aicf_jax.fuse(f)) == outside(f)

    def test_values(self, name):
        f = CONSTRUCTS[name]
        got, want = jax.jit(aicf_jax.fuse(f))(X, W, B), jax.jit(f)(X, W, B)
        assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, got, want)))


def test_names_of_inner_jits_and_policies_survive():
    def block(x, w, b):
        return layer(x, w, b)

    f = aicf_jax.fuse(lambda *a: jax.jit(block)(*a))
    text = str(jax.make_jaxpr(f)(X, W, B))
    assert "name=block" in text and "gemm_epilogue" in text


def test_an_activation_in_its_own_jit_is_fused_across_the_border():
    assert fused(lambda x, w, b: jax.jit(lambda z: jax.nn.silu(z))(x @ w + b), X, W, B) == ["silu"]


def test_fusing_twice_changes_nothing():
    once = aicf_jax.fuse(layer)
    program = jax.make_jaxpr(once)(X, W, B)
    twice = aicf_jax.fuse(lambda *a: once(*a))
    assert str(jax.make_jaxpr(twice)(X, W, B)) == str(program)
    assert aicf_jax.explain(once, X, W, B).count("gemm_epilogue") == 1


def test_a_program_with_nothing_to_fuse_is_emitted_as_it_was():
    def f(x, w, b):
        h = jax.jit(lambda y: jnp.sin(y) * 2)(x)
        return jax.lax.cond(b[0] > 0, jnp.cos, jnp.exp, h) + jnp.fft.fft(b).real

    assert str(jax.make_jaxpr(aicf_jax.fuse(f))(X, W, B)) == str(jax.make_jaxpr(f)(X, W, B))


def test_bitwise_policy_rewrites_nothing_and_says_so():
    policy = aicf_jax.Policy(numerics="bitwise")
    report = aicf_jax.explain(layer, X, W, B, policy=policy)
    assert report.fusions == ()
    assert [(r.stage, r.code) for r in report.refusals] == [("legality", "numerics")]
    f = aicf_jax.fuse(layer, policy=policy)
    assert jnp.array_equal(f(X, W, B), layer(X, W, B))


def test_symbolic_shapes_are_refused_with_a_reason():
    (n,) = jax.export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct((n, 6), jnp.float32)
    assert codes(layer, x, W, B) == ["symbolic_shape"]
