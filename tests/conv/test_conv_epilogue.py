"""Fused convolutions equal the unfused ones: in every transformation, dtype, layout, model and spelling."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import aicf_jax
from tests.families import assert_identical_programs, plain_kernels
from tests.support import ACTIVATION_ROUNDINGS, ACTIVATIONS, assert_same, dyadic, key, normal, quick_jit
from tests.transformations import TRANSFORMS, assert_fused_same, gradient, transformed

NHWC = ("NHWC", "HWIO", "NHWC")
IMAGE, CHANNELS, FEATURES = (2, 4, 4), 2, 3
# Sums of 2 * 2 * 2 products, of 2 * 4 * 4 positions in the backward; five roundings of the affine function.
ROUNDINGS = 32 + ACTIVATION_ROUNDINGS + 5


def convolved(x, w, strides=(1, 1), padding="SAME", numbers=NHWC, **options):
    return jax.lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=numbers, **options)


def with_bias(name, **options):
    def with_bias(x, w, b):
        return ACTIVATIONS[name](convolved(x, w, **options) + b)

    return with_bias


def with_norm(name, **options):
    def with_norm(x, w, b, mean, var, scale, shift):
        y = convolved(x, w, **options) + b
        return ACTIVATIONS[name]((y - mean) * (jax.lax.rsqrt(var * var + 0.5) * scale) + shift)

    return with_norm


def arguments(form, dtype=jnp.float32, draw=normal):
    shapes = ((*IMAGE, CHANNELS), (2, 2, CHANNELS, FEATURES), *[(FEATURES,)] * (1 if form is with_bias else 5))
    return tuple(draw(i, *s, dtype=dtype) for i, s in enumerate(shapes))


FIRST_ORDER = ("vjp", "jvp")
QUICK = {"vmap_everything", "vmap_of_grad_only_first", "grad_of_grad", "scan_body", "remat_dots_saveable", "export"}
TRANSFORMED = [
    pytest.param(t, form, marks=() if t in QUICK and form is with_norm else pytest.mark.slow)
    for t in TRANSFORMS
    for form in (with_norm, with_bias)
]


@pytest.mark.parametrize(("transform", "form"), TRANSFORMED)
def test_transform_of_fused_equals_transform_of_unfused(transform, form):
    assert_fused_same(form("silu"), arguments(form), transform, roundings=ROUNDINGS)


KINDS = [
    pytest.param(n, d, f, marks=() if (n, d) in (("silu", "bfloat16"), ("relu", "float32")) else pytest.mark.slow)
    for n in ACTIVATIONS
    for d in ("float32", "bfloat16", "float16")
    for f in (with_norm, with_bias)
]


@pytest.mark.parametrize(("name", "dtype", "form"), KINDS)
def test_every_activation_and_dtype(name, dtype, form):
    """The data make the convolution exact in each dtype."""
    f, args = form(name), arguments(form, dtype, dyadic)
    assert aicf_jax.explain(f, *args).count("conv_epilogue") == 1
    # In low precision: a rounding for each of the steps, and as many backward; sums over positions in float32 or in
    # the dtype itself, as XLA's reduction has it, 32 terms of one size.
    roundings = ROUNDINGS if dtype == "float32" else 24
    got, want = transformed(FIRST_ORDER, aicf_jax.fuse(f), args), transformed(FIRST_ORDER, f, args)
    assert_same(got, want, roundings=2 * roundings)


OPTIONS = {
    "strides": {"strides": (2, 3)},
    "padding": {"padding": ((1, 2), (0, 1))},
    "kernel dilation": {"rhs_dilation": (2, 1), "padding": "VALID"},
    "input dilation": {"lhs_dilation": (2, 2), "padding": ((1, 0), (0, 1))},
    "channels before the width": {"numbers": ("NHWC", "HWIO", "NHCW")},
    "nothing left": {"padding": ((-3, 0), (0, 0))},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_kind_of_window(name):
    options = OPTIONS[name]

    def f(x, w, b, *p):
        y = convolved(x, w, **options)
        if "numbers" in options:
            b, *p = (v[:, None] for v in (b, *p))
        return jax.nn.relu((y + b) * p[0] + p[1])

    args = arguments(with_norm)[:5]
    assert aicf_jax.explain(f, *args).count("conv_epilogue") == 1
    got, want = transformed(("vjp",), aicf_jax.fuse(f), args), transformed(("vjp",), f, args)
    assert_same(got, want, roundings=2 * ROUNDINGS)


@pytest.mark.parametrize(
    ("x", "w", "options"),
    [
        ((2, 5, 4), (3, 2, 6), {"numbers": ("NWC", "WIO", "NWC"), "strides": (1,), "feature_group_count": 2}),
        ((4, 3, 3, 3, 2), (2, 2, 2, 2, 6), {"numbers": ("NHWDC", "HWDIO", "NHWDC"), "strides": (1, 1, 1)}),
        ((4, 4, 4, 2), (2, 2, 2, 6), {"batch_group_count": 2}),
        ((0, 4, 4, 2), (2, 2, 2, 6), {}),
    ],
)
def test_dimensions_and_groups(x, w, options):
    f = lambda x, w, b: jax.nn.silu(convolved(x, w, **options) + b)  # noqa: E731
    args = normal(0, *x), normal(1, *w), normal(2, 6)
    assert aicf_jax.explain(f, *args).count("conv_epilogue") == 1
    got, want = transformed(("vjp",), aicf_jax.fuse(f), args), transformed(("vjp",), f, args)
    assert_same(got, want, roundings=2 * ROUNDINGS)


@pytest.mark.parametrize("form", [with_bias, pytest.param(with_norm, marks=pytest.mark.slow)])
def test_derivatives_against_finite_differences(form):
    with jax.enable_x64(True):
        args = tuple(
            a[:, :2, :2] if a.ndim == 4 and a.shape[0] == 2 and i == 0 else a
            for i, a in enumerate(arguments(form, jnp.float64))
        )
        check_grads(aicf_jax.fuse(form("silu")), args, order=2)


@pytest.mark.parametrize(("form", "name"), [(with_norm, "relu"), (with_norm, "silu"), (with_bias, "relu")])
def test_left_to_xla_it_is_the_unfused_program(form, name):
    f, args = form(name), arguments(form)
    assert {k for x in aicf_jax.explain(f, *args).fusions for _, k in x.kernels} == {"xla"}
    assert_identical_programs(f, *args, where=tuple(range(len(args))))


@pytest.mark.parametrize(
    ("form", "name"),
    [(with_norm, "silu"), (with_bias, "relu"), pytest.param(with_norm, "none", marks=pytest.mark.slow)],
)
def test_with_kernels_of_its_own(form, name):
    """The derived backward, which otherwise does not run: value, cotangents, tangents, both batched, second order."""
    f, args = form(name), arguments(form)
    fused = aicf_jax.fuse(f, kernels=plain_kernels(f, *args))
    assert aicf_jax.explain(fused, *args).fusions[0].kernel == "plain_conv_epilogue"
    names = (*FIRST_ORDER, "vmap_of_grad_everything", "vmap_of_grad_only_first", "hessian_vector_product")
    program = str(jax.make_jaxpr(lambda *a: gradient(fused, a))(*args))
    assert program.count("conv_epilogue_grad") == 1
    assert_same(transformed(names, fused, args), transformed(names, f, args), roundings=4 * ROUNDINGS)


class Block(nn.Module):
    """A residual block (He et al., 2016) with a projected shortcut."""

    train: bool = False
    dtype: object = None

    @nn.compact
    def __call__(self, x):
        norm = functools.partial(nn.BatchNorm, use_running_average=not self.train, momentum=0.9, dtype=self.dtype)
        y = nn.Conv(4, (3, 3), (2, 2), use_bias=False, dtype=self.dtype)(x)
        y = nn.relu(norm()(y))
        y = norm()(nn.Conv(4, (3, 3), dtype=self.dtype)(y))
        return nn.relu(y + norm()(nn.Conv(4, (1, 1), (2, 2), dtype=self.dtype)(x)))


def block_variables(module, x):
    variables = module.init(key(0), x)
    # Statistics of their own, or a batch norm that does nothing would pass.
    return {**variables, "batch_stats": jax.tree.map(lambda a: a + 0.3, variables["batch_stats"])}


@pytest.mark.parametrize("dtype", [None, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def test_a_residual_block_with_given_statistics(dtype):
    module, x = Block(dtype=dtype), normal(0, 2, 6, 6, 3)
    variables = block_variables(module, x)
    fused = aicf_jax.fuse(module)
    assert aicf_jax.explain(fused, variables, x).count("conv_epilogue") == 3
    loss = lambda m: lambda v, x: jnp.sum(m.apply(v, x).astype(jnp.float32) ** 2)  # noqa: E731
    got, want = (quick_jit(jax.value_and_grad(loss(m), (0, 1)))(variables, x) for m in (fused, module))
    assert_same(got, want, roundings=24 if dtype else 4 * (36 + ACTIVATION_ROUNDINGS), dtype=dtype)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_a_residual_block_in_training(dtype):
    """Statistics of the batch are a batch norm behind the convolution, which keeps its bias (tests/norms)."""
    module, x = Block(train=True, dtype=dtype), normal(0, 2, 6, 6, 3)
    variables = block_variables(module, x)
    fused = aicf_jax.fuse(module)
    report = aicf_jax.explain(lambda v, x: module.apply(v, x, mutable=["batch_stats"]), variables, x)
    assert report.count("batch_norm") == 3 and report.count("conv_epilogue") == 2 and not report.refusals

    def step(m):
        def loss(p, s, x):
            y, updated = m.apply({"params": p, "batch_stats": s}, x, mutable=["batch_stats"])
            return jnp.sum(y.astype(jnp.float32) ** 2), (y, updated)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"], variables["batch_stats"], x)

    # In bfloat16 which roundings XLA leaves out depends on the order of the equations.
    assert_same(step(fused), step(module), roundings=0 if dtype is None else 24, dtype=dtype)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.conv, self.norm = nnx.Conv(3, 4, (3, 3), rngs=rngs), nnx.BatchNorm(4, momentum=0.9, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.norm(self.conv(x)))


def test_an_nnx_block_in_training_and_after_it():
    """Two updates of the running averages through fused and unfused, then what they are used for."""
    x = normal(0, 2, 6, 6, 3)
    states, outputs = [], []
    for wrap in (aicf_jax.fuse, lambda m: m):
        model = wrap(NnxBlock(nnx.Rngs(0)))
        model.train()
        for i in range(2):
            nnx.jit(lambda m, x: m(x))(model, x + i)
        states.append(jax.tree.leaves(nnx.state(model)))
        model.eval()
        assert wrap is not aicf_jax.fuse or aicf_jax.explain(model, x).count("conv_epilogue") == 1
        outputs.append(nnx.jit(lambda m, x: m(x))(model, x))
    assert_same(states[0], states[1], roundings=0)
    assert_same(outputs[0], outputs[1], roundings=27 + 8)  # sums of 27 products, the affine function


def test_printing(golden):
    """What `explain` says: bytes and launches before and after, the backward equation by equation."""
    for form in (with_norm, with_bias):
        (fusion,) = aicf_jax.explain(form("relu"), *arguments(form)).fusions
        moved = f"bytes {fusion.bytes_before} -> {fusion.bytes_after}"
        launches = f"launches {fusion.launches_before} -> {fusion.launches_after}"
        golden(f"{fusion.attrs}\n{moved}\n{launches}\n\n{fusion.backward}", form.__name__)


# -- spellings at random, with near misses among them ---------------------------------------------------------

NORMS = {
    "none": lambda y, m, v, s, t: y,
    "as flax has it": lambda y, m, v, s, t: (y - m) * (jax.lax.rsqrt(v + 1e-5) * s) + t,
    "divided": lambda y, m, v, s, t: (y - m) / jnp.sqrt(v + 1e-5) * s + t,
    "folded": lambda y, m, v, s, t: y * (s / jnp.sqrt(v)) + (t - m * s / jnp.sqrt(v)),
    "scale": lambda y, m, v, s, t: 2 * (s * y),
    "in float32": lambda y, m, v, s, t: ((y.astype(jnp.float32) - m) * s + t).astype(y.dtype),
    "of the batch": lambda y, m, v, s, t: (y - y.mean((0, 1, 2))) * s + t,
    "of the image": lambda y, m, v, s, t: (y - y.mean((1, 2), keepdims=True)) * s + t,
    "along the width": lambda y, m, v, s, t: y * jnp.resize(s, (y.shape[2], 1)),
}
REFUSED = {"of the batch", "of the image", "along the width"}


@dataclasses.dataclass(frozen=True)
class Program:
    """One way to write a convolution and what follows it; not all of them are the operation."""

    activation: str
    norm: str
    bias: str
    channels_first: bool
    strides: tuple[int, int]
    extra: str

    def __call__(self, x, w, b, m, v, s, t):
        y = convolved(x, w, self.strides, numbers=("NHWC", "HWIO", "NCHW" if self.channels_first else "NHWC"))
        inner = y
        y = self.with_channels_last(y, lambda y: self.biased(y, b))
        y = self.with_channels_last(y, lambda y: NORMS[self.norm](y, m, v * v + 0.5, s, t))
        z = ACTIVATIONS[self.activation](y)
        kept = {"inner": inner, "before the activation": y}.get(self.extra)
        return z if kept is None else (z, jnp.cumsum(kept, 0))

    def biased(self, y, b):
        if self.bias == "over rows":
            return y + jnp.resize(b, (y.shape[1], 1, 1))
        return {"none": y, "first": b + y, "second": y + b}[self.bias]

    def with_channels_last(self, y, f):
        """By a transpose there and back: the role of each dimension follows."""
        return jnp.moveaxis(f(jnp.moveaxis(y, 1, -1)), -1, 1) if self.channels_first else f(y)

    @property
    def is_whole(self):
        """Whether all of it is one operation."""
        anything = (self.activation, self.norm, self.bias) != ("none", "none", "none")
        return anything and self.norm not in REFUSED and self.bias != "over rows" and self.extra == "nothing"


@st.composite
def programs(draw):
    return Program(
        draw(st.sampled_from(["relu", "silu", "gelu_tanh", "sigmoid", "none"])),
        draw(st.sampled_from([*NORMS])),
        draw(st.sampled_from(["none", "first", "second", "over rows"])),
        draw(st.booleans()),
        draw(st.sampled_from([(1, 1), (2, 1)])),
        draw(st.sampled_from(["nothing", "nothing", "nothing", "inner", "before the activation"])),
    )


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(program=programs())
def test_random_spellings_are_told_apart(program):
    report = aicf_jax.explain(program, *arguments(with_norm, draw=dyadic))
    if program.is_whole:
        assert [f.op for f in report.fusions] == ["conv_epilogue"] and report.refusals == ()
    elif program.extra == "inner" or program.norm in REFUSED or program.bias == "over rows":
        assert report.count("conv_epilogue") == 0


@pytest.mark.parametrize("examples", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_random_spellings(examples):
    run = settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    run(given(program=programs())(holds))()


def holds(program):
    args = arguments(with_norm, draw=dyadic)
    got, want = transformed(FIRST_ORDER, aicf_jax.fuse(program), args), transformed(FIRST_ORDER, program, args)
    assert_same(got, want, roundings=4 * ROUNDINGS)
