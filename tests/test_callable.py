"""A fused function is called, inspected, composed and copied like the function itself."""

import functools
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import aicf_jax
from tests.calls import ROUNDINGS, B, K, W, X, check, net
from tests.support import assert_same, normal

# -- metadata -----------------------------------------------------------------------------------------------------


def test_name_doc_module_and_signature():
    fused = aicf_jax.fuse(net)
    for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
        assert getattr(fused, attribute) == getattr(net, attribute)
    assert inspect.signature(fused) == inspect.signature(net)
    assert inspect.unwrap(fused) is net
    assert callable(fused) and "net" in repr(fused)


def test_metadata_of_callables_that_have_none():
    class Callable:
        def __call__(self, x):
            return jax.nn.relu(x @ W)

    check(Callable(), X)
    check(functools.partial(net, act="silu"), X, W)
    assert inspect.signature(aicf_jax.fuse(functools.partial(net, X))) == inspect.signature(functools.partial(net, X))


# -- ways to pass arguments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args, kwargs",
    [
        ((X, W), {}),
        ((X, W, B), {}),
        ((X, W, None), {}),
        ((X,), {"w": W, "b": B}),
        ((), {"b": B, "w": W, "x": X}),
        ((X, W), {"act": "silu"}),
        ((X, W, B), {"act": "relu", "scale": 2.5}),
        ((X, W, B), {"scale": B}),
    ],
)
def test_positional_keyword_and_default_arguments(args, kwargs):
    check(net, *args, **kwargs)


def test_gradient_with_respect_to_a_keyword_argument():
    def gradient(f):
        return jax.grad(lambda w: f(X, w=w, b=B, act="silu").sum())(W)

    assert_same(gradient(aicf_jax.fuse(net)), gradient(net), roundings=ROUNDINGS)


def test_varargs_and_varkwargs():
    def f(*xs, **named):
        return jax.nn.relu(sum(xs[1:], xs[0]) @ W) + sum(named[k] for k in sorted(named))

    check(f, X)
    check(f, X, X, X, a=1.0, b=X @ W)


def test_positional_only_and_shadowing_names():
    """Names that a wrapper might want for itself are the user's."""

    def f(target, /, policy, *, patterns, kernels, self=1.0, args=2.0, kwargs=3.0):
        return jax.nn.silu(target @ policy + patterns) * kernels * self * args * kwargs

    check(f, X, W, patterns=B, kernels=2.0)
    check(f, X, policy=W, patterns=B, kernels=2.0, self=0.5, args=0.25, kwargs=4.0)


def test_pytrees_with_none_and_empty_containers():
    def f(params, batch):
        h = batch["x"]
        for layer in params["layers"]:
            h = h @ layer["w"]
            h = jax.nn.gelu(h if layer["b"] is None else h + layer["b"])
        return {"h": h, "aux": (None, [], {"x": batch["x"]}), "mask": batch["mask"]}

    check(f, {"layers": [{"w": W, "b": B}, {"w": W, "b": None}]}, {"x": X, "mask": None})


def test_outputs_that_are_not_arrays():
    def f(x, w, b):
        return {
            "out": jax.nn.relu(x @ w + b),
            "name": "dense",
            "width": w.shape[1],
            "flag": True,
            "half": 0.5,
            "nothing": None,
            "input": x,
            "numpy": np.arange(3),
            "complex": 1j,
        }

    got, want = aicf_jax.fuse(f)(X, W, B), f(X, W, B)
    assert_same(got, want, roundings=ROUNDINGS)
    assert type(got["numpy"]) is np.ndarray


# -- wrong use ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [3, "x", None, X, [net], {"f": net}], ids=lambda t: type(t).__name__)
def test_what_is_not_callable_is_refused_by_the_name_of_the_argument(target):
    with pytest.raises(TypeError, match="target"):
        aicf_jax.fuse(target)


@pytest.mark.parametrize(
    "args, kwargs",
    [
        ((X,), {}),
        ((X, W, B, B), {}),
        ((X, W), {"c": B}),
        ((X, W, B), {"b": B}),
        ((X, normal(1, K + 1, K)), {}),
        ((X, W, normal(1, K + 1)), {}),
        ((X, "text"), {}),
        ((X, None), {}),
        ((X, W), {"act": "no_such_activation"}),
    ],
    ids=[
        "missing",
        "too many",
        "unknown name",
        "twice",
        "shapes of the product",
        "shape of the bias",
        "string",
        "None",
        "user's lookup",
    ],
)
def test_the_exception_is_the_unfused_one(args, kwargs):
    with pytest.raises(Exception) as unfused:
        net(*args, **kwargs)
    with pytest.raises(type(unfused.value)) as fused:
        aicf_jax.fuse(net)(*args, **kwargs)
    sizes = {word for word in str(unfused.value).replace("(", " ").replace(",", " ").split() if word.isdigit()}
    assert all(size in str(fused.value) for size in sizes), "the message does not name the sizes that clash"


def test_an_exception_of_the_user_passes_through_unchanged():
    class Mine(Exception):
        pass

    def f(x):
        if x.ndim == 2:
            raise Mine("rank two", x.shape)
        return x

    fused = aicf_jax.fuse(f)
    with pytest.raises(Mine) as error:
        fused(X)
    assert error.value.args == ("rank two", X.shape)
    assert_same(fused(B), B, roundings=0)  # and the fused function works after a failure


def test_the_traceback_contains_the_users_frame():
    def marker_function(x):
        return x @ normal(1, K + 1, K)

    with pytest.raises(TypeError) as error:
        aicf_jax.fuse(marker_function)(X)
    assert "marker_function" in [entry.name for entry in error.traceback]


def test_a_branch_on_the_value_of_an_array_is_never_the_wrong_one():
    """Eager unfused code may do that. A fused one follows it or raises what jax raises under jit."""

    def f(x):
        return jax.nn.relu(x @ W) if x.sum() > 0 else jax.nn.gelu(x @ W)

    for x in (jnp.abs(X), -jnp.abs(X)):
        try:
            got = aicf_jax.fuse(f)(x)
        except jax.errors.ConcretizationTypeError:
            continue
        assert_same(got, f(x), roundings=ROUNDINGS)


def module_level(x):
    return jax.nn.relu(x @ x.T)


def test_pickling_keeps_function_and_policy():
    policy = aicf_jax.Policy(deterministic=True)
    again = pickle.loads(pickle.dumps(aicf_jax.fuse(module_level, policy=policy)))
    assert again.context.policy == policy
    np.testing.assert_allclose(again(np.eye(3)), np.eye(3))


class Scale(nn.Module):
    factor: float = 2.0

    def __call__(self, x):
        return jax.nn.relu(x @ x.T) * self.factor


def test_pickling_fused_modules():
    again = pickle.loads(pickle.dumps(aicf_jax.fuse(Scale(3.0))))
    np.testing.assert_allclose(again.apply({}, np.eye(3)), 3 * np.eye(3))


def test_a_function_that_raises_runs_once():
    calls = []

    def f(x, scale):
        calls.append(scale)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        aicf_jax.fuse(f)(jnp.ones(3), 2.0)
    assert len(calls) == 1
