"""What a fused function may be given.

Arrays and NumPy values are traced; strings, None, booleans, integers, dtypes, callables, enums and configuration
objects are static; Python floats are traced unless their value is needed.
"""

import dataclasses
import enum

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aicf_jax
from tests.support import ACTIVATION_ROUNDINGS, assert_same, dense_args

K = 8
# tolerance of every comparison: unit roundoff x (one product of 8 terms with an activation), forward and backward
ROUNDINGS = 2 * (K + ACTIVATION_ROUNDINGS)
X, W, B = dense_args(m=6, k=K, n=K)


class Mode(enum.Enum):
    DOUBLE = 2
    TRIPLE = 3


@dataclasses.dataclass
class Config:
    """Not frozen, so not hashable."""

    act: str = "gelu"
    axes: list = dataclasses.field(default_factory=lambda: [-1])


def check_each(f, *calls, roundings=ROUNDINGS):
    """One fused function, called in turn with each, and with the first again."""
    fused = aicf_jax.fuse(f)
    for args in (*calls, calls[0]):
        assert_same(fused(X, *args), f(X, *args), roundings=roundings)


def test_strings_and_none():
    def f(x, act, extra=None):
        y = getattr(jax.nn, act)(x @ W + B)
        return y if extra is None else y + extra

    check_each(f, ("relu",), ("silu",), ("silu", None), ("gelu", 1.0), ("gelu", B))


def test_booleans_and_integers_decide_branches_and_shapes():
    def f(x, train, groups):
        x = x.reshape(groups, -1, K)
        return jax.nn.relu(x @ W + B) if train else jax.nn.gelu(x @ W + B).sum(axis=groups % 2)

    check_each(f, (True, 1), (False, 1), (True, 2), (False, 3))


def test_dtypes_callables_and_enums():
    def f(x, act, mode, dtype):
        return (act(x @ W + B) * (2 if mode is Mode.DOUBLE else 3)).astype(dtype)

    # tolerance: the output rounded to a low precision
    check_each(
        f,
        (jax.nn.relu, Mode.DOUBLE, jnp.float32),
        (jnp.tanh, Mode.TRIPLE, "bfloat16"),
        (jax.nn.gelu, Mode.TRIPLE, np.dtype("float16")),
        (lambda z: z * 2, Mode.DOUBLE, jnp.bfloat16),
    )


def test_tuples_slices_ranges_and_types():
    def f(x, axes, window, rows, kind):
        h = jax.nn.silu(x[window] @ W + B)
        return h.sum(axes) if kind is tuple else h[jnp.asarray(list(rows))]

    check_each(f, ((0, 1), slice(1, 4), range(2), tuple), ((0,), slice(None, None, 2), range(1), list))


def test_an_unhashable_configuration_changed_in_place_is_seen():
    def f(x, config, options):
        return getattr(jax.nn, config.act)(x @ W).sum(tuple(config.axes)) * options["scale"]

    fused, config, options = aicf_jax.fuse(f), Config(), {"scale": 2.0, "names": ["a", "b"]}
    assert_same(fused(X, config, options), f(X, config, options), roundings=ROUNDINGS)
    config.act, config.axes, options["scale"] = "relu", [0], 5.0
    assert_same(fused(X, config, options), f(X, config, options), roundings=ROUNDINGS)
    config.axes.append(1)
    assert_same(fused(X, config, options), f(X, config, options), roundings=ROUNDINGS)


def test_a_configuration_that_holds_arrays():
    class Holder:
        def __init__(self, w):
            self.w = w

    def f(x, holder):
        return jax.nn.gelu(x @ holder.w + B)

    fused, holder = aicf_jax.fuse(f), Holder(W)
    for w in (W, 2 * W):
        holder.w = w
        assert_same(fused(X, holder), f(X, holder), roundings=ROUNDINGS)
    gradient = lambda g: jax.grad(lambda w: g(X, Holder(w)).sum())(W)  # noqa: E731
    assert_same(gradient(fused), gradient(f), roundings=ROUNDINGS)


def test_python_floats_are_weakly_typed():
    """A strongly typed 2.0 would widen bfloat16 to float32."""

    def f(x, s):
        return jax.nn.relu(x.astype(jnp.bfloat16) @ W.astype(jnp.bfloat16) * s + s)

    # tolerance: three bfloat16 roundings. assert_same takes the roundoff of the output's dtype, and a strongly typed
    # float32 scalar makes that float32 while the product before it is still a bfloat16 one: 2^16 float32 roundings.
    check_each(f, (2.0,), (2,), (True,), (jnp.asarray(2.0),))
    check_each(f, (np.float32(2.0),), (jnp.float32(2.0),), roundings=ROUNDINGS * 2**16)


def test_python_floats_do_not_compile_again():
    traces = []

    @jax.jit
    def inner(x, s):
        traces.append(s)
        return jax.nn.silu(x @ W + B) * s

    fused = aicf_jax.fuse(lambda x, s: inner(x, s))
    for s in (0.5, 1.5, 2.5):
        assert_same(fused(X, s), jax.nn.silu(X @ W + B) * s, roundings=ROUNDINGS)
    assert len(traces) == 1


def test_python_floats_may_decide_a_branch():
    def f(x, rate):
        return jax.nn.relu(x @ W + B) * rate if rate > 0.5 else jax.nn.gelu(x @ W + B) - rate

    check_each(f, (0.75,), (0.25,), (0.5,), (float("nan"),), (float("inf"),))


def test_python_floats_may_be_formatted_rounded_and_used_as_keys():
    def f(x, rate):
        table = {0.25: jax.nn.relu, 0.75: jax.nn.gelu}
        return {"y": table[rate](x @ W + B), "n": int(rate * 8), "text": f"{rate:.1f}"}

    check_each(f, (0.25,), (0.75,))


def test_gradient_with_respect_to_a_python_float():
    def f(x, s):
        return jax.nn.silu(x @ W * s + B).sum()

    gradient = jax.grad(aicf_jax.fuse(f), argnums=1)
    assert_same(gradient(X, 0.5), jax.grad(f, argnums=1)(X, 0.5), roundings=ROUNDINGS)


@pytest.mark.parametrize(
    "s",
    [
        np.float32(2),
        np.float64(3),
        np.int64(2),
        np.bool_(True),
        np.asarray(2.0),
        2,
        2.0,
        np.arange(K, dtype=np.float32),
        np.arange(K, dtype=np.int16),
    ],
    ids=repr,
)
def test_numpy_arguments(s):
    def f(x, s, rows):
        return jax.nn.relu(x[rows] @ W) * s

    args = np.asarray(X), s, np.asarray([0, 2])
    # numpy indexes numpy; the product with a jax array is jax's
    assert_same(aicf_jax.fuse(f)(*args), f(*args), roundings=ROUNDINGS)


def test_numpy_in_numpy_out_operations_of_the_user_still_work():
    """Host computation on a static value, next to device computation."""

    def f(x, widths):
        mask = np.zeros(K, np.float32)
        mask[list(widths)] = 1.0
        return jax.nn.gelu(x @ W + B) * mask

    check_each(f, ((0, 2),), ((1,),))


def test_random_keys():
    def f(x, key):
        h = jax.nn.gelu(x @ W + B)
        return jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h, 0.0), jax.random.split(key)

    check_each(f, (jax.random.key(0),), (jax.random.key(1),))
    check_each(f, (jax.random.PRNGKey(0),))
