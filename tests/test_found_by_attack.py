"""Programs that once broke `fuse`, each the smallest of its kind."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.experimental import checkify
from jax.experimental.jet import jet

import aicf_jax
from aicf_jax import FuseError, fuse
from aicf_jax.kernels import ANY, Kernel

X = jnp.arange(12.0).reshape(3, 4) / 10
W, B = jnp.full((4, 5), 0.3), jnp.arange(5.0)
PLAIN_AND_FUSED = pytest.mark.parametrize("wrap", [lambda f: f, fuse], ids=["plain", "fused"])


def dense(x):
    return jnp.tanh(x @ W + B)


class TestRulesThatReadState:
    @PLAIN_AND_FUSED
    def test_in_a_container_of_each_call(self, wrap):
        def make():
            state = {}

            @jax.custom_vjp
            def tap(x):
                return x * 1.0

            tap.defvjp(lambda x: (x, None), lambda _, g: (g * state["scale"],))
            return state, wrap(lambda x: tap(x).sum())

        found = []
        for scale in (1.0, 7.0):
            state, f = make()
            state["scale"] = scale
            found.append(float(jax.grad(f)(jnp.ones(3))[0]))
        assert found == [1.0, 7.0]

    @PLAIN_AND_FUSED
    def test_in_an_attribute(self, wrap):
        class State:
            k = 2.0

        state = State()

        @jax.custom_jvp
        def g(x):
            return x * 1.0

        g.defjvp(lambda p, t: (g(p[0]), t[0] * state.k))
        f, found = wrap(lambda x: g(x).sum()), []
        for k in (2.0, 3.0):
            state.k = k
            found.append(float(jax.grad(f)(X)[0, 0]))
        assert found == [2.0, 3.0]

    @PLAIN_AND_FUSED
    def test_minus_zero_is_not_zero(self, wrap):
        def make(s):
            @jax.custom_jvp
            def g(x):
                return x * 1.0

            g.defjvp(lambda p, t: (g(p[0]), t[0] * float(np.copysign(1, s))))
            return wrap(lambda x: g(x).sum())

        assert [float(jax.grad(make(s))(X)[0, 0]) for s in (0.0, -0.0)] == [1.0, -1.0]

    @PLAIN_AND_FUSED
    def test_closed_over_arrays_do_not_outlive_the_call(self, wrap):
        def run():
            big = jnp.ones(10**5)

            @jax.custom_vjp
            def g(x):
                return x * 1

            g.defvjp(lambda x: (x * 1, None), lambda r, t: (t * big[0],))
            jax.grad(wrap(lambda x: g(x).sum()))(jnp.ones(3))
            return weakref.ref(big)

        references = [run() for _ in range(2)]
        gc.collect()
        assert [r() for r in references] == [None, None]


class TestOtherInterpreters:
    @pytest.mark.parametrize("wrap", [fuse, lambda f: jax.jit(fuse(f)), lambda f: jax.grad(lambda x: fuse(f)(x).sum())])
    def test_checkify_looks_inside(self, wrap):
        x = X.at[0, 0].set(jnp.inf).at[0, 1].set(-jnp.inf)
        error, _ = checkify.checkify(wrap(dense), errors=checkify.float_checks)(x)
        assert "dot_general" in error.get()

    def test_linear_transpose(self):
        f = lambda x, b: x @ W + b  # noqa: E731
        got, want = (jax.linear_transpose(g, X, B)(jnp.ones((3, 5))) for g in (fuse(f), f))
        jax.tree.map(np.testing.assert_array_equal, got, want)

    def test_taylor_mode(self):
        series = ((jnp.ones_like(X), jnp.zeros_like(X)),)
        got, want = jet(fuse(dense), (X,), series), jet(dense, (X,), series)
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5), got, want)

    def test_mutable_references(self):
        def total(wrap):
            ref = jax.new_ref(jnp.zeros(()))

            def f(x):
                ref[...] += dense(x).sum()
                return ref[...] * 1

            return float(wrap(f)(X)), float(ref[...])

        want = total(lambda f: f)
        np.testing.assert_allclose(total(fuse), want, rtol=1e-5)
        np.testing.assert_allclose(total(lambda f: jax.jit(fuse(f))), want, rtol=1e-5)


class TestPlacement:
    def test_device_put_inside_keeps_its_device(self):
        target = jax.devices()[1]
        f = lambda x: jax.device_put(x * 2, target) + 1  # noqa: E731
        assert fuse(f)(X).devices() == f(X).devices() == {target}

    def test_chains_across_contexts_are_refused(self):
        from jax.experimental.xla_metadata import set_xla_metadata

        def f(x):
            with set_xla_metadata(tag="1"):
                z = x @ W
            return jnp.tanh(z + B)

        report = aicf_jax.explain(f, X)
        assert report.count("gemm_epilogue") == 0
        assert [r.code for r in report.refusals] == ["context"]


class TestResultsThatHideArrays:
    def test_objects_run_unfused(self):
        class Box:
            def __init__(self, a):
                self.a = a

        np.testing.assert_allclose(fuse(lambda x: Box(dense(x)))(X).a, dense(X), rtol=1e-6)

    def test_generators_run_unfused(self):
        def f(x):
            for i in range(2):
                yield x * i

        assert [float(y.sum()) for y in fuse(f)(X)] == [0.0, float(X.sum())]

    def test_an_argument_that_comes_back_is_the_callers_own(self):
        array = np.ones(2)
        assert fuse(lambda a: a)(array) is array
        assert fuse(lambda x, s: s)(X, 2.0) == 2.0


class Counter(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.count = nnx.Variable(jnp.zeros(()))
        self.calls = 0

    def __call__(self, x):
        self.count[...] += 1
        return nnx.relu(self.linear(x))


GLOBAL = Counter()


def read_global():
    return GLOBAL.count[...] * 1


class TestNnxState:
    @PLAIN_AND_FUSED
    def test_static_attributes_and_structure(self, wrap):
        def step(m, x):
            m.calls += 1
            m.extra = nnx.Variable(x.sum())
            del m.linear
            return m.count[...] + 1

        m = Counter()
        wrap(step)(m, X)
        assert (m.calls, hasattr(m, "extra"), hasattr(m, "linear")) == (1, True, False)

    @PLAIN_AND_FUSED
    def test_read_through_a_helper(self, wrap):
        before = float(GLOBAL.count[...])

        def step(x):
            GLOBAL(x)
            return read_global()

        assert float(wrap(step)(X)) == float(GLOBAL.count[...]) == before + 1

    @PLAIN_AND_FUSED
    def test_variables_and_states_as_arguments(self, wrap):
        v, m = nnx.Variable(jnp.zeros(())), Counter()

        def add(v, x):
            v[...] = v[...] + 1
            return x * v[...]

        def shared(m, v, x):
            m(x)
            return v[...] * 1

        def clear(state):
            kernel = state["linear"]["kernel"]
            kernel.set_value(kernel[...] * 0)

        wrap(add)(v, X)
        assert float(v[...]) == 1
        assert float(wrap(shared)(m, m.count, X)) == 1
        wrap(clear)(nnx.state(m, nnx.Param))
        assert float(jnp.abs(m.linear.kernel[...]).sum()) == 0

    def test_parts_that_come_back_are_the_callers_own(self):
        m = Counter()
        assert fuse(lambda m: m.linear)(m) is m.linear
        assert fuse(lambda m: m.count)(m) is m.count

    @PLAIN_AND_FUSED
    def test_python_writes_of_a_function_that_captures_a_module(self, wrap):
        m = Counter()
        held, total = {"m": m, "n": 0}, 0

        def f(x):
            nonlocal total
            total += 1
            held["n"] += 1
            return held["m"](x)

        wrap(f)(X)
        assert (total, held["n"], float(m.count[...])) == (1, 1, 1.0)

    @PLAIN_AND_FUSED
    def test_a_default_argument(self, wrap):
        m = Counter()

        def f(x, d=m):
            return d(x)

        wrap(f)(X)
        assert float(m.count[...]) == 1


class TestClasses:
    def test_class_attributes_set_by_init_subclass(self):
        class Base(nnx.Module):
            def __init_subclass__(cls, *, scale=1.0, **kwargs):
                super().__init_subclass__(**kwargs)
                cls.scale = scale

        class Scaled(Base, scale=3.0):
            def __call__(self, x):
                return x * self.scale

        np.testing.assert_array_equal(fuse(Scaled())(X), X * 3)

    def test_a_class_derived_from_a_fused_type(self):
        class Ten(type(fuse(Counter()))):
            def __call__(self, x):
                return 10 * super().__call__(x)

        np.testing.assert_allclose(fuse(Ten())(X), 10 * Counter()(X), rtol=1e-6)


class TestLinenScopes:
    class Net(nn.Module):
        wrap: object

        def setup(self):
            self.dense, self.norm = nn.Dense(4), nn.BatchNorm(use_running_average=False)

        def encode(self, x):
            return nn.relu(self.norm(self.dense(x)))

        def __call__(self, x):
            return self.wrap(self.encode)(x)

    def test_a_bound_method_that_writes_variables(self):
        plain, fused = self.Net(lambda f: f), self.Net(fuse)
        variables = plain.init(jax.random.key(0), X)
        jax.tree.map(np.testing.assert_array_equal, fused.init(jax.random.key(0), X), variables)
        got, want = (m.apply(variables, X, mutable=["batch_stats"]) for m in (fused, plain))
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got, want)

    def test_a_closure_over_a_module_of_the_parent_is_refused_with_the_remedy(self):
        class Call(nn.Module):
            @nn.compact
            def __call__(self, g, x):
                return g(x)

        class Parent(nn.Module):
            @nn.compact
            def __call__(self, x):
                norm = nn.BatchNorm(use_running_average=False)
                return fuse(Call())(lambda y: norm(y), x)

        with pytest.raises(FuseError, match="fuse the module instead"):
            Parent().apply({"params": {}, "batch_stats": {}}, X, mutable=["batch_stats"])


def test_a_call_with_an_argument_it_does_not_use():
    """The argument is computed all the same: the call is emitted as it was written."""

    @jax.jit
    def doubled(x, unused):
        return 2.0 * x

    def f(x):
        return doubled(x, jnp.sin(x) + 1.0)

    x = jnp.arange(3.0)
    assert jnp.array_equal(aicf_jax.fuse(f)(x), f(x))


@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.gelu, jnp.tanh], ids=lambda f: f.__name__)
def test_a_step_that_holds_the_gradient_of_a_fused_function_is_explained(activation):
    fused = aicf_jax.fuse(lambda x, w, b: activation(x @ w + b))

    def step(x, w, b):
        return jax.grad(lambda p: fused(*p).sum())((x, w, b))

    report = aicf_jax.explain(step, jnp.ones((8, 4)), jnp.ones((4, 6)), jnp.ones(6))
    assert report.failure is None and report.count("gemm_epilogue_grad") == 1


def test_a_kernel_that_returns_an_array_and_no_tuple_is_refused():
    names = "activation has_bias bias_along batched trans_a trans_b operand_dtypes output_dtype product_dtype precision"
    capabilities = dict.fromkeys([*names.split(), "steps", "matrices", "formula"], ANY)
    bare = Kernel("bare", "gemm_epilogue", ("cpu",), capabilities, lambda op, *xs: op.reference(*xs)[0])
    args = jnp.ones((8, 4)), jnp.ones((4, 6)), jnp.ones(6)
    report = aicf_jax.explain(lambda x, w, b: jax.nn.relu(x @ w + b), *args, kernels=(bare,))
    assert [f.kernel for f in report.fusions] == ["xla"]
    (refusal,) = report.refusals
    assert (
        refusal.code == "kernel_failed" and "expected a tuple with one array for each of 1 result(s)" in refusal.found
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(1, 2048, 2, 32), (1, 2000, 2, 80), (2, 1500, 3, 4)], ids=str)
def test_narrow_attention_runs_with_the_tiles_it_gets(shape, dtype):
    """XLA's CPU compiler gave up on some products of bfloat16 when the program ran, by the sizes of their tiles."""
    q, k, v = (jnp.asarray(np.random.default_rng(n).normal(size=shape), dtype) for n in range(3))

    def loss(f):
        return lambda *a: jnp.sum(jnp.sin(f(*a).astype(jnp.float32)))

    (fusion,) = aicf_jax.explain(nn.dot_product_attention, q, k, v).fusions
    assert fusion.kernel == "streamed_attention"
    policy = aicf_jax.Policy(on_failure="raise")
    found = jax.jit(jax.grad(loss(fuse(nn.dot_product_attention, policy=policy)), (0, 1, 2)))(q, k, v)
    exact = jax.jit(jax.grad(loss(nn.dot_product_attention), (0, 1, 2)))(*(x.astype(jnp.float32) for x in (q, k, v)))
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == dtype
        # scores, weights, results and their gradients are each rounded to the type
        eps = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=0, atol=16 * eps * float(jnp.abs(b).max()))
