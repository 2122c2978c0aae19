"""Attention's backward in Mosaic GPU's simulator, against float64: right, and without a race."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _mosaic
from pallas_kernels.attention import backward, reference
from pallas_kernels.attention.cases import Case
from pallas_kernels.attention.gradient_cases import QUICK, SLOW, SMALL
from tests.pallas_kernels.simulator import skip_what_it_lacks

#: float32's unit roundoff.
U32 = 2.0**-24

CASES = [
    *(pytest.param(c, id=name) for name, c in QUICK.items()),
    *(pytest.param(c, id=name, marks=pytest.mark.slow) for name, c in SLOW.items()),
]


def exactly(x):
    return np.asarray(x).astype(np.float64)


def by_heads(x, layout):
    return x if layout == "bhsd" else x.swapaxes(1, 2)


def laid_out(case, q, k, v, dout):
    """All by heads, with a head of K and V for each of Q."""
    q, k, v, dout = (by_heads(x, layout) for x, layout in zip((q, k, v, dout), case.layouts, strict=True))
    group = case.heads // case.kv_heads
    return q, np.repeat(k, group, 1), np.repeat(v, group, 1), dout


def bounds(case, q, k, v, dout, beside):
    """Errors of dQ, dK, dV and of the gradient of scores, from those of what they are computed from. All by heads."""
    u, tiny = float(jnp.finfo(case.dtype).eps) / 2, float(jnp.finfo(case.dtype).smallest_subnormal)
    d = case.head_dim
    z = q @ k.swapaxes(-1, -2) * case.scale
    x = z if case.softcap is None else case.softcap * np.tanh(z / case.softcap)
    biases = [case.bias_factor * exactly(beside["bias"])] if beside["bias"] is not None else []
    biases += [exactly(beside["key_bias"])[:, :, None]] if beside["key_bias"] is not None else []
    limits = case.queries, case.keys, case.lower, case.upper
    visible = np.asarray(reference.visible(*limits, beside["segments"], beside["mask"]))
    x = np.where(visible, sum(biases, x), case.fill)
    p = np.exp(x - x.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    f = 1.0 if beside["keep"] is None else np.asarray(reference.kept(beside["keep"])) * case.equation()["keep_factor"]
    out = (p * f) @ v
    dp, delta = f * (dout @ v.swapaxes(-1, -2)), (dout * out).sum(-1, keepdims=True)
    # Scores are sums of D products and scaled; the logarithm they are compared with is as large as they are. Beside
    # what is as low as a fill they are lost, here and in float64.
    dx = U32 * ((d + 16) * case.scale * norms(q) * norms(k) + 8 * sum(np.abs(b[b > -1e30]).max() for b in biases))
    e = 2 * dx + (case.keys + 16) * U32
    # O is rounded before delta is summed; P and the gradient of scores before products.
    d_delta = (u + d * U32) * (np.abs(dout) * np.abs(out)).sum(-1, keepdims=True)
    d_dp = f * (d + 2) * U32 * (np.abs(dout) @ np.abs(v).swapaxes(-1, -2))
    slope = 1.0 if case.softcap is None else 1 - np.tanh(z / case.softcap) ** 2
    d_slope = 0.0 if case.softcap is None else 8 * U32 + 4 * dx / case.softcap
    gradient = p * (dp - delta)
    # What shares a bias is added up.
    shared = case.batch * case.heads * case.queries * U32
    d_gradient = (e + shared) * np.abs(gradient) + p * (d_dp + d_delta)
    d_dz = d_gradient * slope + u * np.abs(gradient * slope) + np.abs(gradient) * d_slope + tiny
    terms = max(case.queries * case.heads // case.kv_heads, case.keys) * U32
    d_dz, d_p = d_dz + terms * np.abs(gradient * slope), (e + u + terms) * p + tiny
    # Weights below the lowest normal number of float32 may count as 0.
    least = float(jnp.finfo(jnp.float32).smallest_normal)
    lost = least * np.abs(dp - delta)
    d_dz, d_p, d_gradient = d_dz + lost, d_p + least, d_gradient + lost
    dq, dk = d_dz @ np.abs(k) * case.scale, d_dz.swapaxes(-1, -2) @ np.abs(q) * case.scale
    return dq, summed(case, dk), summed(case, (d_p * f).swapaxes(-1, -2) @ np.abs(dout)), d_gradient, u, tiny


def norms(x):
    return np.linalg.norm(x, axis=-1).max()


def summed(case, x):
    b, _, t, d = x.shape
    return x.reshape(b, case.kv_heads, -1, t, d).sum(2)


def given(case, beside):
    """``(arrays in float64, arguments of the kernel)``: statistics and O as a perfect forward leaves them."""
    q, k, v = case.arrays(jax.random.key(0))
    like = jax.random.normal(jax.random.key(1), (case.batch, case.queries, case.heads, case.head_dim))
    dout = by_heads(like, "bshd" if case.layouts[3] == "bhsd" else "bhsd").astype(case.dtype)
    exact = tuple(exactly(x) for x in (q, k, v, dout))
    with jax.enable_x64(True):
        found = reference.forward(*exact[:3], **beside, **case.equation(), dtype=jnp.float64)
        out, m, total = map(np.asarray, found)
    out = jnp.asarray(out.astype(np.float32)).astype(case.dtype)
    return exact, (q, k, v, out, *(jnp.asarray(x, jnp.float32) for x in (m, total)), dout)


def simulated(case, args, beside):
    config = SMALL if case.head_dim == 64 else None
    wanted = [name for name in ("bias", "key_bias") if beside[name] is not None]
    return backward(*args, **beside, **case.equation(), wanted=wanted, config=config, interpret=_mosaic.interpret())


@pytest.mark.parametrize("case", CASES)
def test_backward(case):
    agrees(case, case.beside(jax.random.key(2)))


@pytest.mark.slow
def test_a_row_that_sees_only_what_a_bias_makes_as_low_as_the_fill():
    case = Case(1, 72, 200, upper=20, key_bias=True, fill=float(jnp.finfo(jnp.float32).min))
    beside = case.beside(jax.random.key(2))
    agrees(case, {**beside, "key_bias": beside["key_bias"].at[..., :40].set(case.fill)})


def agrees(case, beside):
    skip_what_it_lacks()
    exact, args = given(case, beside)
    found = simulated(case, args, beside)
    assert not _mosaic.races_found()
    with jax.enable_x64(True):
        wanted = reference.backward(*exact, **beside, **case.equation(), dtype=jnp.float64)
        wanted = [None if x is None else np.asarray(x) for x in wanted]
    *errors, d_gradient, u, tiny = bounds(case, *laid_out(case, *exact), beside)
    for x, like, want, error, layout in zip(found[:3], args, wanted, errors, case.layouts, strict=False):
        assert x.dtype == like.dtype and x.shape == like.shape
        x, want = by_heads(exactly(x), layout), by_heads(want, layout)
        assert np.all(np.abs(x - want) <= error + u * (np.abs(want) + error) + tiny)
    biases = [
        (beside["bias"], wanted[3], d_gradient * abs(case.bias_factor)),
        (beside["key_bias"], wanted[4], d_gradient.sum(2)),
    ]
    biases = [x for x in biases if x[0] is not None]
    for x, (like, want, error) in zip(found[3:], biases, strict=True):
        assert x.dtype == like.dtype and x.shape == like.shape
        u = float(jnp.finfo(like.dtype).eps) / 2
        error = error.sum(tuple(i for i, n in enumerate(like.shape) if n == 1 < error.shape[i]), keepdims=True)
        assert np.all(np.abs(exactly(x) - want) <= error + u * (np.abs(want) + error))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_row_that_is_nan_is_so_in_all_gradients_it_enters():
    skip_what_it_lacks()
    case = QUICK["ragged, causal to the last key, shared heads"]
    beside = case.beside(jax.random.key(2))
    _, (q, k, v, out, m, total, dout) = given(case, beside)
    dq, dk, dv = simulated(case, (q, k, v, out, m, total.at[0, 0, 3].set(jnp.nan), dout), beside)
    rows = np.isnan(exactly(dq)).all(-1)
    assert rows[0, 3, 0] and rows.sum() == 1
    # The keys of the first CTA, which visits the query; no query that the second one visits is NaN.
    for x in (dk, dv):
        assert np.isnan(exactly(x[:, :128])).all() and not np.isnan(exactly(x[:, 128:])).any()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_row_that_sees_nothing_without_a_fill_is_nan_where_it_is_so_unfused():
    skip_what_it_lacks()
    case = Case(1, 72, 136, segments=True, blind=True)
    beside = case.beside(jax.random.key(2))
    exact, args = given(case, beside)
    found = [np.isnan(exactly(x)) for x in simulated(case, args, beside)]
    with jax.enable_x64(True):
        wanted = reference.backward(*exact, **beside, **case.equation(), dtype=jnp.float64)[:3]
        wanted = [np.isnan(np.asarray(x)) for x in wanted]
    assert [x.any() for x in wanted] == [False, False, True]
    assert all(np.array_equal(x, want) for x, want in zip(found, wanted, strict=True))
