"""Derived programs as text, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mcir
from mcir.derive import derive_bound
from mcir.ir import Rematerialization, Stream
from tests.mcir.functions import CASES, ROUNDOFF, WORST, close


@pytest.mark.parametrize("name", CASES)
def test_program(name, golden):
    derived = CASES[name].derived()
    golden(str(derived.program))
    assert mcir.parse(str(derived.program)) == derived.program


def test_the_second_pass_recomputes_what_the_first_did():
    statements = [s for _, s in CASES["layer norm of a product"].derived().program.statements()]
    assert sum(isinstance(s, Stream) for s in statements) == 2
    assert [s.op for s in statements if isinstance(s, Rematerialization)] == ["dot"]


def test_an_axis_is_cut_in_all_nests_or_in_none():
    """Delta sums over the features, which the main nest holds whole, be they ever so many."""
    program = mcir.attention_backward(heads=1, q_len=2000, head_dim=16, value_dim=1000)
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
    for x, expected in zip(jax.jit(mcir.lower(derived))(*arrays), jax.jit(f)(*arrays), strict=True):
        close(x, expected, ROUNDOFF["float32"] * WORST)


# -- refusals ----------------------------------------------------------------------------------------------------------

X = jax.ShapeDtypeStruct((6, 6), "float32")


def symmetric(z):
    """One array in two layouts of one operation: its rows and columns would be the same loop."""
    return jnp.sum(z * z.T)


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
        ("axis_twice", lambda x: symmetric(x @ x.T)),
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
