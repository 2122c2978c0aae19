"""The derived composite backward: residuals, sharing, printing; complete differentiation through a user's kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import aicf_jax
from aicf_jax import Kernel
from aicf_jax.cache import build_plan
from aicf_jax.derived import backward_program
from aicf_jax.explain import backward_text
from aicf_jax.fuse import make_context
from aicf_jax.kernels import ANY
from tests.support import EVERY_GEMM_EPILOGUE

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu_exact": lambda z: jax.nn.gelu(z, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "elu": jax.nn.elu,
    "leaky_relu": jax.nn.leaky_relu,
    "softplus": jax.nn.softplus,
    "none": lambda z: z,
}


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


X, W, B = normal(0, 5, 4), normal(1, 4, 3), normal(2, 3)


def dense(name):
    return lambda x, w, b: ACTIVATIONS[name](x @ w + b)


def fused_op(f, *args):
    context = make_context(aicf_jax.Policy(), aicf_jax.FUSION_PATTERNS, aicf_jax.KERNELS)
    (found,) = build_plan(jax.make_jaxpr(f)(*args).jaxpr, context).rewritten.fusions
    return found.op


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_backward_keeps_the_output_where_that_is_enough(name):
    op = fused_op(dense(name), X, W, B)
    kept = {None: "nothing", op.results[0]: "Y"}.get(op.residual, "Z")
    expected = {"relu": "Y", "tanh": "Y", "sigmoid": "Y", "none": "nothing"}.get(name, "Z")
    assert kept == expected


def test_a_hand_written_sigmoid_is_differentiated_by_its_own_formula():
    op = fused_op(lambda x, w: 1 / (1 + jnp.exp(-(x @ w))), X, W)
    assert op.residual not in op.results


@pytest.mark.parametrize("name", ["relu", "gelu_tanh", "none"])
def test_printing(name, golden):
    golden(backward_text(backward_program(fused_op(dense(name), X, W, B), (0, 1, 2))))


def test_one_dz_feeds_both_products_and_the_bias():
    program = str(jax.make_jaxpr(jax.grad(lambda *a: aicf_jax.fuse(dense("silu"))(*a).sum(), (0, 1, 2)))(X, W, B))
    assert program.count("activation_grad") == 1
    assert program.count("dot_general") == 3  # forward, dX, dW


def test_only_wanted_cotangents_are_computed():
    program = str(jax.make_jaxpr(jax.grad(lambda *a: aicf_jax.fuse(dense("silu"))(*a).sum(), 2))(X, W, B))
    assert program.count("dot_general") == 1


def test_dz_has_the_layout_of_the_result():
    op = fused_op(lambda x, w, b: jax.nn.relu((x @ w).T + b[:, None]), X, W, B)
    backward = backward_program(op, (0, 1, 2)).rewritten.graph
    (node,) = [n for n in backward.nodes if n.op == "gemm_epilogue_grad"]
    assert {backward.values[v].aval.shape for v in node.outputs} == {(3, 5), (3,)}


def test_the_backward_is_matched_by_the_same_engine():
    backward = backward_program(fused_op(dense("gelu_exact"), X, W, B), (0, 1, 2))
    assert [f.op.semantic.name for f in backward.rewritten.fusions] == ["gemm_epilogue_grad"]


def test_the_same_operand_twice():
    x = normal(3, 4, 4)
    f = aicf_jax.fuse(lambda x: jnp.tanh(x @ x))
    assert aicf_jax.explain(f, x).count("gemm_epilogue") == 1
    got, want = jax.grad(lambda x: f(x).sum())(x), jax.grad(lambda x: jnp.tanh(x @ x).sum())(x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)  # sums of 4 terms in float32


# -- a kernel of its own keeps the operation whole -------------------------------------------------------


def _run(op, a, b, *bias):
    """A kernel in plain jax: what it computes is the operation, how is its own business."""
    z = jnp.matmul(a, b) + (bias[0] if bias else 0)
    return (ACTIVATIONS[op.blob["activation"]](z),)


def _run_grad(op, residual, ct):
    """The activation's gradient dZ and its sum over the rows, db."""
    (dz,) = jax.vjp(jax.nn.silu, residual)[1](ct)
    return dz.sum(0), dz


CAPABILITIES = EVERY_GEMM_EPILOGUE
MINE = Kernel("mine", "gemm_epilogue", ("cpu", "cuda"), CAPABILITIES, _run)
MINE_GRAD = Kernel(
    "mine_grad",
    "gemm_epilogue_grad",
    ("cpu",),
    {
        "activation": {"silu"},
        "from_output": {False},
        "summed_axes": {(0,)},
        "dtype": {"float32", "float64"},
        "rows": ANY,
        "formula": ANY,
    },
    _run_grad,
)
KERNELS = aicf_jax.KERNELS + (MINE, MINE_GRAD)

TRANSFORMS = {
    "value": lambda f, *a: f(*a),
    "jit": lambda f, *a: jax.jit(f)(*a),
    "grad": lambda f, *a: jax.grad(lambda *a: f(*a).sum(), (0, 1, 2))(*a),
    "jit of grad": lambda f, *a: jax.jit(jax.grad(lambda *a: f(*a).sum(), (0, 1, 2)))(*a),
    "jvp": lambda f, *a: jax.jvp(f, a, a),
    "forward over reverse": lambda f, *a: jax.jvp(jax.grad(lambda *a: f(*a).sum(), (0, 1, 2)), a, a)[1],
    "reverse over forward": lambda f, *a: jax.grad(lambda *b: jax.jvp(f, b, a)[1].sum(), (0, 1, 2))(*a),
    "reverse over reverse": lambda f, *a: jax.grad(
        lambda *a: sum(jnp.sum(g * g) for g in jax.grad(lambda *a: f(*a).sum(), (0, 1, 2))(*a)), (0, 1, 2)
    )(*a),
    "linearize": lambda f, *a: jax.linearize(f, *a)[1](*a),
    "vmap": lambda f, *a: jax.vmap(f, (0, None, None))(jnp.stack([a[0], -a[0]]), *a[1:]),
    "vmap of grad": lambda f, *a: jax.vmap(jax.grad(lambda *a: f(*a).sum(), (0, 1, 2)), (0, None, None))(
        jnp.stack([a[0], -a[0]]), *a[1:]
    ),
    "grad of vmap": lambda f, *a: jax.grad(
        lambda x, w, b: jax.vmap(f, (0, None, None))(jnp.stack([x, -x]), w, b).sum(), (0, 1, 2)
    )(*a),
    "scan": lambda f, *a: jax.grad(
        lambda x, w, b: jax.lax.scan(lambda c, s: (c + f(x * s, w, b).sum(), None), 0.0, jnp.arange(3.0))[0], (0, 1, 2)
    )(*a),
    "remat": lambda f, *a: jax.grad(lambda *a: jax.checkpoint(f)(*a).sum(), (0, 1, 2))(*a),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_users_kernel_keeps_every_transformation(transform):
    f = dense("silu")
    fused = aicf_jax.fuse(f, kernels=KERNELS, policy=aicf_jax.Policy(on_failure="raise"))
    got, want = TRANSFORMS[transform](fused, X, W, B), TRANSFORMS[transform](f, X, W, B)
    # float32, sums of at most 5 * 3 terms, second order: a few dozen roundoffs of 6e-8 against values of order 1 to 10
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5), got, want)


def test_a_users_kernel_is_what_runs():
    fused = aicf_jax.fuse(dense("silu"), kernels=KERNELS)
    report = aicf_jax.explain(fused, X, W, B)
    assert report.fusions[0].kernel == "mine"
    assert "mine_grad" in report.fusions[0].backward
    program = str(jax.make_jaxpr(jax.grad(lambda *a: fused(*a).sum(), (0, 1, 2)))(X, W, B))
    assert "residual=True" in program and "gemm_epilogue_grad" in program


# One whose derivative needs its output and one whose derivative needs its input; the others are slow.
QUICK = ("tanh", "gelu_tanh")


@pytest.mark.parametrize("name", [a if a in QUICK else pytest.param(a, marks=pytest.mark.slow) for a in ACTIVATIONS])
def test_check_grads_to_second_order(name):
    with jax.enable_x64(True):
        args = tuple(np.asarray(a, np.float64) for a in (X, W, B))
        check_grads(aicf_jax.fuse(dense(name)), args, order=2)
        check_grads(aicf_jax.fuse(dense(name), kernels=KERNELS), args, order=2)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf, 3e38], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nan_and_infinity_appear_where_they_do_unfused(name, bad):
    x = X.at[2, 1].set(bad)
    f = dense(name)

    def both(g):
        return jax.value_and_grad(lambda *a: jnp.sum(g(*a) * jnp.arange(1.0, 4.0)), (0, 1, 2))(x, W, B), g(x, W, B)

    def classes(a):
        return jnp.where(jnp.isnan(a), 3, jnp.where(jnp.isposinf(a), 2, jnp.where(jnp.isneginf(a), 1, 0)))

    got, want = jax.jit(lambda: both(aicf_jax.fuse(f)))(), jax.jit(lambda: both(f))()
    jax.tree.map(lambda g, w: np.testing.assert_array_equal(classes(g), classes(w)), got, want)
