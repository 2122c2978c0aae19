"""Derived programs against the functions they come from, in float64, and against the interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mcir
from mcir.derive import derive_bound
from mcir.interpret import interpret
from tests.mcir.functions import CASES, ROUNDOFF, WORST, blocked, close, scores

LOW = [("bfloat16", n) for n in ("window", "backward, causal", "logsumexp")] + [("float16", "attention")]
#: In the narrow type a result goes through this many roundings, one after the other, of values up to its own scale:
#: scores, weights, products, results, differences. Sums are in float32.
NARROW = 12


def wide(case, arrays):
    """The unfused function in float64, of the same numbers."""
    random = any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in arrays)
    with jax.enable_x64(not random):  # in float64 the same key gives other bits
        up = arrays if random else [jnp.asarray(np.asarray(x), "float64") for x in arrays]
        out = jax.jit(case.function)(*up)
        return [np.asarray(x) for x in jax.tree.leaves(out)]


def inputs(case, dtype="float32"):
    """Random arrays; for a backward, out, m and l are those that belong to them."""
    arrays = case.arrays(dtype)
    if case.results == ("dq", "dk", "dv"):
        problem = case.function.__closure__[0].cell_contents
        q, k, v, *_, dout = arrays
        arrays = [q, k, v, *jax.jit(problem.forward(True))(q, k, v), dout]
    return arrays


def check(case, dtype, blocks, room):
    derived, arrays = case.derived(dtype), inputs(case, dtype)
    programs = [mcir.lower(blocked(derived, b)) for b in blocks]
    found = jax.jit(lambda *xs: [program(*xs) for program in programs])(*arrays)
    like = jax.tree.leaves(jax.eval_shape(case.function, *arrays))
    for b, results in zip(blocks, found, strict=True):
        for x, expected, aval in zip(results, wide(case, arrays), like, strict=True):
            assert (x.shape, x.dtype) == (aval.shape, aval.dtype)
            close(x, expected, room, f"blocks of {b}")


@pytest.mark.parametrize("name", CASES)
def test_equals_the_unfused_function(name):
    check(CASES[name], "float32", (3,), ROUNDOFF["float32"] * WORST)


@pytest.mark.parametrize("name", ["causal", "backward, causal", "layer norm"])
def test_equals_the_unfused_function_in_any_blocks(name):
    check(CASES[name], "float32", (1, 7, 1000), ROUNDOFF["float32"] * WORST)


@pytest.mark.parametrize("name", ["attention", "backward, causal", "layer norm"])
def test_float64(name):
    with jax.enable_x64(True):
        check(CASES[name], "float64", (3,), ROUNDOFF["float64"] * WORST)


@pytest.mark.parametrize("dtype, name", LOW)
def test_narrow_types_accumulate_in_float32(name, dtype):
    check(CASES[name], dtype, (3,), ROUNDOFF[dtype] * NARROW)


@pytest.mark.parametrize("name", ["causal", "layer norm"])
def test_equals_the_interpreter(name):
    derived = blocked(CASES[name].derived(), 7)
    rng = np.random.default_rng(1)
    arrays = []
    for buffer in derived.program.role("input"):
        shape = [derived.program.axis(a).size for a in buffer.type.axes]
        key = buffer.type.dtype == "uint32"
        arrays.append(jax.random.key_data(jax.random.key(3)) if key else rng.random(shape).astype(np.float32) + 0.5)
    lowered = jax.jit(mcir.lower_program(derived.program))(*map(jnp.asarray, arrays))
    for a, b in zip(lowered, interpret(derived.program, *arrays), strict=True):
        close(a, b, ROUNDOFF["float32"] * WORST)


def test_nan_exactly_where_the_unfused_has_it():
    """Rows that see nothing: NaN under -inf; so are rows with a NaN or infinite score."""

    def f(q, k, v):
        seen = jnp.arange(11)[None] < jnp.arange(13)[:, None] - 3
        return jnp.einsum("hij,hje->hie", jax.nn.softmax(jnp.where(seen, scores(q, k), -jnp.inf), axis=-1), v)

    arrays = CASES["normalized late"].arrays()
    arrays[0] = arrays[0].at[0, 5].set(jnp.inf).at[1, 6].set(jnp.nan)
    derived, expected = derive_bound(f, *arrays), jax.jit(f)(*arrays)
    assert np.isnan(expected[:, :4]).all()
    for block in (3, 7):
        (found,) = jax.jit(mcir.lower(blocked(derived, block)))(*arrays)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
        close(np.nan_to_num(found), np.nan_to_num(expected), ROUNDOFF["float32"] * WORST)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.sum(x * x),
        lambda x: jnp.sum(jax.nn.softmax(x @ x.T, axis=-1) * 2),
        lambda x: (jnp.sum(x * x), jnp.sum(x, axis=0)),
        lambda x: jnp.trace(x @ x),
        lambda x: jax.nn.softmax(x, axis=(0, 1)),
        lambda x: (jnp.max(x), jnp.min(x, axis=1)),
        lambda x: (x - jnp.mean(x)) / jnp.sqrt(jnp.var(x) + 1e-3),
    ],
    ids=["sum", "sum of softmax", "sums", "trace", "softmax", "max and min", "normalize"],
)
def test_reductions_over_tiled_axes(function):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((7, 7)), "float32")
    derived, expected = derive_bound(function, x), jax.tree.leaves(jax.jit(function)(x))
    for a, b in zip(jax.jit(mcir.lower(blocked(derived, 3)))(x), expected, strict=True):
        close(a, b, ROUNDOFF["float32"] * 49)


def test_quotients_of_integer_sums_are_those_of_the_whole_sum():
    """Multiples of float sums are added up tile by tile; an integer's quotient is rounded, each part's would be."""

    def f(x, y):
        p = x @ y
        return jax.lax.div(jnp.sum(p, 0), jnp.int32(7)), jnp.sum(p, 1) * 3

    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.integers(-9, 9, shape), jnp.int32) for shape in ((29, 4), (4, 23)))
    for block in (3, 8):
        for found, want in zip(mcir.lower(blocked(derive_bound(f, x, y), block))(x, y), f(x, y), strict=True):
            np.testing.assert_array_equal(found, want)
