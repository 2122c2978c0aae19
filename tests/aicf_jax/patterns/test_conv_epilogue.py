"""Convolutions with bias, scale and shift per channel, activation: what is one operation, what is refused and why."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import aicf_jax
from tests.aicf_jax.attention_support import normal
from tests.support import ACTIVATIONS, key, quick_jit

X, W = normal(0, 2, 6, 6, 4), normal(1, 3, 3, 4, 6)  # as many positions as channels: axes are told apart by role
B, MEAN, VAR, SCALE, SHIFT = normal(2, 6), normal(3, 6), normal(4, 6) ** 2 + 0.5, normal(5, 6), normal(6, 6)
ARGS = (X, W, B, MEAN, VAR, SCALE, SHIFT)
NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")


def convolved(x, w, strides=(1, 1), padding="SAME", numbers=NHWC, **options):
    return jax.lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=numbers, **options)


def normalized(y, mean, var, scale, shift):
    return (y - mean) * (jax.lax.rsqrt(var + 1e-5) * scale) + shift


def found(f, *args):
    """Attributes of the convolutions found in a call."""
    report = aicf_jax.explain(f, *(args or ARGS))
    return [dict(a.split("=") for a in x.attrs.split()) for x in report.fusions if x.op == "conv_epilogue"]


def parts(f, *args):
    return [(x["has_bias"], x["affine"], x["activation"]) for x in found(f, *args)]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation(name):
    act = ACTIVATIONS[name]
    assert parts(lambda x, w, b, *_: act(convolved(x, w) + b)) == [("1", "0", name)]
    assert parts(lambda x, w, b, *p: act(normalized(convolved(x, w), *p))) == [("0", "1", name)]
    assert parts(lambda x, w, b, *p: act(normalized(convolved(x, w) + b, *p))) == [("1", "1", name)]
    assert parts(lambda x, w, *_: act(convolved(x, w))) == ([] if name == "none" else [("0", "0", name)])


def divided(y, m, v, s, t):
    return (y - m) / jnp.sqrt(v + 1e-3) * s + t


def folded(y, m, v, s, t):
    factor = s / jnp.sqrt(v + 1e-3)
    return y * factor + (t - m * factor)


def scaled_first(y, m, v, s, t):
    return s * ((y - m) * jax.lax.rsqrt(v + 1e-5)) + t


def negated(y, m, v, s, t):
    return t - (m - y) * -(s * jax.lax.rsqrt(v))


def in_full(y, m, v, s, t):
    m, v, s, t = (jnp.broadcast_to(a, y.shape) for a in (m, v, s, t))
    return (y - m) * (1 / jnp.sqrt(v + 1e-5)) * s + t


def in_float32(y, m, v, s, t):
    return normalized(y.astype(jnp.float32), m, v, s, t).astype(y.dtype)


def scale_alone(y, m, v, s, t):
    return y * s


def library(y, m, v, s, t):
    return jax.nn.standardize(y, mean=m, variance=v) * s + t


@pytest.mark.parametrize(
    "norm",
    [normalized, divided, folded, scaled_first, negated, in_float32, scale_alone, library],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_spelling_of_a_batch_norm_with_given_statistics(norm, dtype):
    def f(x, w, b, *p):
        y = convolved(x.astype(dtype), w.astype(dtype))
        return jax.nn.relu(norm(y, *p))

    assert parts(f) == [("0", "1", "relu")]
    report = aicf_jax.explain(f, *ARGS)
    assert report.refusals == () and len(report.fusions) == 1


CONVOLUTIONS = {
    "one dimension": (normal(0, 2, 9, 4), normal(1, 3, 4, 6), {"numbers": ("NWC", "WIO", "NWC"), "strides": (1,)}),
    "three dimensions": (
        normal(0, 2, 3, 4, 5, 4),
        normal(1, 2, 2, 2, 4, 6),
        {"numbers": ("NHWDC", "HWDIO", "NHWDC"), "strides": (1, 1, 1)},
    ),
    "strides": (X, W, {"strides": (2, 3)}),
    "valid": (X, W, {"padding": "VALID"}),
    "padding": (X, W, {"padding": ((1, 2), (0, 1))}),
    "kernel dilation": (X, W, {"rhs_dilation": (2, 1)}),
    "input dilation": (X, W, {"lhs_dilation": (2, 2), "padding": ((1, 1), (1, 1))}),
    "groups": (X, normal(1, 3, 3, 2, 6), {"feature_group_count": 2}),
    "depthwise": (normal(0, 2, 6, 6, 6), normal(1, 3, 3, 1, 6), {"feature_group_count": 6}),
    "batch groups": (X, W, {"batch_group_count": 2}),
    "one by one": (X, normal(1, 1, 1, 4, 6), {}),
    "one position": (normal(0, 2, 1, 1, 4), W, {}),
    "one image": (X[:1], W, {}),
    "channels in the middle": (X, W, {"numbers": ("NHWC", "HWIO", "NHCW")}),
}


def beside(vector, ndim, channel):
    return vector.reshape([-1 if d == channel else 1 for d in range(ndim)])


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_every_convolution(name):
    x, w, options = CONVOLUTIONS[name]
    channel = options.get("numbers", NHWC)[2].index("C")

    def f(x, w, b, *p):
        y = convolved(x, w, **options)
        b, *p = (beside(v, y.ndim, channel) for v in (b, *p))
        return jax.nn.silu(normalized(y + b, *p))

    (got,) = found(f, x, w, *ARGS[2:])
    assert (got["has_bias"], got["affine"], got["activation"]) == ("1", "1", "silu")
    assert int(got["channel"]) == channel - x.ndim and int(got["spatial"]) == x.ndim - 2


def test_channels_first():
    x, w = jnp.moveaxis(X, -1, 1), jnp.transpose(W, (3, 2, 0, 1))

    def f(x, w, *p):
        b, *p = (v[:, None, None] for v in p)
        return jax.nn.relu(normalized(convolved(x, w, numbers=NCHW) + b, *p))

    assert found(f, x, w, *ARGS[2:])[0]["channel"] == "-3"


class TestFlax:
    @pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
    @pytest.mark.parametrize("options", [{}, {"use_bias": False}, {"use_scale": False}, {"momentum": 0.5}], ids=str)
    def test_linen(self, options, dtype):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x):
                y = nn.Conv(6, (3, 3), dtype=dtype)(x)
                return nn.relu(nn.BatchNorm(use_running_average=True, dtype=dtype, **options)(y))

        variables = jax.eval_shape(Block().init, key(0), X)
        assert parts(Block().apply, variables, X) == [("1", "1", "relu")]

    def test_linen_without_scale_and_shift(self):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x):
                y = nn.Conv(6, (3, 3), use_bias=False)(x)
                return nn.gelu(nn.BatchNorm(use_running_average=True, use_scale=False, use_bias=False)(y))

        variables = jax.eval_shape(Block().init, key(0), X)
        assert parts(Block().apply, variables, X) == [("0", "1", "gelu_tanh")]

    def test_more_batch_dimensions(self):
        layer = nn.Conv(6, (3, 3))
        x = normal(0, 2, 3, 6, 6, 4)
        variables = jax.eval_shape(layer.init, key(0), x)
        assert parts(lambda v, x: nn.silu(layer.apply(v, x)), variables, x) == [("1", "0", "silu")]

    def test_nnx(self):
        conv, norm = nnx.Conv(4, 6, (3, 3), rngs=nnx.Rngs(0)), nnx.BatchNorm(6, rngs=nnx.Rngs(0))
        norm.eval()
        assert parts(lambda x: nnx.relu(norm(conv(x))), X) == [("1", "1", "relu")]
        norm.train()
        report = aicf_jax.explain(nnx.Sequential(conv, norm, nnx.relu), X)
        assert [f.op for f in report.fusions] == ["conv_epilogue", "batch_norm"] and report.refusals == ()


def along_the_width(x, w, b, m, v, s, t):
    """Channels first, as many channels as columns: without an index the vector lies along the columns."""
    y = convolved(x, w, numbers=("NHWC", "HWIO", "NCHW"))
    return jax.nn.relu(y + b)


def scale_along_the_width(x, w, b, m, v, s, t):
    y = convolved(x, w, numbers=("NHWC", "HWIO", "NCHW"))
    return jax.nn.relu(y * s + t[:, None, None])


def bias_over_positions(x, w, b, m, v, s, t):
    return jax.nn.relu(convolved(x, w) + b[:, None, None])


def scale_over_positions_after_the_bias(x, w, b, m, v, s, t):
    return jax.nn.relu((convolved(x, w) + b) * s[:, None])


def shift_over_positions(x, w, b, m, v, s, t):
    return jax.nn.relu(convolved(x, w) * s + t[:, None])


def another_consumer(x, w, b, m, v, s, t):
    y = convolved(x, w)
    return jax.nn.relu(y + b), jnp.cumsum(y)


def intermediate_is_a_result(x, w, b, m, v, s, t):
    y = convolved(x, w) + b
    return jax.nn.relu(y), y


def activation_on_another_branch(x, w, b, m, v, s, t):
    y = convolved(x, w)
    return jax.nn.relu(y) + (y + b)


def another_activation_joins(x, w, b, m, v, s, t):
    return (convolved(x, w[..., :4]) + b[:4]) + jax.nn.relu(x)


def maximum_is_not_relu(x, w, b, m, v, s, t):
    return jnp.maximum(normalized(convolved(x, w), m, v, s, t), 0)


def statistics_of_the_batch(x, w, b, m, v, s, t):
    y = convolved(x, w)
    return jax.nn.relu(normalized(y, y.mean((0, 1, 2)), y.var((0, 1, 2), ddof=1), s, t))


def statistics_of_the_batch_after_a_bias_in_float32(x, w, b, m, v, s, t):
    y = (convolved(x, w) + b).astype(jnp.bfloat16)
    z = y.astype(jnp.float32)
    return jax.nn.relu(normalized(y.astype(jnp.float32), z.mean((0, 1, 2)), z.var((0, 1, 2), ddof=1), s, t))


def statistics_of_each_image(x, w, b, m, v, s, t):
    y = convolved(x, w)
    return jax.nn.relu(normalized(y, y.mean((1, 2), keepdims=True), y.var((1, 2), keepdims=True, ddof=1), s, t))


def statistics_over_the_channels(x, w, b, m, v, s, t):
    y = convolved(x, w)
    return jax.nn.relu(normalized(y, y.mean(-1, keepdims=True), y.var(-1, keepdims=True), s, t))


NEAR_MISSES = {
    along_the_width: "bias_axis",
    scale_along_the_width: "scale_axis",
    bias_over_positions: "bias_axis",
    scale_over_positions_after_the_bias: "scale_axis",
    shift_over_positions: "shift_axis",
    another_consumer: "multiple_consumers",
    intermediate_is_a_result: "escapes",
    activation_on_another_branch: "activation_on_another_branch",
    another_activation_joins: "activation_on_another_branch",
    maximum_is_not_relu: "tie_gradient",
    statistics_of_the_batch: "batch_statistics",
    statistics_of_the_batch_after_a_bias_in_float32: "batch_statistics",
    statistics_of_each_image: "normalization_axes",
}


def test_the_variance_of_the_batch_makes_a_batch_norm():
    def f(x, w, b, m, v, s, t):
        y = convolved(x, w)
        return jax.nn.relu(normalized(y, y.mean((0, 1, 2)), y.var((0, 1, 2)), s, t))

    report = aicf_jax.explain(f, *ARGS)
    assert [f.op for f in report.fusions] == ["batch_norm"] and report.refusals == ()


def test_statistics_over_the_channels_are_a_layer_norm():
    report = aicf_jax.explain(statistics_over_the_channels, *ARGS)
    assert report.count("layer_norm") == 1 and report.count("conv_epilogue") == 0


@pytest.mark.parametrize("f", NEAR_MISSES, ids=lambda f: f.__name__)
class TestNearMisses:
    def test_are_refused_with_their_code_and_line(self, f):
        report = aicf_jax.explain(f, *ARGS)
        assert report.count("conv_epilogue") == 0
        (refusal,) = (r for r in report.refusals if r.pattern.startswith("conv"))
        assert refusal.code == NEAR_MISSES[f]
        assert refusal.expected and refusal.found and refusal.expected != refusal.found
        assert refusal.site.startswith(f"{__file__}:")
        _, _, name = refusal.site.partition("(")
        assert name.rstrip(")") in (f.__name__, "convolved", "normalized")

    def test_keep_values_and_gradients(self, f):
        def loss(g):
            return lambda *a: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(g(*a)))

        # Nothing was rewritten, so both sides are one program to XLA: equal bits.
        got, want = (quick_jit(jax.value_and_grad(loss(g), (0, 1, 2, 5)))(*ARGS) for g in (aicf_jax.fuse(f), f))
        assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, got, want)))


@pytest.mark.parametrize(
    "wrap", [lambda f: jax.vmap(f, (0, None), axis_name="i"), lambda f: jax.pmap(f, "i", in_axes=(0, None))]
)
def test_statistics_synchronized_over_devices_are_refused(wrap):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.relu(nn.BatchNorm(use_running_average=False, axis_name="i")(nn.Conv(6, (3, 3))(x)))

    module = Block()
    variables = module.init(key(0), X)
    f = lambda x, v: module.apply(v, x, mutable=["batch_stats"])  # noqa: E731
    x = jnp.stack([X, X + 1])
    got, want = (jax.jit(wrap(g))(x, variables) for g in (aicf_jax.fuse(f), f))
    assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, got, want)))
    seen = []

    def inside(x, v):
        seen.append(aicf_jax.explain(f, x, v))
        return f(x, v)

    wrap(inside)(x, variables)
    assert [r.code for r in seen[0].refusals] == ["synchronized_statistics"]


@pytest.mark.parametrize(
    ("f", "why"),
    [
        (lambda x, w, *_: convolved(x, w) * convolved(x, w), "two convolutions"),
        (lambda x, w, *_: (lambda y: y * jax.nn.sigmoid(1.7 * y))(convolved(x, w)), "an unknown activation"),
        (lambda x, w, *_: convolved(x, w) * 2 + 1, "numbers alone scale nothing per channel"),
        (lambda x, w, *_: jax.nn.relu6(convolved(x, w)), "relu6 is not in the family"),
    ],
)
def test_what_does_not_resemble_it_is_not_mentioned(f, why):
    report = aicf_jax.explain(f, *ARGS)
    assert report.fusions == () and report.refusals == (), why


def test_a_residual_is_no_bias_and_no_shift():
    def f(x, w, b, *p):
        return jax.nn.relu(normalized(convolved(x, w), *p) + jnp.concatenate([x, x], -1)[..., :6])

    assert parts(f) == [("0", "1", "none")]


def test_numbers_between_the_vectors_belong_to_the_affine_function():
    assert parts(lambda x, w, b, m, v, s, t: jax.nn.relu(2 * (convolved(x, w) * s) + t)) == [("0", "1", "relu")]


@pytest.mark.parametrize("act", [lambda z: 1 / (1 + jnp.exp(-z)), lambda z: 0.5 * z * (1 + jax.lax.erf(z * 0.5**0.5))])
def test_numbers_after_the_vectors_belong_to_the_activation(act):
    assert parts(lambda x, w, b, *p: act(normalized(convolved(x, w), *p)))[0][1] == "1"
    assert parts(lambda x, w, b, *p: act(normalized(convolved(x, w), *p)))[0][2] != "none"
    assert parts(lambda x, w, b, *p: act(convolved(x, w) + b))[0][2] != "none"


def test_inside_constructs():
    layer = lambda x, w, b: jax.nn.relu(convolved(x, w) + b)  # noqa: E731
    for wrap in (jax.jit, jax.checkpoint, lambda f: lambda *a: jax.lax.cond(True, f, f, *a)):
        assert len(found(wrap(layer), X, W, B)) >= 1
    assert parts(functools.partial(jax.vmap(layer, (0, None, None))), jnp.stack([X, X]), W, B) == [("1", "0", "relu")]


def test_fusing_twice_changes_nothing():
    once = aicf_jax.fuse(lambda x, w, b, *p: jax.nn.relu(normalized(convolved(x, w) + b, *p)))
    program = jax.make_jaxpr(once)(*ARGS)
    assert str(jax.make_jaxpr(aicf_jax.fuse(lambda *a: once(*a)))(*ARGS)) == str(program)


def test_bitwise_policy_rewrites_nothing_and_says_so():
    report = aicf_jax.explain(
        lambda x, w, b, *_: jax.nn.relu(convolved(x, w) + b), *ARGS, policy=aicf_jax.Policy(numerics="bitwise")
    )
    assert report.fusions == () and [r.code for r in report.refusals] == ["numerics"]


def test_what_it_moves():
    x, w, b = (np.zeros(s, np.float32) for s in ((2, 6, 6, 4), (3, 3, 4, 6), (6,)))
    (fusion,) = aicf_jax.explain(lambda x, w, b: jax.nn.relu(convolved(x, w) + b), x, w, b).fusions
    y = 4 * 2 * 6 * 6 * 6
    read = 4 * (x.size + w.size + b.size)
    assert (fusion.bytes_before, fusion.bytes_after) == (read + 5 * y, read + y)
    assert (fusion.launches_before, fusion.launches_after) == (3, 1)
