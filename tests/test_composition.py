"""Fused functions as decorators, as methods, inside each other, copied, and under jax's debugging switches."""

import copy
import functools
import inspect

import jax
import jax.numpy as jnp
import pytest

import aicf_jax
from tests.calls import ROUNDINGS, B, K, W, X, check, net
from tests.support import assert_same, dense


def test_decorator_of_a_function_of_jit_and_under_jit():
    @aicf_jax.fuse
    def plain(x, w, b):
        return jax.nn.silu(x @ w + b)

    @jax.jit
    @aicf_jax.fuse
    def outside(x, w, b):
        return jax.nn.silu(x @ w + b)

    @aicf_jax.fuse
    @jax.jit
    def inside(x, w, b):
        return jax.nn.silu(x @ w + b)

    for f in (plain, outside, inside):
        assert_same(f(X, W, B), dense("silu")(X, W, B), roundings=ROUNDINGS)


def test_decorator_with_options():
    fused = functools.partial(aicf_jax.fuse, policy=aicf_jax.Policy(numerics="bitwise"))(net)
    assert_same(fused(X, W, B), net(X, W, B), roundings=ROUNDINGS)


class Layer:
    """`fuse` on a method, a class method and a static method."""

    factor = 2.0

    def __init__(self, w):
        self.w = w

    @aicf_jax.fuse
    def method(self, x, *, act="relu"):
        """Doc of method."""
        return getattr(jax.nn, act)(x @ self.w + B)

    @classmethod
    @aicf_jax.fuse
    def of_class(cls, x):
        return jax.nn.gelu(x @ W) * cls.factor

    @staticmethod
    @aicf_jax.fuse
    def static(x):
        return jax.nn.gelu(x @ W + B)


def test_method_decorator():
    one, two = Layer(W), Layer(2 * W)
    for layer in (one, two, one):
        assert_same(layer.method(X, act="silu"), jax.nn.silu(X @ layer.w + B), roundings=ROUNDINGS)
    one.w = 3 * W
    assert_same(one.method(X), jax.nn.relu(X @ one.w + B), roundings=ROUNDINGS)
    assert_same(Layer.method(two, X), jax.nn.relu(X @ two.w + B), roundings=ROUNDINGS)
    assert_same(Layer.of_class(X), jax.nn.gelu(X @ W) * 2.0, roundings=ROUNDINGS)
    assert_same(Layer.static(X), jax.nn.gelu(X @ W + B), roundings=ROUNDINGS)
    assert one.method.__doc__ == "Doc of method." and list(inspect.signature(one.method).parameters) == ["x", "act"]


def test_bound_methods_partials_and_callable_objects():
    class Callable:
        def __init__(self, w):
            self.w = w

        def run(self, x, b):
            return jax.nn.relu(x @ self.w + b)

        def __call__(self, x):
            return self.run(x, B)

    target = Callable(W)
    check(target.run, X, B)
    check(target, X)
    check(functools.partial(net, X, act="silu"), W, b=B)
    check(functools.partial(functools.partial(net, act="silu"), X), W)
    fused = aicf_jax.fuse(target)
    target.w = 2 * W
    assert_same(fused(X), target(X), roundings=ROUNDINGS)


def test_copies():
    fused = aicf_jax.fuse(net)
    for other in (copy.copy(fused), copy.deepcopy(fused)):
        assert_same(other(X, W, B), net(X, W, B), roundings=ROUNDINGS)


def test_fusing_twice_and_fusing_a_function_that_calls_a_fused_one():
    check(aicf_jax.fuse(net), X, W, B)
    inner = aicf_jax.fuse(net)
    outer = aicf_jax.fuse(lambda x, w, b: jax.nn.relu(inner(x, w, b) @ w + b))
    want = lambda x, w, b: jax.nn.relu(net(x, w, b) @ w + b)  # noqa: E731
    assert_same(outer(X, W, B), want(X, W, B), roundings=ROUNDINGS)
    gradient = lambda f: jax.grad(lambda w: f(X, w, B).sum())(W)  # noqa: E731
    assert_same(gradient(outer), gradient(want), roundings=2 * ROUNDINGS)
    twice = aicf_jax.explain(aicf_jax.fuse(aicf_jax.fuse(net)), X, W, B).count("gemm_epilogue")
    assert twice == aicf_jax.explain(net, X, W, B).count("gemm_epilogue")


def test_lowering_and_eval_shape():
    compiled = jax.jit(aicf_jax.fuse(net), static_argnames="act").lower(X, W, B, act="silu").compile()
    assert_same(compiled(X, W, B), net(X, W, B, act="silu"), roundings=ROUNDINGS)
    spec = jax.ShapeDtypeStruct(X.shape, jnp.bfloat16)
    assert jax.eval_shape(aicf_jax.fuse(net), spec, W, B) == jax.eval_shape(net, spec, W, B)


# -- jax's own switches -------------------------------------------------------------------------------------------


def test_debug_nans_finds_the_nan_and_raises_no_false_alarm():
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError):
            aicf_jax.fuse(lambda x: jax.nn.relu(jnp.log(x) @ W + B))(-jnp.ones((2, K)))
        check(dense("softplus"), X, W, B)


def test_disable_jit():
    with jax.disable_jit():
        check(net, X, W, B)
        gradient = lambda f: jax.grad(lambda w: f(X, w, B).sum())(W)  # noqa: E731
        assert_same(gradient(aicf_jax.fuse(net)), gradient(net), roundings=ROUNDINGS)


def test_checking_leaks():
    with jax.checking_leaks():
        f = lambda w: aicf_jax.fuse(lambda x: jax.nn.relu(x @ w + B))(X).sum()  # noqa: E731
        got = jax.jit(jax.grad(f))(W)
    assert_same(got, jax.grad(lambda w: jax.nn.relu(X @ w + B).sum())(W), roundings=ROUNDINGS)


def test_strict_promotion_and_rank_promotion():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        f = lambda x, w, b: jax.nn.gelu(x @ w + b[None])  # noqa: E731
        check(f, X, W, B)
        gradient = lambda g: jax.grad(lambda w: g(X, w, B).sum())(W)  # noqa: E731
        assert_same(gradient(aicf_jax.fuse(f)), gradient(f), roundings=ROUNDINGS)
