"""Never stale, never twice: what a fused function remembers between calls, and what it must not."""

import concurrent.futures
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aicf_jax
from tests.support import ACTIVATION_ROUNDINGS, assert_same, dense, dense_args, normal

K = 8
# tolerance of every comparison: unit roundoff x (products of at most 8 terms + activation), forward and backward
ROUNDINGS = 2 * (K + ACTIVATION_ROUNDINGS)
X, W, B = dense_args(m=5, k=K, n=K)


def counted(f):
    calls = []

    def run(*args, **kwargs):
        calls.append(args)
        return f(*args, **kwargs)

    return run, calls


# -- never stale --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first, second",
    [
        (1.0, 3.0),
        (1, 2),
        (True, False),
        (B, 2 * B),
        (np.asarray(B), 2 * np.asarray(B)),
        (1.0, B),
        (1, 1.0),
        (0.0, -0.0),
    ],
    ids=["float", "int", "bool", "array", "numpy", "float then array", "int then equal float", "sign of zero"],
)
def test_a_changed_closed_over_value_is_seen(first, second):
    box = {"value": first}
    f = lambda x: jax.nn.gelu(x @ W + B) * box["value"]  # noqa: E731
    fused = aicf_jax.fuse(f)
    for value in (first, second, first):
        box["value"] = value
        got = fused(X)
        assert_same(got, f(X), roundings=ROUNDINGS)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(f(X)))


def test_a_changed_closed_over_weight_is_seen_also_in_gradients():
    layer = {"w": W}
    f = lambda x: jax.nn.relu(x @ layer["w"] + B)  # noqa: E731
    fused = aicf_jax.fuse(f)
    gradient = lambda g: jax.grad(lambda x: g(x).sum())(X)  # noqa: E731
    for w in (W, 3 * W, -W):
        layer["w"] = w
        assert_same(fused(X), f(X), roundings=ROUNDINGS)
        assert_same(gradient(fused), gradient(f), roundings=ROUNDINGS)


def test_a_numpy_array_changed_in_place_is_seen():
    w = np.array(W)
    f = lambda x: jax.nn.relu(x @ w + B)  # noqa: E731
    fused = aicf_jax.fuse(f)
    fused(X)
    w *= 2.0
    assert_same(fused(X), f(X), roundings=ROUNDINGS)


def test_a_rebound_global_function_and_attribute_is_seen():
    class Config:
        activation = staticmethod(jax.nn.relu)

    f = lambda x: Config.activation(x @ W + B)  # noqa: E731
    fused = aicf_jax.fuse(f)
    for activation in (jax.nn.relu, jax.nn.silu, jax.nn.relu):
        Config.activation = staticmethod(activation)
        assert_same(fused(X), f(X), roundings=ROUNDINGS)


def test_equal_static_values_of_different_type_do_not_share_a_program():
    """1, 1.0 and True are equal and hash alike; the result types differ."""
    f = lambda x, k: x * k  # noqa: E731
    fused, x = aicf_jax.fuse(f), jnp.arange(3)
    for k in (1, 1.0, True, 1, True, 1.0, 0.0, -0.0):
        assert_same(fused(x, k), f(x, k))


def test_shapes_dtypes_and_weak_types_do_not_share_a_program():
    f = dense("silu")
    fused = aicf_jax.fuse(f)
    calls = [
        (X, W, B),
        (X[:2], W, B),
        (X[0], W, B),
        (X, W, B[0]),
        (X, W, 1.0),
        (X, W, jnp.asarray(1.0)),
        (X.astype(jnp.bfloat16), W.astype(jnp.bfloat16), 1.0),
        (X, W, B),
    ]
    for args in calls:
        assert_same(fused(*args), f(*args), roundings=ROUNDINGS)


def test_the_matmul_precision_and_x64_contexts_do_not_share_a_program():
    fused = aicf_jax.fuse(dense("tanh"))
    assert fused(X, W, B).dtype == jnp.float32
    with jax.enable_x64(True):
        args = dense_args(m=5, k=K, n=K, dtype=jnp.float64)
        assert_same(fused(*args), dense("tanh")(*args), roundings=ROUNDINGS)

    def lowered():
        return jax.jit(lambda *a: fused(*a)).lower(X, W, B).as_text()

    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in lowered()
    assert "HIGHEST" not in lowered()


# -- never twice --------------------------------------------------------------------------------------------------


def test_user_code_runs_at_most_once_for_each_eager_call():
    f, calls = counted(dense("gelu_exact"))
    fused = aicf_jax.fuse(f)
    for i in range(1, 6):
        fused(X + i, W, B)
        assert len(calls) <= i


def test_user_code_runs_at_most_once_for_each_eager_gradient():
    f, calls = counted(dense("silu"))
    fused = aicf_jax.fuse(f)
    for i in range(1, 4):
        jax.grad(lambda w: fused(X, w, B).sum())(W)
        assert len(calls) <= i


def test_jit_of_a_fused_function_is_traced_once_per_signature():
    f, calls = counted(dense("gelu_tanh"))
    compiled = jax.jit(aicf_jax.fuse(f))
    for i in range(4):
        compiled(X + i, W, B)
    compiled(*[np.asarray(a) for a in (X, W, B)])
    assert len(calls) == 1
    compiled(X[:3], W, B)
    assert len(calls) == 2


def test_fusing_again_inside_a_loop_does_not_compile_again():
    """A lambda fused in each iteration is a new object with the same program."""

    def call(scale):
        return aicf_jax.fuse(lambda x: jax.nn.relu(x @ W + B) * scale)(X)

    call(jnp.float32(1.0))
    compilations = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compilations.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for scale in (2.0, 3.0):
            call(jnp.float32(scale))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compilations


# -- nothing is kept alive ----------------------------------------------------------------------------------------


def large():
    return jnp.asarray(np.random.default_rng(0).standard_normal((K, K)).astype(np.float32)) + 0


def use(f):
    f(X)
    jax.grad(lambda x: f(x).sum())(X)


def collected(reference):
    gc.collect()
    return reference() is None


def test_a_closed_over_array_dies_with_the_function():
    def build(w):
        return aicf_jax.fuse(lambda x: jax.nn.gelu(x @ w + B)), weakref.ref(w)

    fused, reference = build(large())
    use(fused)
    del fused
    assert collected(reference)


def test_a_replaced_closed_over_array_dies_although_the_fused_function_lives():
    box = {"w": large()}
    reference = weakref.ref(box["w"])
    fused = aicf_jax.fuse(lambda x: jax.nn.gelu(x @ box["w"] + B))
    use(fused)
    box["w"] = 2 * W
    fused(X)
    assert collected(reference)


def test_arguments_and_results_are_not_kept():
    fused = aicf_jax.fuse(dense("relu"))
    argument = large()
    result = fused(X, argument, B)
    references = weakref.ref(argument), weakref.ref(result)
    del argument, result
    assert all(collected(r) for r in references)


def test_a_model_captured_by_a_fused_method_dies():
    class Model:
        def __init__(self):
            self.w = large()

        def __call__(self, x):
            return jax.nn.silu(x @ self.w)

    model = Model()
    references = weakref.ref(model), weakref.ref(model.w)
    fused = aicf_jax.fuse(model)
    fused(X)
    del model, fused
    assert all(collected(r) for r in references)


def test_no_tracer_is_kept_by_a_fused_function_used_at_several_levels():
    f = dense("gelu_exact")
    fused = aicf_jax.fuse(f)
    want = f(X, W, B)
    for _ in range(2):
        assert_same(fused(X, W, B), want, roundings=ROUNDINGS)
        assert_same(jax.jit(fused)(X, W, B), want, roundings=ROUNDINGS)
        assert_same(jax.vmap(fused, (0, None, None))(X, W, B), want, roundings=ROUNDINGS)
        jax.grad(lambda w: jax.vmap(fused, (0, None, None))(X, w, B).sum())(W)


# -- threads ------------------------------------------------------------------------------------------------------


def test_threads_share_a_fused_function():
    f = dense("silu")
    fused = aicf_jax.fuse(f)
    start = threading.Barrier(4)

    def work(i):
        if i < 4:
            start.wait()  # the first four meet the empty cache together
        x = X[: 1 + i % 3] + i
        return fused(x, W, B), jax.grad(lambda w: fused(x, w, B).sum())(W)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(12)))
    for i, got in enumerate(results):
        x = X[: 1 + i % 3] + i
        want = f(x, W, B), jax.grad(lambda w, x=x: f(x, w, B).sum())(W)
        assert_same(got, want, roundings=ROUNDINGS)


def test_threads_fuse_and_call_at_once():
    """Each thread has its own closed-over value; none sees another's."""

    def work(i):
        scale = normal(i, K)
        return aicf_jax.fuse(lambda x: jax.nn.relu(x @ W + B) * scale)(X), jax.nn.relu(X @ W + B) * scale

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for got, want in pool.map(work, range(12)):
            assert_same(got, want, roundings=ROUNDINGS)
