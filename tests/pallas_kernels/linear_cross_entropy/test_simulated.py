"""Vocabulary losses in Mosaic GPU's simulator, against float64: right, and without a race."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _mosaic
from pallas_kernels.linear_cross_entropy import backward, forward, reference
from pallas_kernels.linear_cross_entropy.cases import QUICK, SLOW
from tests.pallas_kernels.simulator import skip_what_it_lacks

#: float32's unit roundoff.
U32 = 2.0**-24

CASES = [
    *(pytest.param(c, id=name) for name, c in QUICK.items()),
    *(pytest.param(c, id=name, marks=pytest.mark.slow) for name, c in SLOW.items()),
]


def skip_what_is_not_simulated(case):
    skip_what_it_lacks(bounds=case.is_ragged, transposes=case.trans_w)


def exactly(x):
    return np.asarray(x).astype(np.float64)


def matrices(case, key=0):
    x, w, labels = case.arrays(jax.random.key(key))
    return x, w, labels, exactly(x), exactly(w).T if case.trans_w else exactly(w)


def logit_error(case, x, w):
    """Of logits in float32: sums of D products, and a few roundings of the largest one."""
    return (case.depth + 8) * U32 * case.scale * np.linalg.norm(x, axis=1).max() * np.linalg.norm(w, axis=0).max()


def largest(case, x, w):
    found = case.scale * np.abs(x @ w).max()
    return found if case.softcap is None else min(found, case.softcap)


def exponent_error(case, x, w):
    """Of exponents ``base (x - m)``: twice that of a logit, and roundings of the two that are subtracted."""
    return case.base * (2 * logit_error(case, x, w) + 8 * U32 * largest(case, x, w))


@pytest.mark.parametrize("case", [c for c in CASES if c.values[0].wanted == (True, True)])
def test_forward(case):
    skip_what_is_not_simulated(case)
    x, w, labels, x64, w64 = matrices(case)
    found = forward(
        x, w, labels, **case.equation(), with_sum=case.with_sum, config=case.forward, interpret=_mosaic.interpret()
    )
    assert not _mosaic.races_found()
    with jax.enable_x64(True):
        args = (jnp.asarray(a) for a in (x64, exactly(w)))
        want = reference.forward(*args, labels, **case.equation(), dtype=jnp.float64)
        m, l, taken, total = (np.asarray(a) for a in want)
    error = logit_error(case, x64, w64) + 4 * U32 * largest(case, x64, w64)
    assert all(v.dtype == jnp.float32 and v.shape == (case.rows,) for v in found if v is not None)
    assert np.all(np.abs(exactly(found.m) - m) <= error)
    assert np.all(np.abs(exactly(found.taken) - taken) <= error)
    # Of two parts of the vocabulary, whose sums are corrected once more.
    relative = 2 * exponent_error(case, x64, w64) + (case.classes + 16) * U32
    assert np.all(np.abs(exactly(found.l) - l) <= np.expm1(relative) * l)
    assert (found.sum is None) != case.with_sum
    if case.with_sum:
        allowed = case.classes * (error + case.classes * U32 * largest(case, x64, w64))
        assert np.all(np.abs(exactly(found.sum) - total) <= allowed)


@pytest.mark.parametrize("case", CASES)
def test_backward(case):
    skip_what_is_not_simulated(case)
    x, w, labels, x64, w64 = matrices(case)
    with jax.enable_x64(True):
        args = [jnp.asarray(a) for a in (x64, exactly(w))]
        m, l, _, _ = reference.forward(*args, labels, **case.equation(), dtype=jnp.float64)
        m, l = (np.asarray(a).astype(np.float32) for a in (m, l))
    dl, *more = case.cotangents(jax.random.key(1))
    numbers = m, dl / l, *more
    found = backward(
        x, w, labels, *numbers, **case.equation(), wanted=case.wanted, config=case.backward,
        interpret=_mosaic.interpret(),
    )  # fmt: skip
    assert not _mosaic.races_found()
    with jax.enable_x64(True):
        given = [jnp.asarray(exactly(a)) for a in numbers]
        want = reference.backward(*args, labels, *given, **case.equation(), dtype=jnp.float64)
        want = [np.asarray(a) for a in want]
        z = case.scale * x64 @ w64
        z = z if case.softcap is None else case.softcap * np.tanh(z / case.softcap)
    # Terms of the logits' gradient, each as large as it can be, and how far they are off.
    u = float(jnp.finfo(case.dtype).eps) / 2
    at_label = np.asarray(labels)[:, None] == np.arange(case.classes)
    e = np.exp(case.base * (z - exactly(m)[:, None])) * np.abs(exactly(numbers[1]))[:, None] * case.base
    rest = np.where(at_label, np.abs(exactly(more[0]))[:, None], 0.0)
    rest = rest + (np.abs(exactly(more[1]))[:, None] if case.with_sum else 0.0)
    slope = 0.0 if case.softcap is None else 2 * (logit_error(case, x64, w64) / case.softcap + 8 * U32)
    off = case.scale * (np.expm1(exponent_error(case, x64, w64)) * e + (slope + u + 8 * U32) * (e + rest))
    tiny = max(float(jnp.finfo(case.dtype).smallest_subnormal), float(jnp.finfo(jnp.float32).tiny))
    off = off + tiny  # what is smaller is 0
    size = case.scale * (e + rest)
    bounds = (
        off @ np.abs(w64).T + case.classes * U32 * size @ np.abs(w64).T,
        np.abs(x64).T @ off + case.rows * U32 * np.abs(x64).T @ size,
    )
    for name, got, exact, bound, wanted in zip("xw", found, want, bounds, case.wanted, strict=True):
        assert (got is not None) == wanted
        if got is not None:
            bound = bound.T if name == "w" and case.trans_w else bound
            bound = bound + u * np.abs(exact) + tiny
            assert got.dtype == case.dtype and got.shape == exact.shape
            assert np.all(np.abs(exactly(got) - exact) <= bound), np.max(np.abs(exactly(got) - exact) / bound)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_row_with_an_infinite_logit_is_as_the_log_sum_exp_of_jax_has_it():
    case = SLOW["whole tiles"]
    x, w, labels = case.arrays(jax.random.key(0))
    x = x.at[3].set(0.0).at[3, 0].set(jnp.inf)
    w = w.at[0].set(1.0)
    found = forward(x, w, labels, config=case.forward, interpret=_mosaic.interpret())
    assert found.m[3] == jnp.inf and not np.isfinite(found.l[3])
    assert np.isfinite(np.delete(exactly(found.l), 3)).all() and np.isfinite(np.delete(exactly(found.m), 3)).all()


@pytest.mark.slow
def test_gradients_are_the_same_bits_on_every_run():
    case = SLOW["whole tiles"]
    x, w, labels = case.arrays(jax.random.key(0))
    numbers = (jnp.full((case.rows,), 8.0), *case.cotangents(jax.random.key(1)))
    runs = [backward(x, w, labels, *numbers, config=case.backward, interpret=_mosaic.interpret()) for _ in "ab"]
    assert all(np.array_equal(exactly(a), exactly(b)) for a, b in zip(*runs, strict=True))
