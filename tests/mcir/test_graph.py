"""One axis of a computation graph as two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mcir
from mcir.derive import from_graph
from mcir.graph import split
from mcir.lower_jax import lower

ROWS = jax.ShapeDtypeStruct((12, 5), jnp.float32)
COLUMN = jax.ShapeDtypeStruct((12,), jnp.float32)


def total(x, y):
    return (jnp.sum(jnp.exp(x) * y[:, None]),)


def axis_of_rows(graph):
    return next(v.dims[0][0] for i, v in graph.views.items() if len(v.shape) == 1)


def test_the_function_stays_the_same():
    graph = mcir.trace(total, ROWS, COLUMN)
    parts = split(graph, axis_of_rows(graph), 4)
    assert sorted(parts.axes.values()) == [3, 4, 5]
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((12, 5), np.float32), generator.standard_normal(12, np.float32)
    (found,) = lower(from_graph(parts, "total"))(x, y)
    # 60 terms in another order
    np.testing.assert_allclose(found, total(x, y)[0], rtol=60 * 2**-23)


def test_a_size_that_does_not_divide_is_refused():
    graph = mcir.trace(total, ROWS, COLUMN)
    with pytest.raises(ValueError, match=r"expected a divisor of \w+, of size 12, found 5"):
        split(graph, axis_of_rows(graph), 5)


def test_an_axis_with_positions_is_refused():
    graph = mcir.trace(lambda y: (jnp.sum(y * jnp.arange(12)),), COLUMN)
    with pytest.raises(ValueError, match="found positions along"):
        split(graph, axis_of_rows(graph), 4)
