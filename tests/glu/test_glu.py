"""Fused gated linear units equal the unfused ones: in every transformation, dtype, shape, model and spelling."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import aicf_jax
from tests.families import assert_identical_programs, fused_op, plain_kernels
from tests.support import ACTIVATION_ROUNDINGS, ACTIVATIONS, assert_same, dyadic, key, normal, quick_jit
from tests.transformations import TRANSFORMS, assert_fused_same, gradient, transformed

K, F = 8, 4
GATES = {name: ACTIVATIONS[name] for name in ("silu", "gelu_exact", "gelu_tanh", "relu", "sigmoid", "none")}
# Sums of 8 products, twice; the activation; the product of both sides.
ROUNDINGS = 2 * K + ACTIVATION_ROUNDINGS + 1


def separate(name):
    act = GATES[name]

    def separate(x, w, v, c, b):
        return act(x @ w + b) * (x @ v + c)

    return separate


def halves(name):
    act = GATES[name]

    def halves(x, w, v, c, b):
        u, g = jnp.split(x @ jnp.concatenate([w, v], 1) + jnp.concatenate([c, b]), 2, axis=-1)
        return u * act(g)

    return halves


def arguments(m=5, k=K, f=F, dtype=jnp.float32, draw=normal):
    shapes = ((m, k), (k, f), (k, f), (f,), (f,))
    return tuple(draw(i, *s, dtype=dtype) for i, s in enumerate(shapes))


FIRST_ORDER = ("vjp", "jvp")
QUICK = {"vmap_everything", "vmap_of_grad_only_first", "grad_of_grad", "scan_body", "remat_dots_saveable", "export"}
TRANSFORMED = [
    pytest.param(t, form, marks=() if t in QUICK and form is separate else pytest.mark.slow)
    for t in TRANSFORMS
    for form in (separate, halves)
]


@pytest.mark.parametrize(("transform", "form"), TRANSFORMED)
def test_transform_of_fused_equals_transform_of_unfused(transform, form):
    assert_fused_same(form("silu"), arguments(), transform, roundings=ROUNDINGS)


KINDS = [
    pytest.param(n, d, f, marks=() if (n, d) in (("silu", "bfloat16"), ("relu", "float32")) else pytest.mark.slow)
    for n in GATES
    for d in ("float32", "bfloat16", "float16")
    for f in (separate, halves)
]


@pytest.mark.parametrize(("name", "dtype", "form"), KINDS)
def test_every_activation_and_dtype(name, dtype, form):
    """The data make both projections exact in each dtype."""
    f, args = form(name), arguments(dtype=dtype, draw=dyadic)
    assert aicf_jax.explain(f, *args).count("glu") == 1
    # In low precision: one rounding for each of projection, bias, activation, product, and as many backward.
    roundings = ROUNDINGS if dtype == "float32" else 12
    assert_same(
        transformed(FIRST_ORDER, aicf_jax.fuse(f), args), transformed(FIRST_ORDER, f, args), roundings=2 * roundings
    )


@pytest.mark.parametrize(("m", "k", "f"), [(0, K, F), (1, 1, F), (7, K, 1)])
def test_edge_shapes(m, k, f):
    for form in (separate("silu"), halves("silu")):
        args = arguments(m, k, f)
        assert aicf_jax.explain(form, *args).count("glu") == 1
        assert_same(
            transformed(("vjp",), aicf_jax.fuse(form), args),
            transformed(("vjp",), form, args),
            roundings=2 * ROUNDINGS,
        )


@pytest.mark.parametrize("name", ["silu", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gelu_tanh", "none"))])
def test_derivatives_against_finite_differences(name):
    with jax.enable_x64(True):
        args = arguments(3, 3, 2, dtype=jnp.float64)
        assert aicf_jax.fuse(separate(name))(*args).dtype == jnp.float64
        check_grads(aicf_jax.fuse(separate(name)), args, order=2)


@pytest.mark.parametrize(("name", "form"), [("silu", separate), ("relu", halves)])
def test_left_to_xla_it_is_the_unfused_program(name, form):
    f, args = form(name), arguments()
    assert {k for x in aicf_jax.explain(f, *args).fusions for _, k in x.kernels} == {"xla"}
    assert_identical_programs(f, *args, where=(0, 1, 2, 3, 4))


@pytest.mark.parametrize(
    ("name", "form"), [("silu", separate), ("relu", halves), pytest.param("none", separate, marks=pytest.mark.slow)]
)
def test_with_kernels_of_its_own(name, form):
    """The derived backward, which otherwise does not run: value, cotangents, tangents, both batched, second order."""
    f, args = form(name), arguments()
    fused = aicf_jax.fuse(f, kernels=plain_kernels(f, *args))
    assert aicf_jax.explain(fused, *args).fusions[0].kernel == "plain_glu"
    names = (*FIRST_ORDER, "vmap_of_grad_everything", "vmap_of_grad_only_first", "hessian_vector_product")
    program = str(jax.make_jaxpr(lambda *a: gradient(fused, a))(*args))
    assert program.count("glu_grad") == 1
    assert_same(transformed(names, fused, args), transformed(names, f, args), roundings=4 * ROUNDINGS)


def test_a_missing_tangent_is_no_zero_tangent():
    """0 times infinity is NaN; a value that is not differentiated has no tangent at all."""
    x, w, v, c, b = arguments()
    v = v.at[0, 0].set(jnp.inf)
    f = lambda c: separate("silu")(x, w, v, c, b)  # noqa: E731
    g = lambda c: aicf_jax.fuse(separate("silu"))(x, w, v, c, b)  # noqa: E731
    got, want = (jax.jvp(h, (c,), (jnp.ones_like(c),))[1] for h in (g, f))
    assert_same(got, want, roundings=ROUNDINGS)


class SwiGLU(nn.Module):
    dtype: object = None

    @nn.compact
    def __call__(self, x):
        gate, up = (nn.Dense(16, use_bias=False, dtype=self.dtype, name=n)(x) for n in ("gate", "up"))
        return x + nn.Dense(8, dtype=self.dtype)(nn.silu(gate) * up)


class GeGLU(nn.Module):
    """Both projections in one, as gemma and T5's descendants have it."""

    @nn.compact
    def __call__(self, x):
        h = nn.DenseGeneral((2, 16))(x)
        return nn.Dense(8)(nn.gelu(h[..., 0, :]) * h[..., 1, :])


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(Scanned), variable_axes={"params": 0}, split_rngs={"params": True}, length=2, in_axes=nn.broadcast
        )
        return layers()(x, None)[0]


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return SwiGLU()(x), None


MODELS = {
    "swiglu": SwiGLU(),
    "swiglu in bfloat16": SwiGLU(jnp.bfloat16),
    "geglu": GeGLU(),
    "stack of rematerialized layers": Stack(),
}


@pytest.mark.parametrize("name", MODELS)
def test_linen_models(name):
    module, x = MODELS[name], normal(0, 2, 3, 8)
    variables = module.init(key(0), x)
    fused = aicf_jax.fuse(module)
    assert aicf_jax.explain(fused, variables, x).count("glu") == 1
    got, want = (
        quick_jit(jax.value_and_grad(lambda v, x, m=m: jnp.sum(m.apply(v, x).astype(jnp.float32) ** 2), (0, 1)))(
            variables, x
        )
        for m in (fused, module)
    )
    # Sums of 16 products, three layers deep at most, forward and backward.
    dtype = "bfloat16" if "bfloat16" in name else None
    assert_same(got, want, roundings=12 if dtype else 6 * (16 + ACTIVATION_ROUNDINGS), dtype=dtype)


class NnxGated(nnx.Module):
    def __init__(self, rngs):
        self.gate, self.up = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


def test_nnx_model():
    model, x = NnxGated(nnx.Rngs(0)), normal(0, 3, 8)
    fused = aicf_jax.fuse(model)
    assert aicf_jax.explain(fused, x).count("glu") == 1
    loss = lambda m, x: jnp.sum(m(x) ** 2)  # noqa: E731
    got, want = (nnx.state(nnx.jit(nnx.grad(loss))(m, x)) for m in (fused, model))
    assert_same(jax.tree.leaves(got), jax.tree.leaves(want), roundings=4 * (16 + ACTIVATION_ROUNDINGS))


def test_printing(golden):
    """What `explain` says: bytes and launches before and after, the backward equation by equation."""
    for form in (separate, halves):
        (fusion,) = aicf_jax.explain(form("silu"), *arguments()).fusions
        moved = f"bytes {fusion.bytes_before} -> {fusion.bytes_after}"
        launches = f"launches {fusion.launches_before} -> {fusion.launches_after}"
        golden(f"{fusion.attrs}\n{moved}\n{launches}\n\n{fusion.backward}", form.__name__)


def test_what_it_moves():
    """As written: two products, two biases, an activation, a product. Fused: inputs once, Y once."""
    (fusion,) = aicf_jax.explain(separate("silu"), *arguments(16, 32, 8)).fusions
    x, w, b, y = 16 * 32, 32 * 8, 8, 16 * 8
    assert fusion.bytes_after == 4 * (x + 2 * w + 2 * b + y)
    assert fusion.bytes_before == 4 * (2 * (x + w + y) + 2 * (y + b + y) + 2 * y + 3 * y)
    assert (fusion.launches_before, fusion.launches_after) == (6, 1)


def test_inputs_of_the_operation():
    op = fused_op(separate("silu"), *arguments())
    assert len(op.in_avals) == 5  # x once, although two products read it


# -- spellings at random, with near misses among them ---------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Program:
    """One way to write two projections, an activation and what joins them; not all of them are a gate."""

    activation: str
    projections: str
    biases: tuple[bool, bool]
    turned: bool
    join: str
    extra: str
    low: bool

    def __call__(self, x, w, v, c, b):
        if self.low:
            x, w, v, c, b = (a.astype(jnp.bfloat16) for a in (x, w, v, c, b))
        g, u = self.projected(x, w, v)
        g, u = (g + b if self.biases[0] else g), (u + c if self.biases[1] else u)
        a = GATES[self.activation](g)
        if self.extra == "activation on both":
            u = jnp.tanh(u)
        first, second = (u, a) if self.turned else (a, u)
        y = first * second if self.join == "product" else first + second
        kept = {"gate": a, "up": u, "inner": g}.get(self.extra)
        return y if kept is None else (y, jnp.cumsum(kept, 0))

    def projected(self, x, w, v):
        if self.projections == "separate":
            return x @ w, jnp.einsum("mk,kf->mf", x, v)
        if self.projections == "another input":
            return x @ w, (0.5 * x) @ v
        h = x @ jnp.concatenate([w, v], 1)
        if self.projections == "split":
            return jnp.split(h, 2, -1)
        if self.projections == "index":
            h = h.reshape(-1, 2, F)
            return h[:, 1], h[:, 0]
        return h[:, :F], h[:, 1 : F + 1]  # "overlap"

    @property
    def is_gate(self):
        allowed = self.projections in ("separate", "split", "index")
        return allowed and self.join == "product" and self.extra == "nothing"


@st.composite
def programs(draw):
    return Program(
        draw(st.sampled_from([*GATES])),
        draw(st.sampled_from(["separate", "split", "index", "separate", "another input", "overlap"])),
        (draw(st.booleans()), draw(st.booleans())),
        draw(st.booleans()),
        draw(st.sampled_from(["product", "product", "product", "sum"])),
        draw(st.sampled_from(["nothing", "nothing", "nothing", "gate", "up", "inner", "activation on both"])),
        draw(st.booleans()),
    )


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(program=programs())
def test_random_spellings_are_told_apart(program):
    assert aicf_jax.explain(program, *arguments(draw=dyadic)).count("glu") == program.is_gate


@pytest.mark.parametrize("examples", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_random_spellings(examples):
    run = settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    run(given(program=programs())(holds))()


def holds(program):
    args = arguments(draw=dyadic)
    names = ("vjp", "jvp")
    # bfloat16: a rounding for each of projection, bias, activation, product, twice, and the cumulative sum of 5
    roundings, dtype = (24, jnp.bfloat16) if program.low else (4 * ROUNDINGS, None)
    got, want = transformed(names, aicf_jax.fuse(program), args), transformed(names, program, args)
    assert_same(got, want, roundings=roundings, dtype=dtype)


# -- a gate inside another operation ------------------------------------------------------------------------------


def gated_scores(q, k, r, v):
    return jax.nn.softmax(jax.nn.silu(q @ k.T) * (q @ r.T)) @ v


def gated_logits(x, w, v, y):
    return -jnp.mean(jax.nn.log_softmax(jax.nn.silu(x @ w) * (x @ v))[jnp.arange(4), jnp.argmax(y, 1)])


@pytest.mark.parametrize(("f", "op"), [(gated_scores, "attention"), (gated_logits, "linear_cross_entropy")])
def test_a_gate_may_be_part_of_what_another_operation_does(f, op):
    """It is a product of elements there, and no product of matrices."""
    args = tuple(normal(i, 4, 4) for i in range(4))
    assert aicf_jax.explain(aicf_jax.fuse(f, policy=aicf_jax.Policy(on_failure="raise")), *args).count(op) == 1
    # Sums of 4 products and of 4 elements, twice, and two functions.
    assert_fused_same(f, args, FIRST_ORDER, roundings=2 * (8 + 2 * ACTIVATION_ROUNDINGS))
