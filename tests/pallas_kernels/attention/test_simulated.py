"""Attention in Mosaic GPU's simulator, against float64: right, and without a race."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _mosaic
from pallas_kernels.attention import forward, reference
from pallas_kernels.attention.cases import QUICK, SLOW
from tests.pallas_kernels.simulator import skip_what_it_lacks

#: float32's unit roundoff.
U32 = 2.0**-24

CASES = [
    *(pytest.param(c, id=name) for name, c in QUICK.items()),
    *(pytest.param(c, id=name, marks=pytest.mark.slow) for name, c in SLOW.items()),
]


def exactly(x):
    return np.asarray(x).astype(np.float64)


def off(found, wanted):
    """How far numbers are apart; nothing where both are the same infinity, or no number: rows that see nothing."""
    found = exactly(found)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where((found == wanted) | (np.isnan(found) & np.isnan(wanted)), 0, np.abs(found - wanted)))


def score_error(case, q, k, beside):
    """Of the scores in float32: a sum of D products, and a few roundings of the largest score and of biases."""
    by_heads = [
        np.abs(exactly(x)) if layout == "bhsd" else np.abs(exactly(x)).swapaxes(1, 2)
        for x, layout in zip((q, k), case.layouts, strict=False)
    ]
    largest = max(np.linalg.norm(x, axis=-1).max() for x in by_heads)
    biases = [np.abs(exactly(x)).max() for x in (beside["bias"], beside["key_bias"]) if x is not None]
    return U32 * ((case.head_dim + 8) * case.scale * largest**2 + 4 * abs(case.bias_factor) * sum(biases))


@pytest.mark.parametrize("case", CASES)
def test_forward(case):
    skip_what_it_lacks()
    q, k, v = case.arrays(jax.random.key(0))
    beside = case.beside(jax.random.key(1))
    found = forward(q, k, v, **beside, **case.options(), interpret=_mosaic.interpret())
    assert not _mosaic.races_found()
    with jax.enable_x64(True):
        args = [jnp.asarray(exactly(x)) for x in (q, k, v)]
        wanted = reference.forward(*args, **beside, **case.equation(), dtype=jnp.float64)
    out, m, total = map(np.asarray, wanted)
    assert found[0].dtype == case.dtype and len(found) == (3 if case.with_statistics else 1)
    # Weights are off by the error of their exponents, twice for their sum, and by their rounding for the product.
    dx, u = score_error(case, q, k, beside), float(jnp.finfo(case.dtype).eps) / 2
    weight_error = (2 * dx + u + (case.keys + 16) * U32) * case.equation()["keep_factor"]
    # Of a row the weights add up to 1, before dropout's factor.
    largest = np.abs(exactly(v)).max()
    tiny = case.keys * float(jnp.finfo(case.dtype).smallest_subnormal)
    assert np.all(off(found[0], out) <= (weight_error + u) * largest + tiny * largest)
    if case.with_statistics:
        with np.errstate(divide="ignore"):
            log_sum, log_sum_wanted = (exactly(a) + np.log(exactly(b)) for a, b in (found[1:], (m, total)))
        assert np.all(off(found[1], m) <= dx)
        assert np.all(off(log_sum, log_sum_wanted) <= 2 * dx + (case.keys + 16) * U32)
        assert found[1].dtype == found[2].dtype == jnp.float32 and found[1].shape == m.shape


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_row_with_an_infinite_score_is_nan():
    skip_what_it_lacks()
    case = QUICK["ragged, causal to the last key, shared heads"]
    q, k, v = case.arrays(jax.random.key(0))
    q = q.at[0, 3, 0].set(jnp.inf)
    (out, *_) = forward(q, k, v, **case.options(), interpret=_mosaic.interpret())
    rows = np.isnan(exactly(out)).all(-1)
    assert rows[0, 3, 0] and rows.sum() == 1
