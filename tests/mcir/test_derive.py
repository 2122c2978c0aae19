"""Derived programs: as text, and against the functions they come from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mcir
from mcir.derive import Derived, derive_bound
from mcir.interpret import interpret
from mcir.ir import Rematerialization, Stream
from tests.mcir.functions import CASES, scores

#: Unit roundoff, half the distance from 1 to the next number.
ROUNDOFF = {d: float(jnp.finfo(d).eps) / 2 for d in ("float64", "float32", "bfloat16", "float16")}
#: The longest sum is over 29 elements; each contributes its own rounding, as do about eight operations on it. Scores
#: are of magnitude up to 8, which exp turns from absolute into relative error.
WORST = 29 * 8
LOW = ("attention", "causal", "window", "grouped", "backward", "backward, causal", "logsumexp", "normalized late")
#: In the narrow type a result goes through this many roundings, one after the other, of values up to its own scale:
#: scores, weights, products, results, differences. Sums are in float32.
NARROW = 12


def wide(case, arrays):
    """The unfused function in float64, of the same numbers."""
    with jax.enable_x64(True):
        up = [x if x.dtype == "key<fry>" else jnp.asarray(np.asarray(x), "float64") for x in arrays]
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


def blocked(derived: Derived, block: int) -> Derived:
    """With blocks of this size along the axes that are cut anywhere."""
    program = derived.program
    looped = {a for loops, s in program.statements() for a in (*loops, *([s.axis] if isinstance(s, Stream) else []))}
    program = program.with_blocks(**dict.fromkeys(looped, block)).verify()
    return Derived(program, derived.arguments, derived.results, derived.graph)


def close(found, expected, room, name=""):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    scale = max(1.0, float(np.max(np.abs(expected[np.isfinite(expected)]), initial=0)))
    np.testing.assert_allclose(found, expected, rtol=room, atol=room * scale, err_msg=name)


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
def test_program(name, golden):
    derived = CASES[name].derived()
    golden(str(derived.program))
    assert mcir.parse(str(derived.program)) == derived.program


@pytest.mark.parametrize("name", CASES)
def test_equals_the_unfused_function(name):
    check(CASES[name], "float32", (1, 3, 7, 1000), ROUNDOFF["float32"] * WORST)


@pytest.mark.parametrize("name", ["attention", "backward, causal", "layer norm"])
def test_float64(name):
    with jax.enable_x64(True):
        check(CASES[name], "float64", (3,), ROUNDOFF["float64"] * WORST)


@pytest.mark.parametrize("name", LOW)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types_accumulate_in_float32(name, dtype):
    check(CASES[name], dtype, (3,), ROUNDOFF[dtype] * NARROW)


@pytest.mark.parametrize("name", CASES)
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


def test_the_second_pass_recomputes_what_the_first_did():
    statements = [s for _, s in CASES["layer norm of a product"].derived().program.statements()]
    assert sum(isinstance(s, Stream) for s in statements) == 2
    assert [s.op for s in statements if isinstance(s, Rematerialization)] == ["dot"]


def test_an_axis_is_cut_in_all_nests_or_in_none():
    """Delta sums over the features, which the main nest holds whole, be they ever so many."""
    program = mcir.attention_backward(heads=1, q_len=64, head_dim=16, value_dim=1000)
    assert program.axis("e").block == 1000
    assert all("e" not in nest.axes for nest in program.nests)


def test_derive_names_buffers_after_parameters_and_results():
    program = mcir.derive(
        lambda left, right: left @ right,
        jax.ShapeDtypeStruct((8, 9), "float32"),
        jax.ShapeDtypeStruct((9, 7), "float32"),
        name="product",
        results=("total",),
    )
    assert program.name == "product"
    assert [b.name for b in program.buffers] == ["left", "right", "total"]


def test_a_result_given_twice_is_one_buffer_in_two_layouts():
    def f(x, y):
        z = jax.nn.softmax(x @ y, axis=-1)
        return z, z.T, jnp.sum(z, axis=0)

    avals = jax.ShapeDtypeStruct((6, 4), "float32"), jax.ShapeDtypeStruct((4, 5), "float32")
    derived = derive_bound(f, *avals, results=("a", "b", "c"))
    assert [b.name for b in derived.program.role("output")] == ["a", "c"]
    arrays = [np.random.default_rng(0).standard_normal(a.shape).astype(np.float32) for a in avals]
    for x, expected in zip(mcir.lower(derived)(*map(jnp.asarray, arrays)), f(*arrays), strict=True):
        close(x, expected, ROUNDOFF["float32"] * WORST)


# -- refusals ----------------------------------------------------------------------------------------------------------

X = jax.ShapeDtypeStruct((6, 6), "float32")


@pytest.mark.parametrize(
    "code, function",
    [
        ("primitive", lambda x: jnp.sort(x, axis=-1)),
        ("primitive", lambda x: jnp.cumsum(x, axis=-1)),
        ("primitive", lambda x: x[jnp.arange(3)]),
        ("primitive", lambda x: jnp.concatenate([x, x])),
        ("primitive", lambda x: jax.lax.scan(lambda c, r: (c + r, c), x[0] * 0, x)[1]),
        ("reshape", lambda x: (x.reshape(4, 9) + 1).reshape(6, 6) + x),
        ("constant", lambda x: x + np.arange(6, dtype=np.float32)),
        ("axis_twice", lambda x: jnp.einsum("ij,ij->i", x, x.T @ x + x)),
    ],
    ids=["sort", "cumsum", "gather", "concatenate", "scan", "uneven reshape", "closed-over array", "diagonal"],
)
def test_refusals(code, function):
    with pytest.raises(mcir.DeriveError) as raised:
        mcir.derive(function, X)
    assert raised.value.code == code
    assert raised.value.expected
    assert raised.value.found


def test_empty_arrays_are_refused():
    with pytest.raises(mcir.DeriveError) as raised:
        mcir.derive(lambda x: jax.nn.softmax(x, axis=-1), jax.ShapeDtypeStruct((3, 0), "float32"))
    assert raised.value.code == "empty"


def test_nan_exactly_where_the_unfused_has_it():
    """Rows that see nothing: NaN under -inf; so are rows with a NaN or infinite score."""

    def f(q, k, v):
        seen = jnp.arange(11)[None] < jnp.arange(13)[:, None] - 3
        return jnp.einsum("hij,hje->hie", jax.nn.softmax(jnp.where(seen, scores(q, k), -jnp.inf), axis=-1), v)

    arrays = CASES["attention"].arrays()
    arrays[0] = arrays[0].at[0, 5].set(jnp.inf).at[1, 6].set(jnp.nan)
    derived = derive_bound(f, *arrays)
    for block in (1, 3, 7, 13):
        (found,) = mcir.lower(blocked(derived, block))(*arrays)
        expected = f(*arrays)
        assert np.isnan(expected[:, :4]).all()
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
        close(np.nan_to_num(found), np.nan_to_num(expected), ROUNDOFF["float32"] * WORST)
