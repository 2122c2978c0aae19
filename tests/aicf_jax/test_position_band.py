"""Masks from positions as limits on the distance of query and key: exactly what numpy says, or refused."""

import jax.numpy as jnp
import numpy as np
import pytest

import mcir
from aicf_jax.ops._position_band import Band, Unidentified, band

S, T = 24, 40


def read(mask, seen=True):
    """The band of a mask that chooses between two products."""

    def f(q, k):
        x = q @ k.T
        return jnp.where(mask(jnp.arange(S)[:, None], jnp.arange(T)[None]), x, 0.0)

    graph = mcir.trace(f, jnp.zeros((S, 8)), jnp.zeros((T, 8)))
    ((out, view),) = graph.outputs
    (query,), (key,) = view.dims
    predicate, false_case, _ = graph.values[out].args
    # `not` may have become the other order of the cases.
    return band(graph, predicate, query, key, seen == (graph.values[false_case].op == "constant"))


BANDS = {
    "i >= j": lambda i, j: i >= j,
    "j < i + 3": lambda i, j: j < i + 3,
    "i - j > 2": lambda i, j: i - j > 2,
    "j - i <= 7, not": lambda i, j: ~(j - i <= 7),
    "window": lambda i, j: (j <= i) & (i - j < 5),
    "outside of neither": lambda i, j: ~((j > i + 2) | (j < i - 4)),
    "as numbers": lambda i, j: (i >= j).astype(jnp.float32).astype(jnp.int32) != 0,
    "product of truth values": lambda i, j: (i >= j).astype(jnp.float32) * (i - j < 5).astype(jnp.float32) != 0,
    "as numbers, to truth": lambda i, j: (i >= j).astype(jnp.float32).astype(bool),
    "not, as numbers": lambda i, j: (i > j).astype(jnp.float32) == 0,
    "half a position": lambda i, j: j <= i.astype(jnp.float32) + 1.5,
    "less than half a position": lambda i, j: j - 0.5 > i.astype(jnp.float32),
    "negated positions": lambda i, j: -i <= -j + 3,
    "chosen": lambda i, j: jnp.where(i < j, False, True),
    "chosen the other way": lambda i, j: jnp.where(i < j, True, False),
    "and everything": lambda i, j: (i >= j) & (jnp.ones_like(i) > 0),
}


@pytest.mark.parametrize("name", BANDS)
@pytest.mark.parametrize("seen", [True, False])
def test_a_band(name, seen):
    mask = np.broadcast_to(np.asarray(BANDS[name](jnp.arange(S)[:, None], jnp.arange(T)[None])), (S, T)) == seen
    distance = np.arange(T) - np.arange(S)[:, None]
    inside = distance[mask]
    is_band = np.array_equal(mask, (distance >= inside.min()) & (distance <= inside.max()))
    if not is_band:
        with pytest.raises(Unidentified):
            read(BANDS[name], seen)
        return
    found = read(BANDS[name], seen)
    low, high = (d if x is None else x for x, d in ((found.lower, -np.inf), (found.upper, np.inf)))
    assert np.array_equal(mask, (distance >= low) & (distance <= high)), found


OTHERS = {
    "either side": lambda i, j: (j > i + 2) | (j < i - 4),
    "dilated": lambda i, j: 2 * i >= j,
    "sum of positions": lambda i, j: i + j < 30,
    "one key": lambda i, j: (j < 5) & (i >= 0),
    "even": lambda i, j: (j % 2 == 0) & (i >= 0),
    "blocks": lambda i, j: i // 4 >= j // 4,
    "equal": lambda i, j: i == j,
    "small integers, which may wrap": lambda i, j: i.astype(jnp.int8) >= j.astype(jnp.int8),
    "half precision, in which positions are rounded": lambda i, j: i.astype(jnp.bfloat16) >= j.astype(jnp.bfloat16),
    "the mask of a mask": lambda i, j: (i >= j) ^ (i >= j + 3),
}


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_is_refused(name):
    with pytest.raises(Unidentified):
        read(OTHERS[name])


def test_limits_meet():
    assert Band(lower=-3, upper=9) & Band(lower=-5, upper=4) & Band() == Band(-3, 4)
