"""Small graphs at random: pointwise operations around reductions. Lowered, interpreted and unfused agree."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

import mcir
from mcir.derive import derive_bound
from mcir.interpret import interpret
from tests.mcir.functions import ROUNDOFF, blocked, close

N, M, K = 5, 7, 3
SHAPES = ((N, M), (N, 1), (M,), (M, K))

UNARY = {
    "tanh": jnp.tanh,
    "logistic": jax.nn.sigmoid,
    "square": jnp.square,
    "negative": jnp.negative,
    "relu": jax.nn.relu,
    "exp": lambda x: jnp.exp(jnp.tanh(x)),  # bounded, so that errors stay proportional to what is computed
}
BINARY = {"add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "max": jnp.maximum}
REDUCE = {
    "softmax": lambda x, w: jax.nn.softmax(x, axis=-1),
    "softmax, rows": lambda x, w: jax.nn.softmax(x, axis=0),
    "logsumexp": lambda x, w: jax.nn.logsumexp(x, axis=-1),
    "sum": lambda x, w: jnp.sum(x, axis=-1),
    "sum, all": lambda x, w: jnp.sum(x),
    "max": lambda x, w: jnp.max(x, axis=-1, keepdims=True),
    "min": lambda x, w: jnp.min(x, axis=0),
    "mean": lambda x, w: x - jnp.mean(x, axis=-1, keepdims=True),
    "variance": lambda x, w: jnp.var(x, axis=-1),
    "dot": lambda x, w: x @ w,
    "attend": lambda x, w: jax.nn.softmax(x, axis=-1) @ w,
}


@st.composite
def functions(draw):
    """``(x [n, m], column [n, 1], row [m], w [m, k])`` to one or two results."""
    before = draw(st.lists(st.one_of(st.sampled_from(sorted(UNARY)), st.sampled_from(sorted(BINARY))), max_size=3))
    sides = draw(st.lists(st.sampled_from([1, 2]), min_size=3, max_size=3))
    reduce = draw(st.sampled_from(sorted(REDUCE)))
    after = draw(st.lists(st.sampled_from(sorted(UNARY)), max_size=2))
    masked, both = draw(st.booleans()), draw(st.booleans())

    def function(x, column, row, w):
        y = x
        for name, side in zip(before, sides, strict=False):
            y = UNARY[name](y) if name in UNARY else BINARY[name](y, (column, row)[side - 1])
        if masked:
            y = jnp.where(jnp.arange(N)[:, None] + 1 >= jnp.arange(M), y, -30.0)
        z = REDUCE[reduce](y, w)
        for name in after:
            z = UNARY[name](z)
        return (z, jnp.max(y, axis=-1)) if both else z

    function.description = (before, sides, masked, reduce, after, both)
    return function


@hypothesis.settings(max_examples=8)
@hypothesis.given(functions(), st.sampled_from([1, 2, 3, 4, 100]))
def test_all_agree(function, block):
    hypothesis.note(str(function.description))
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal(s), "float32") for s in SHAPES]
    derived = blocked(derive_bound(function, *arrays), block)
    found = jax.jit(mcir.lower(derived))(*arrays)
    # Sums of 35 elements; up to eight operations, each of which may double the error of its argument.
    room = ROUNDOFF["float32"] * 35 * 2**8
    for a, b in zip(found, jax.tree.leaves(function(*arrays)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        close(a, b, room)
    program = derived.program
    ordered = [np.asarray(x) for x in program_inputs(derived, arrays)]
    lowered = jax.jit(mcir.lower_program(program))(*ordered)
    for a, b in zip(lowered, interpret(program, *ordered), strict=True):
        close(a, b, room)


def program_inputs(derived, arrays):
    """The arrays as the program wants them: one dimension for each axis, in its order."""
    for (k, view), buffer in zip(derived.arguments, derived.program.role("input"), strict=True):
        axes = [a for dim in view.dims for a in dim]
        array = arrays[k].reshape([derived.program.axis(a).size for a in axes])
        yield array.transpose([axes.index(a) for a in buffer.type.axes])
