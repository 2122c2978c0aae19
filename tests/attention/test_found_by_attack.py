"""Attention under attack: faults that were found by trying, and corners that hold. All through the streamed kernel.

Tolerance: unit roundoff times the longest sum (keys, or queries in a gradient) and a softmax, for each pass.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import stop_gradient
from jax.test_util import check_grads

import aicf_jax
from aicf_jax import derived, primitives
from tests.support import assert_same, normal, quick_jit
from tests.transformations import scalar

B, H, Q, K, D, E = 2, 2, 19, 21, 4, 3
SOFTMAX_ROUNDINGS = 24
ROUNDINGS = 2 * (max(Q, K) + SOFTMAX_ROUNDINGS)


# Each compiles a program or several; what must hold at every commit is in test_attention.py.
pytestmark = pytest.mark.slow


def operands(q=Q, k=K, dtype=jnp.float32):
    return tuple(normal(i, B, H, n, d, dtype=dtype) for i, (n, d) in enumerate([(q, D), (k, D), (k, E)]))


def attention(scores=lambda s, *rest: s, weights=lambda p, *rest: p, softmax=jax.nn.softmax):
    def f(q, k, v, *rest):
        s = jnp.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(D)
        return jnp.einsum("bhqk,bhkd->bhqd", weights(softmax(scores(s, *rest)), *rest), v)

    return f


def positions(s):
    return (jax.lax.broadcasted_iota(jnp.int32, s.shape, s.ndim - k) for k in (2, 1))


def causal(fill, offset=0):
    def mask(s, *rest):
        i, j = positions(s)
        return jnp.where(i + offset >= j, s, fill)

    return mask


def gradient(f, args):
    floats = tuple(i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating))
    return f(*args), jax.grad(scalar(f), floats)(*args)


def second(f, args):
    floats = tuple(i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating))

    def directional(*a):
        return sum(jnp.sum(jnp.sin(g)) for g in jax.grad(scalar(f), floats)(*a))

    return jax.grad(directional, floats)(*args)


def check(f, args, run=gradient, count=1, roundings=ROUNDINGS, dtype=None):
    report = aicf_jax.explain(f, *args)
    assert report.count("attention") == count
    assert all(x.kernel == "streamed_attention" for x in report.fusions if x.op == "attention")
    fused = aicf_jax.fuse(f)
    got, want = (quick_jit(lambda *a, f=g: run(f, a))(*args) for g in (fused, f))
    assert_same(got, want, roundings=roundings, dtype=dtype)


# -- faults that were found -------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)], ids=["q", "k", "v", "bias", "all"])
def test_vmap_of_gradient(which):
    """The axis of the softmax moved with the new dimension; without a batch in q and k, m and l have none either."""
    f, args = attention(lambda s, b: s + b), (*operands(), normal(9, H, 1, K))
    stacked = tuple(jnp.stack([x, 0.5 * x, -x]) if i in which else x for i, x in enumerate(args))
    axes = tuple(0 if i in which else None for i in range(4))
    check(f, args)
    got, want = (quick_jit(jax.vmap(lambda *a, f=g: gradient(f, a), axes))(*stacked) for g in (aicf_jax.fuse(f), f))
    assert_same(got, want, roundings=ROUNDINGS)


def test_gradient_of_vmap():
    def run(f, args):
        return gradient(lambda q, k, v: jax.vmap(lambda x: f(x, k, v))(jnp.stack([q, 2 * q])), args)

    check(attention(), operands(), run)


def test_second_derivative_with_bias():
    """The derivative of the row maximum was 0/0 where x was rounded differently beside it."""
    check(attention(lambda s, b: s + b), (*operands(37, 41), normal(9, H, 37, 41)), second, roundings=4 * ROUNDINGS)


def test_hessian():
    """At the maximum of a row, x = min(x, m) has the derivative of x, not half of it."""
    q, k, v = (x[:1, :1, :9] for x in operands())
    f = attention()
    fused = aicf_jax.fuse(f)
    got, want = (quick_jit(jax.hessian(lambda x, f=g: scalar(f)(x, k, v)))(q) for g in (fused, f))
    assert_same(got, want, roundings=2 * ROUNDINGS)


@pytest.mark.parametrize("fill", [-1e9, -np.inf])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where", [0, 1, 2], ids=["q", "k", "v"])
def test_not_finite_in_hidden_blocks(where, value, fill):
    """0 times NaN is NaN: blocks that the mask hides count where something is not finite."""
    args = list(operands())
    args[where] = args[where].at[0, 1, 2 if where == 0 else -2, 1].set(value)
    check(attention(causal(fill)), tuple(args))


@pytest.mark.parametrize("size", [1e9, 1e15])
@pytest.mark.parametrize("scores", [lambda s: s, causal(-np.inf)], ids=["all", "causal"])
def test_huge_scores(scores, size):
    """exp(fma(s, scale, -m)) overflows, or is zero everywhere, where exp(round(s scale) - m) is 1."""
    q, k, v = operands()
    check(attention(scores), (q * size, k * size, v), run=lambda f, args: f(*args))


@pytest.mark.parametrize("fill", [-1e9, float(np.finfo(np.float32).min)])
def test_additive_mask_of_two_numbers(fill):
    """`where(i >= j, 0, fill)`: the inner call was emitted whole though a part of it was in the operation."""

    def mask(s):
        i, j = positions(s)
        return s + jnp.where(i >= j + 3, 0, fill)

    check(attention(mask), operands())


def test_choice_after_softmax():
    """`where(mask, softmax(where(mask, s, -inf)), 0)`: rows without elements are 0, not 0/0."""
    mask = jnp.asarray(np.tril(np.ones((Q, K), bool), -3))
    f = attention(lambda s, m: jnp.where(m, s, -jnp.inf), lambda p, m: jnp.where(m, p, 0))
    check(f, (*operands(), mask))


def test_choice_after_softmax_of_positions():
    def weights(p):
        i, j = positions(p)
        return jnp.where(i - 3 >= j, p, 0)

    check(attention(causal(-np.inf, -3), weights), operands())


@pytest.mark.parametrize("rate", [0.5, 0.98])
def test_dropout_in_rows_without_elements(rate):
    """NaN where something is kept, 0 where everything is dropped."""

    def weights(p, key):
        return jnp.where(jax.random.bernoulli(key, 1 - rate, p.shape), p / (1 - rate), 0)

    check(attention(causal(-np.inf, -9), weights), (*operands(), jax.random.key(0)), count=1)


@pytest.mark.parametrize("run", [gradient, second], ids=["first", "second"])
def test_where_softmax(run):
    def f(q, k, v, mask):
        return jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k), where=mask) @ v

    check(f, (*operands(), jnp.asarray(np.tril(np.ones((Q, K), bool), -3))), run, roundings=2 * ROUNDINGS)


def test_where_softmax_of_padding():
    """A mask of fewer dimensions than the scores stands beside the dimensions the equations say."""

    def f(q, k, v, mask):
        return jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k), where=mask[:, None, None]) @ v

    check(f, (*operands(B, K), jnp.asarray(np.arange(K) < np.array([[9], [4]]))))


@pytest.mark.parametrize("full", [True, False])
def test_where_softmax_batched_in_the_mask(full):
    def f(q, k, v, mask):
        mask = jnp.broadcast_to(mask, (B, H, Q, K)) if full else mask
        return jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k), where=mask) @ v

    mask = np.tril(np.ones((Q, K), bool))
    args = (*operands(), jnp.asarray(np.stack([mask, mask[::-1]])))

    def run(f, args):
        return gradient(lambda q, k, v, m: jax.vmap(lambda x: f(q, k, v, x))(m), args)

    fused = aicf_jax.fuse(f)
    got, want = (quick_jit(lambda *a, f=g: run(f, a))(*args) for g in (fused, f))
    assert_same(got, want, roundings=ROUNDINGS)


@pytest.mark.parametrize("shape", [(1, 1, 1, K), (H, 1, 1), (1, 1, 1, 1), (B, 1, 1, K), (K,)], ids=str)
def test_bias_gradient_stays_streamed(shape):
    """Summed over the batch and the queries: the kernel for the backward must take it, not leave it to XLA."""
    f, args = attention(lambda s, b: s + b), (*operands(), normal(9, *shape))
    op = next(x for x in _fused_ops(f, args))
    backward = derived.backward_program(op, tuple(range(4)))
    assert backward.op is not None and dict(backward.op.choices)["cpu"] == "streamed_attention_grad"


@pytest.mark.parametrize("scores", [lambda s: s, causal(-np.inf)], ids=["all", "causal"])
def test_one_array_as_queries_keys_and_values(scores):
    def f(x):
        return attention(scores)(x, x, x)

    x = operands()[0]
    check(f, (x,))
    op = next(x for x in _fused_ops(f, (x,)))
    backward = derived.backward_program(op, (0,))
    assert backward.op is not None and dict(backward.op.choices)["cpu"] == "streamed_attention_grad"


def test_inside_shard_map():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    f = jax.shard_map(attention(), mesh=mesh, in_specs=spec, out_specs=spec)
    args = operands()
    assert_same(jax.jit(aicf_jax.fuse(f))(*args), jax.jit(f)(*args), roundings=ROUNDINGS)
    # Its equations speak of the mesh's axes and cannot be looked at outside of it; shard_map(fuse(f)) has no limit.
    assert [r.code for r in aicf_jax.explain(f, *args).refusals] == ["untraceable"]
    inside = jax.shard_map(aicf_jax.fuse(attention()), mesh=mesh, in_specs=spec, out_specs=spec)
    assert_same(jax.jit(inside)(*args), jax.jit(f)(*args), roundings=ROUNDINGS)


def test_64_bit_mode():
    """Bounds of a stream that skips have the type of the loops around it; the kernel was left to XLA."""
    with jax.enable_x64(True):
        args = operands(dtype=jnp.float64)
        check(attention(causal(-np.inf)), args)
        q, k, v = (x[:1, :1, :9] for x in args)
        check_grads(aicf_jax.fuse(attention(causal(-1e9))), (q, k, v), order=2)


def test_softcap_gradient_stays_streamed():
    f, args = attention(lambda s: 5 * jnp.tanh(s / 5)), operands()
    check(f, args)
    (op,) = _fused_ops(f, args)
    backward = derived.backward_program(op, (0, 1, 2))
    assert backward.op is not None and dict(backward.op.choices)["cpu"] == "streamed_attention_grad"


def _fused_ops(f, args):
    jaxpr = jax.make_jaxpr(aicf_jax.fuse(f))(*args).jaxpr
    for eqn in jaxpr.eqns:
        if eqn.primitive is primitives.fused_p:
            yield eqn.params["op"]


# -- corners that hold ------------------------------------------------------------------------------------------

NOT_LINEAR = {
    "plus": lambda p: p + 1e-6,
    "squared": lambda p: p**2,
    "times itself": lambda p: p * p,
    "renormalized": lambda p: p / (p.sum(-1, keepdims=True) + 1e-6),
    "thresholded": lambda p: jnp.where(p > 0.02, p, 0),
    "floor": lambda p: jnp.maximum(p, 0.01),
    "log": jnp.log,
}


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_weights_that_are_not_linear(name):
    check(attention(weights=NOT_LINEAR[name]), operands(), count=0)


@pytest.mark.parametrize("offset", [5, -5, -30])
@pytest.mark.parametrize("fill", [-100.0, -1e9, -1e30, float(np.finfo(np.float32).min), -np.inf])
def test_rows_without_elements(fill, offset):
    """Uniform for a finite fill, NaN for -inf; skipped blocks count where a row has nothing else."""
    check(attention(causal(fill, offset)), operands())


@pytest.mark.parametrize("partitionable", [True, False])
def test_random_bits_follow_the_flag(partitionable):
    def weights(p, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, p.shape), p, 0)

    f = attention(weights=weights)
    fused, args = aicf_jax.fuse(f), (*operands(), jax.random.key(1))
    for flag in (partitionable, not partitionable):
        with jax.threefry_partitionable(flag):
            assert_same(fused(*args), f(*args), roundings=ROUNDINGS)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("which", [(0,), (0, 1), (2,), (0, 1, 2)], ids=["q", "qk", "v", "all"])
def test_mixed_precision(which, dtype):
    args = tuple(x.astype(dtype) if i in which else x for i, x in enumerate(operands()))
    check(attention(), args, dtype=dtype)


def exponentials(x):
    return jnp.exp(x - stop_gradient(jnp.max(x, -1, keepdims=True)))


def row_sum(x):
    return jnp.sum(x, -1, keepdims=True)


#: Weights whose gradient is not that of a softmax.
HELD = {
    "log-sum-exp": lambda x: jnp.exp(x - stop_gradient(jax.nn.logsumexp(x, -1, keepdims=True))),
    "sum": lambda x: exponentials(x) / stop_gradient(row_sum(exponentials(x))),
    "exponentials": lambda x: stop_gradient(exponentials(x)) / row_sum(exponentials(x)),
    "one of two maxima": lambda x: jnp.exp(
        x - stop_gradient(jnp.max(x, -1, keepdims=True)) - jnp.log(row_sum(jnp.exp(x - jnp.max(x, -1, keepdims=True))))
    ),
    "weights": lambda x: stop_gradient(jax.nn.softmax(x)),
}


@pytest.mark.parametrize("name", HELD)
def test_what_is_behind_stop_gradient_is_not_differentiated(name):
    def f(q, k, v):
        return HELD[name](q @ k.T) @ v

    q, k, v = (jnp.asarray(np.random.default_rng(i).standard_normal((12, 4)), jnp.float32) for i in range(3))
    assert aicf_jax.explain(f, q, k, v).count("attention") == 0

    def run(g):
        return jax.grad(lambda *a: jnp.sum(g(*a) ** 2), (0, 1, 2))(q, k, v)

    found, want = run(aicf_jax.fuse(f)), run(f)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=256 * 2.0**-24 * max(1.0, float(jnp.max(jnp.abs(b)))))
