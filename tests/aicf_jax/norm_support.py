"""Spellings of norms, what resembles them, and kernels to run them with."""

import jax
import jax.numpy as jnp
from jax import lax

import aicf_jax
from aicf_jax.kernels import ANY, Kernel
from tests.aicf_jax.attention_support import normal

EPS = 1e-5


def mean(x, axis=-1):
    return jnp.mean(x, axis, keepdims=True)


def divided_by_the_length(x):
    return jnp.sum(x, -1, keepdims=True) / x.shape[-1]


def times_the_reciprocal_length(x):
    return (1 / x.shape[-1]) * x.sum(-1, keepdims=True)


def expanded(x):
    return jnp.expand_dims(jnp.mean(x, -1), -1)


def broadcast(x):
    return jnp.broadcast_to(x.mean(-1)[..., None], x.shape)


MEANS = (mean, divided_by_the_length, times_the_reciprocal_length, expanded, broadcast)

VARIANCES = {
    "of deviations": lambda x, m, average: average(jnp.square(x - m)),
    "of deviations, by a product": lambda x, m, average: average((x - m) * (x - m)),
    "of deviations, by a power": lambda x, m, average: average((m - x) ** 2),
    "jnp.var": lambda x, m, average: jnp.var(x, -1, keepdims=True),
    "from moments": lambda x, m, average: average(x * x) - m * m,
    "from moments, clamped": lambda x, m, average: jnp.maximum(0.0, average(jnp.square(x)) - jnp.square(m)),
    "from moments, negated": lambda x, m, average: -(m**2) + average(x**2),
}

#: How scale and bias are applied: x, mean, reciprocal deviation, scale, bias.
AFFINE = {
    "after the other": lambda x, m, r, g, b: (x - m) * r * g + b,
    "as flax does": lambda x, m, r, g, b: (x - m) * (r * g) + b,
    "scale first": lambda x, m, r, g, b: b + g * ((x - m) * r),
    "folded": lambda x, m, r, g, b: x * (r * g) + (b - m * (r * g)),
    "distributed": lambda x, m, r, g, b: (x * r - m * r) * g + b,
    "one plus the scale": lambda x, m, r, g, b: (x - m) * r * (1 + g) + b,
    "no bias": lambda x, m, r, g, b: (x - m) * r * g,
    "no scale": lambda x, m, r, g, b: (x - m) * r + b,
    "neither": lambda x, m, r, g, b: (x - m) * r,
    "scale as it is broadcast": lambda x, m, r, g, b: (x - m) * r * jnp.broadcast_to(g, x.shape) + b[None, None],
}

ROOTS = {
    "rsqrt": lambda v: lax.rsqrt(v + EPS),
    "one over the root": lambda v: 1 / jnp.sqrt(v + EPS),
    "a power": lambda v: (v + EPS) ** -0.5,
    "a power of the root": lambda v: jnp.sqrt(EPS + v) ** -1,
}


def layer_norm(x, g, b, average=mean, variance="of deviations", root="rsqrt", affine="after the other"):
    m = average(x)
    return AFFINE[affine](x, m, ROOTS[root](VARIANCES[variance](x, m, average)), g, b)


def rms_norm(x, g, b, average=mean, root="rsqrt", affine="after the other"):
    return AFFINE[affine](x, 0.0, ROOTS[root](average(jnp.square(x))), g, b)


def divided(x, g, b):
    """By the root, in place of a product with its reciprocal."""
    return (x - mean(x)) / jnp.sqrt(jnp.var(x, -1, keepdims=True) + EPS) * g + b


def standardized(x, g, b):
    return jax.nn.standardize(x) * g + b


def float32_inside(x, g, b):
    wide = x.astype(jnp.float32)
    m = mean(wide)
    y = (wide - m) * lax.rsqrt(mean(jnp.square(wide - m)) + EPS)
    return y.astype(x.dtype) * g.astype(x.dtype) + b.astype(x.dtype)


def llama(x, g, b):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(mean(wide**2) + EPS)).astype(x.dtype) * g.astype(x.dtype)


def gemma(x, g, b):
    normed = x * lax.rsqrt(mean(jnp.square(x.astype(jnp.float32))) + EPS)
    return (normed * (1 + g.astype(jnp.float32))).astype(x.dtype)


def moments_of(x, ddof=0):
    m = mean(x)
    return m, jnp.sum(jnp.square(x - m), -1, keepdims=True) / (x.shape[-1] - ddof)


def statistics_returned(x, g, b, z):
    m, v = moments_of(x)
    return (x - m) * lax.rsqrt(v + EPS) * g + b, m


def normalized_reused(x, g, b, z):
    y = (x - mean(x)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPS)
    return y * g + b + lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPS) * z, y


def over(axis):
    def norm(x, g, b, z):
        m = mean(x, axis)
        return (x - m) * lax.rsqrt(mean(jnp.square(x - m), axis) + EPS) * g + b

    return norm


def group_norm(x, g, b, z):
    """Two groups of the last axis, statistics over the others too: axes that are not trailing."""
    groups = x.reshape(*x.shape[:-1], 2, -1)
    return (over((1, 3))(groups, 1.0, 0.0, None)).reshape(x.shape) * g + b


def with_statistics(change):
    """A layer norm whose mean and variance went through `change`."""

    def norm(x, g, b, z):
        m, v = change(x, *moments_of(x), z)
        return (x - m) * lax.rsqrt(v + EPS) * g + b

    return norm


#: name -> (function of x, scale, bias and another value like x; code of the refusal)
NEAR_MISSES = {
    "a root mean square over the middle axis": (
        lambda x, g, b, z: x * lax.rsqrt(mean(x * x, 1) + EPS) * g,
        "axes_not_trailing",
    ),
    "N - 1 of a batch": (
        lambda x, g, b, z: (x - mean(x, (0, 1))) * lax.rsqrt(jnp.var(x, (0, 1), keepdims=True, ddof=1) + EPS) * g,
        "axes_not_trailing",
    ),
    "eps outside of the root": (
        lambda x, g, b, z: (x - mean(x)) / (jnp.sqrt(jnp.var(x, -1, keepdims=True)) + EPS) * g + b,
        "eps_outside_root",
    ),
    "std plus eps": (lambda x, g, b, z: (x - mean(x)) / (x.std(-1, keepdims=True) + EPS), "eps_outside_root"),
    # Its derivative at a variance of 0 is not the variance's.
    "std squared": (with_statistics(lambda x, m, v, z: (m, jnp.std(x, -1, keepdims=True) ** 2)), "other_statistic"),
    "a bounded deviation": (
        lambda x, g, b, z: (x - mean(x)) / jnp.maximum(x.std(-1, keepdims=True), EPS) * g,
        "other_statistic",
    ),
    "N - 1": (with_statistics(lambda x, m, v, z: moments_of(x, 1)), "ddof"),
    "ddof": (with_statistics(lambda x, m, v, z: (m, jnp.var(x, -1, keepdims=True, ddof=1))), "ddof"),
    "variance of another": (with_statistics(lambda x, m, v, z: (m, moments_of(z)[1])), "other_value"),
    "mean of another": (with_statistics(lambda x, m, v, z: (mean(z), v)), "other_value"),
    "mean over other axes": (with_statistics(lambda x, m, v, z: (mean(x, (-2, -1)), v)), "other_value"),
    "the second moment": (with_statistics(lambda x, m, v, z: (m, mean(x * x))), "second_moment"),
    "not centered": (lambda x, g, b, z: x * lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPS) * g, "not_centered"),
    "a stopped mean": (with_statistics(lambda x, m, v, z: (lax.stop_gradient(m), v)), "stopped_statistics"),
    "a stopped variance": (with_statistics(lambda x, m, v, z: (m, lax.stop_gradient(v))), "stopped_statistics"),
    "a stopped deviation": (
        lambda x, g, b, z: (x - mean(x)) * lax.stop_gradient(lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPS)) * g,
        "stopped_statistics",
    ),
    "statistics returned": (statistics_returned, "statistics_reused"),
    "a scale along other axes": (
        lambda x, g, b, z: x * (lax.rsqrt(mean(x * x) + EPS) * z[0, :, :1]),
        "scale_axes",
    ),
    "x over its length": (lambda x, g, b, z: x / jnp.linalg.norm(x, axis=-1, keepdims=True) * g, "sum_of_squares"),
    "x over its length, eps": (
        lambda x, g, b, z: x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + EPS) * g,
        "sum_of_squares",
    ),
    "a number inside": (lambda x, g, b, z: x * (2.0 * lax.rsqrt(mean(x * x) + EPS)) * g, "other_factor"),
}

#: Norms over other axes than trailing ones: batch norms.
BATCH_NORMS = {
    "over the middle axis": over(1),
    "batch norm": over((0, 1)),
    "instance norm": over((1,)),
    "group norm": group_norm,
    "standardized weights": lambda x, g, b, z: (
        (x - mean(x, (0, 1))) * lax.rsqrt(jnp.var(x, (0, 1), keepdims=True) + EPS)
    ),
}

REQUIREMENTS = (
    "axes",
    "length",
    "row_bytes",
    "arrays",
    "inputs",
    "results",
    "variance",
    "clamped",
    "statistics",
    "has_residual",
    "scale_axes",
    "bias_axes",
    "input_dtypes",
    "output_dtypes",
)


def _save(op, *inputs):
    return op.semantic.composite.save(op, inputs)


#: Kernels that run the equations, so that the operations are kept whole and differentiated by their composites.
KERNELS = aicf_jax.KERNELS + tuple(
    Kernel(
        f"plain_{name}",
        name,
        ("cpu",),
        dict.fromkeys(REQUIREMENTS, ANY),
        lambda op, *inputs: op.reference(*inputs),
        save=None if name.endswith("grad") else _save,
    )
    for name in ("layer_norm", "rms_norm", "layer_norm_grad", "rms_norm_grad")
)

X, Z = normal(0, 2, 3, 6), normal(1, 2, 3, 6)
G, B = 1 + 0.25 * normal(2, 6), normal(3, 6)
