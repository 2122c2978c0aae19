"""Equations that XLA's CPU compiler makes one kernel of run as they are where no gradients are wanted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import aicf_jax
from aicf_jax import _compat
from aicf_jax.ops import _attention_whole

B, S, H, D = 2, 64, 8, 8
Q, K, V = (jnp.asarray(np.random.default_rng(n).normal(size=(B, H, S, D)), jnp.float32) for n in range(3))
HEADS_FIRST = (0, 2, 1, 3)


def plain(q, k, v):
    return jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v


def transposed(q, k, v):
    q, k, v = (x.transpose(HEADS_FIRST) for x in (q, k, v))
    return plain(q / jnp.sqrt(D), k, v).transpose(HEADS_FIRST)


def softmax_in_float32(q, k, v):
    return jax.nn.softmax((q @ k.swapaxes(-1, -2) * 0.125).astype(jnp.float32)).astype(q.dtype) @ v


def masked(q, k, v):
    x = q @ k.swapaxes(-1, -2)
    return jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((S, S), bool)), x, -jnp.inf)) @ v


def by_logsumexp(q, k, v):
    """It chooses 0 in place of a maximum that is not finite."""
    x = q @ k.swapaxes(-1, -2)
    return jnp.exp(x - jax.nn.logsumexp(x, -1, keepdims=True)) @ v


#: Whether it is one kernel of XLA's.
CASES = {
    "plain": (plain, True),
    "transposed": (transposed, True),
    "scaled": (lambda q, k, v: jax.nn.softmax(q @ k.swapaxes(-1, -2) * 0.5) @ v, True),
    "softmax in float32": (softmax_in_float32, True),
    "keys transposed before": (lambda q, k, v: jax.nn.softmax(q @ k.reshape(B, H, D, S)) @ v, True),
    "masked": (masked, False),
    "biased": (lambda q, k, v: jax.nn.softmax(q @ k.swapaxes(-1, -2) + jnp.ones((S, S)) * q[0, 0, 0, 0]) @ v, False),
    "a temperature for each head": (
        lambda q, k, v: jax.nn.softmax(q @ k.swapaxes(-1, -2) * q[0, :, :1, :1]) @ v,
        False,
    ),
    "capped": (lambda q, k, v: jax.nn.softmax(jnp.tanh(q @ k.swapaxes(-1, -2))) @ v, False),
    "weights of the keys": (lambda q, k, v: jax.nn.softmax(k @ q.swapaxes(-1, -2), -2).swapaxes(-1, -2) @ v, False),
    "logsumexp": (by_logsumexp, False),
    "log-softmax": (lambda q, k, v: jnp.exp(jax.nn.log_softmax(q @ k.swapaxes(-1, -2))) @ v, True),
    "values first": (lambda q, k, v: jnp.einsum("bhij,bhjd->bihd", jax.nn.softmax(q @ k.swapaxes(-1, -2)), v), False),
    "heads behind positions": (linen.dot_product_attention, True),
    "one batch": (lambda q, k, v: linen.dot_product_attention(q[:1], k[:1], v[:1]), False),
    "one batch of matrices": (lambda q, k, v: transposed(q[:1], k[:1], v[:1]), True),
    "shared heads": (lambda q, k, v: jax.nn.dot_product_attention(q, k[:, :, :4], v[:, :, :4]), False),
}


@pytest.fixture
def fuses(monkeypatch):
    monkeypatch.setattr(_compat, "XLA_FUSES_ATTENTION", True)
    monkeypatch.setattr(_attention_whole, "_LEAST_SCORES", 0)
    aicf_jax.clear_caches()


@pytest.mark.parametrize("name", CASES)
def test_which_are(name, fuses, monkeypatch):
    f, want = CASES[name]
    asked = []

    def told(op):
        asked.append(_attention_whole.is_one_kernel_of_xla(op))
        return asked[-1]

    monkeypatch.setattr("aicf_jax.kernels.streamed_attention.is_one_kernel_of_xla", told)
    found = jax.jit(aicf_jax.fuse(f))(Q, K, V)
    assert asked and set(asked) == {want}
    # sums of 64 terms, twice, of values up to about 4
    np.testing.assert_allclose(found, jax.jit(f)(Q, K, V), rtol=0, atol=256 * 2**-24)


def test_not_of_few_scores(fuses, monkeypatch):
    for least, is_loop in ((B * H * S * S, False), (B * H * S * S + 1, True)):
        monkeypatch.setattr(_attention_whole, "_LEAST_SCORES", least)
        aicf_jax.clear_caches()
        assert ("while" in jax.jit(aicf_jax.fuse(plain)).lower(Q, K, V).as_text()) == is_loop


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_not_of_other_types(dtype, fuses):
    with jax.enable_x64(dtype == "float64"):
        args = [x.astype(dtype) for x in (Q, K, V)]
        text = jax.jit(aicf_jax.fuse(plain)).lower(*args).as_text()
        assert "while" in text


def test_loops_with_gradients_and_on_older_versions(fuses, monkeypatch):
    def text(f):
        return jax.jit(f).lower(Q, K, V).as_text()

    assert "while" not in text(aicf_jax.fuse(plain))
    assert "while" in text(jax.grad(lambda *a: jnp.sum(jnp.sin(aicf_jax.fuse(plain)(*a)))))
    monkeypatch.setattr(_compat, "XLA_FUSES_ATTENTION", False)
    aicf_jax.clear_caches()
    assert "while" in text(aicf_jax.fuse(plain))


@pytest.mark.skipif(not _compat.XLA_FUSES_ATTENTION, reason="loops are the better on jax before 0.11")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 1000, 8, 32), (2, 777, 4, 24), (8, 512, 2, 64)], ids=str)
@pytest.mark.parametrize("f", [plain, transposed, softmax_in_float32, linen.dot_product_attention])
def test_scores_are_not_in_memory(f, shape, dtype):
    """What the compiler does of its own: a version that does no longer would fail here."""
    b, s, h, d = shape
    x = jax.ShapeDtypeStruct((b, h, s, d) if f in (plain, softmax_in_float32) else shape, dtype)
    temporaries = jax.jit(aicf_jax.fuse(f)).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes
    assert temporaries < 0.5 * b * h * s * s * 4
