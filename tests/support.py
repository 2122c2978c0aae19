"""Arrays, comparison and transformations for tests that hold a fused program against its unfused twin.

Tolerances are derived, never tuned: a result that passed through `roundings` roundings in a row differs from the
same real-number function, rounded in another order, by at most about `roundings * unit_roundoff` of its magnitude.
"""

import jax
import jax.numpy as jnp
import numpy as np

from aicf_jax.kernels import ANY

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# An activation is a short chain of roundings (gelu: about a dozen, around an erf or tanh of a few units in the last
# place); its derivatives are of similar length.
ACTIVATION_ROUNDINGS = 24

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu_exact": lambda z: jax.nn.gelu(z, approximate=False),
    "gelu_tanh": lambda z: jax.nn.gelu(z, approximate=True),
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "elu": jax.nn.elu,
    "leaky_relu": jax.nn.leaky_relu,
    "softplus": jax.nn.softplus,
    "none": lambda z: z,
}


def dense(activation):
    """`act(x @ w + b)`, the program the first fused family is about."""
    act = ACTIVATIONS[activation]

    def dense(x, w, b):
        return act(x @ w + b)

    return dense


# -- arrays -------------------------------------------------------------------------------------------------------


def normal(seed, *shape, dtype=jnp.float32, scale=1.0):
    """Normal numbers from numpy, so no jax random flag changes them; drawn in float64, then rounded once."""
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def dyadic(seed, *shape, dtype=jnp.float32):
    """Multiples of 1/4 in [-1, 1]: short sums of products are exact in every float dtype, even bfloat16.

    With them a pre-activation is the same number in any order of summation, so a kink (relu at 0) is never decided
    by a rounding, and values exactly on the kink occur.
    """
    return jnp.asarray(np.random.default_rng(seed).integers(-4, 5, shape) / 4.0).astype(dtype)


def dense_args(m=5, k=8, n=4, dtype=jnp.float32, draw=normal):
    return draw(1, m, k, dtype=dtype), draw(2, k, n, dtype=dtype), draw(3, n, dtype=dtype)


def key(seed):
    """A key for initializers: the default generator, unrolled for each parameter, would take seconds to compile."""
    return jax.random.key(seed, impl="unsafe_rbg")


def is_inexact(x):
    dtype = getattr(x, "dtype", None)
    return dtype is not None and dtype != jax.dtypes.float0 and jnp.issubdtype(dtype, jnp.inexact)


def tangents_like(tree, seed=50):
    """One random tangent (or cotangent) per leaf: float0 zeros for integer leaves."""
    leaves, treedef = jax.tree.flatten(tree)
    tangents = [
        normal(seed + i, *jnp.shape(x), dtype=x.dtype) if is_inexact(x) else np.zeros(jnp.shape(x), jax.dtypes.float0)
        for i, x in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, tangents)


def quick_jit(f, **options):
    """`jax.jit` without LLVM's optimizations: programs here run once, and compiling them is what takes the time."""
    fast = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(f, compiler_options=fast, **options)


# -- comparison ---------------------------------------------------------------------------------------------------


def _numpy(x):
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def _magnitude(x):
    x = _numpy(x).astype(np.float64)
    return float(np.max(np.abs(x), where=np.isfinite(x), initial=0.0))


def assert_same(fused, unfused, *, roundings=1, dtype=None):
    """Same tree, and leaf by leaf same shape, dtype, weak type, NaN and infinity positions, and values.

    Values agree to `2 * roundings * unit_roundoff` (two results, each that far from the exact one) relative to the
    largest magnitude in the leaf, because the error of a sum follows its largest term. A leaf that is far smaller
    than the whole result (the gradient of a bias in front of a normalization is mathematically zero) is what is left
    of cancelled terms of that size, hence the floor of 1/32 of the largest leaf. `dtype` names the lowest precision
    used inside when no output has it. Integers, booleans and keys agree exactly; `roundings=0` asks that of floats.
    """
    assert jax.tree.structure(fused) == jax.tree.structure(unfused)
    pairs = list(zip(jax.tree_util.tree_leaves_with_path(fused), jax.tree.leaves(unfused), strict=True))
    floor = max((_magnitude(want) for _, want in pairs if is_inexact(want)), default=0.0) / 32
    for (path, got), want in pairs:
        where = jax.tree_util.keystr(path) or "result"
        if not hasattr(want, "dtype"):
            assert type(got) is type(want) and got == want, f"{where}: {got!r} instead of {want!r}"
            continue
        assert got.shape == want.shape, f"{where}: shape {got.shape} instead of {want.shape}"
        assert got.dtype == want.dtype, f"{where}: dtype {got.dtype} instead of {want.dtype}"
        assert getattr(got, "weak_type", False) == getattr(want, "weak_type", False), f"{where}: weak type differs"
        if want.dtype == jax.dtypes.float0:
            continue
        if roundings == 0 or not is_inexact(want):
            np.testing.assert_array_equal(_numpy(got), _numpy(want), err_msg=where)
            continue
        roundoff = max(UNIT_ROUNDOFF[str(jnp.dtype(d))] for d in (want.dtype, dtype or want.dtype))
        got, want = _numpy(got).astype(np.float64), _numpy(want).astype(np.float64)
        atol = 2 * roundings * roundoff * max(_magnitude(want), floor)
        # assert_allclose compares NaN and infinity positions exactly
        np.testing.assert_allclose(got, want, rtol=0, atol=atol, err_msg=where)


#: Capabilities of a kernel that takes every gemm_epilogue.
EVERY_GEMM_EPILOGUE = dict.fromkeys(
    [
        "activation",
        "has_bias",
        "bias_along",
        "batched",
        "trans_a",
        "trans_b",
        "operand_dtypes",
        "output_dtype",
        "product_dtype",
        "precision",
        "matrices",
        "formula",
        "steps",
    ],
    ANY,
)
