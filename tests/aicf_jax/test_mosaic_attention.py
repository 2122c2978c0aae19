"""The Mosaic GPU kernel as a candidate for attention: what it takes, what it must not, and where arrays end up.

The kernel itself is tested in `tests/pallas_kernels`; here its equations in plain jax stand in for it on a CPU, but for
one test in the simulator.
"""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aicf_jax
from aicf_jax.kernels import mosaic_attention
from aicf_jax.kernels._kernel import Where
from aicf_jax.ops._attention_variant import Variant
from pallas_kernels import _mosaic, attention
from pallas_kernels.attention import ForwardConfig
from pallas_kernels.attention.arguments import HIGHEST_NUMBER
from pallas_kernels.attention.config import HEAD_ATOM, MAX_HEAD_DIM
from tests.aicf_jax.mosaic_attention_support import (
    BESIDE,
    CAUSAL,
    H200,
    LOWEST,
    NUMBERS,
    PLAIN,
    SMALL,
    TAKEN,
    TOKENS,
    VALUES,
    B,
    D,
    H,
    Q,
    S,
    flax_padded,
    is_given,
    jax_bias,
    jax_causal,
    jax_lengths,
    masked,
    normal,
    plain_forward,
    scores,
    stand_in,
    struct,
    tril,
    weighted,
)
from tests.corpus import attention_spellings as corpus
from tests.pallas_kernels.simulator import skip_what_it_lacks

KERNEL = mosaic_attention.KERNEL


def explained(f, *args):
    return aicf_jax.explain(f, *args, policy=H200)


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name):
    f, args, told = TAKEN[name]
    calls = []

    def forward(q, k, v, **options):
        calls.append(options)
        return plain_forward(q, k, v, **options)

    jax.eval_shape(aicf_jax.fuse(f, kernels=[stand_in(forward)], policy=PLAIN), *args)
    (options,) = calls
    assert {n: options[n] for n in CAUSAL} == {n: told[n] for n in CAUSAL}
    assert options["scale"] == pytest.approx(told.get("scale", options["scale"]), rel=1e-6)


@pytest.mark.parametrize("name", ["jax.nn, shared heads", "flax", "by hand", "matrices", "heads of 80"])
def test_taken_on_an_h200_where_it_moves_less(name):
    f, args, _ = TAKEN[name]
    assert [x.kernel for x in explained(f, *args).fusions] == ["mosaic_attention"]


BIAS = struct(B, H, S, S)
MASK = struct(B, 1, 1, S, dtype="bool")
NOT_TAKEN = {
    "traced scale": (lambda q, k, v, s: weighted(scores(q, k) * s, v), (Q, Q, Q, struct(dtype="float32")), "no number"),
    "fill that scores may reach": (masked(tril, -1e9), (Q, Q, Q), "fills with -1e+09"),
    "queries that see nothing": (masked(lambda s, t: tril(s, t, t - s)), (Q, *(struct(B, 1024, H, D),) * 2),
                                 "sees no key"),
    "mask under the softcap": (
        lambda q, k, v: weighted(30 * jnp.tanh(jnp.where(tril(S), scores(q, k), -jnp.inf) / 30), v), (Q, Q, Q),
        "fills with -inf",
    ),
    "bias under the softcap": (
        lambda q, k, v, b: weighted(30 * jnp.tanh((scores(q, k) + b) / 30), v), (Q, Q, Q, BIAS), "under their softcap",
    ),
    "bias that is the same for all keys": (
        lambda q, k, v, b: weighted(scores(q, k) + b, v), (Q, Q, Q, struct(B, H, S, 1)), "same for all keys",
    ),
    "fills that differ": (
        lambda q, k, v, m: weighted(jnp.where(m, jnp.where(tril(S), scores(q, k), LOWEST), -jnp.inf), v),
        (Q, Q, Q, MASK), "different numbers",
    ),
    "masks added to each other": (
        lambda q, k, v, m: weighted(scores(q, k) + jnp.where(m, 0.0, LOWEST) + jnp.where(tril(S), 0.0, LOWEST), v),
        (Q, Q, Q, MASK), "different numbers",
    ),
    "bias added to a fill": (
        lambda q, k, v, b: weighted(jnp.where(tril(S), scores(q, k), LOWEST) + b, v), (Q, Q, Q, BIAS),
        "added to a fill",
    ),
    "scale that is too large": (lambda q, k, v: weighted(scores(q, k) * 1e8, v), (Q, Q, Q), "scale 1.25e+07"),
    "softcap that is too large": (
        lambda q, k, v: weighted(2e6 * jnp.tanh(scores(q, k) / 2e6), v), (Q, Q, Q), "softcap 2e+06",
    ),
    "negative scale": (lambda q, k, v: weighted(-scores(q, k), v), (Q, Q, Q), "not positive"),
    "heads of 72": (masked(tril), (struct(B, S, H, 72),) * 3, "heads of 72"),
    "values of another length": (masked(tril), (Q, Q, struct(B, S, H, 128)), "heads of 64"),
    "float32 result": (
        lambda q, k, v: jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores(q, k)).astype(v.dtype), v,
                                   preferred_element_type=jnp.float32), (Q, Q, Q), "float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_not_taken(name):
    f, args, found = NOT_TAKEN[name]
    report = explained(f, *args)
    assert [x.kernel for x in report.fusions] == ["xla"], name
    (refusal,) = [r for r in report.refusals if r.detail.startswith("kernel mosaic_attention ")]
    assert refusal.code == "capability" and found in refusal.found, refusal


def test_a_refusal_tells_the_limits_of_the_library():
    """Its text is written without importing the library."""
    told = str(mosaic_attention.KERNEL.capabilities["variant"])
    assert f"heads of a multiple of {HEAD_ATOM} up to {MAX_HEAD_DIM}" in told
    assert f"numbers below {HIGHEST_NUMBER:.0e}".replace("+0", "") in told


def test_float32_stays_with_xla():
    args = (struct(*Q.shape, dtype="float32"),) * 3
    assert [x.kernel for x in explained(jax_causal, *args).fusions] == ["xla"]


# -- values ----------------------------------------------------------------------------------------------

QUICK = ("shared heads", "keys by columns", "powers of two")


def agrees(f, args, exact):
    """Fused values and gradients by Q, K, V and biases beside the program's own in float64. Returns the call."""
    forward = mock.Mock(side_effect=plain_forward)
    fused = aicf_jax.fuse(f, kernels=[stand_in(forward)], policy=PLAIN)
    numbers = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]

    def by_numbers(f, args):
        def g(*xs):
            replaced = dict(zip(numbers, xs, strict=True))
            return f(*(replaced.get(i, x) for i, x in enumerate(args)))

        return jax.vjp(g, *(args[i] for i in numbers))

    with jax.enable_x64(True):
        want, pull = by_numbers(f, exact)
        ct = jax.random.normal(jax.random.key(1), want.shape).astype(jnp.bfloat16)
        wanted = (want, *pull(ct.astype(jnp.float64)))
    found, pull = by_numbers(fused, args)
    assert forward.call_args.kwargs["with_statistics"]
    # Weights, scores and results (flax: all in between) are rounded to 8 bits, at most eight times; what is summed has
    # random signs.
    for a, b in zip((found, *pull(ct)), wanted, strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        assert a.shape == b.shape
        assert np.max(np.abs(a - b)) <= 8 * 2.0**-8 * max(1.0, np.max(np.abs(b)))
    return forward.call_args.kwargs


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in VALUES])
def test_values_and_gradients(name):
    f, shapes = VALUES[name]
    args = normal(*shapes)
    with jax.enable_x64(True):
        exact = [x.astype(jnp.float64) for x in args]
    agrees(f, args, exact)


QUICK_BESIDE = ("flax, padding, a query that sees nothing",)


@pytest.mark.parametrize("name", [n if n in QUICK_BESIDE else pytest.param(n, marks=pytest.mark.slow) for n in BESIDE])
def test_values_and_gradients_with_arrays_beside_the_scores(name):
    f, beside, given = BESIDE[name]
    qkv = normal(*[SMALL] * 3)
    with jax.enable_x64(True):
        exact = [x.astype(jnp.float64) for x in qkv]
        more = [x.astype(jnp.float64) if x.dtype == jnp.float32 else x for x in beside]
    options = agrees(f, [*qkv, *beside], [*exact, *more])
    assert {n for n in ("segments", "mask", "bias", "key_bias") if is_given(options[n])} == given


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("order", ["bshd", "bhsd"])
def test_one_query(kv_heads, order):
    """Whose axis the computation graph leaves out."""
    args = normal((2, 1, 4, 64), (2, 512, kv_heads, 64), (2, 512, kv_heads, 64))

    def f(q, k, v, lengths):
        if order == "bhsd":
            q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        return jax_lengths(q, k, v, lengths)

    args = [x if order == "bshd" else x.swapaxes(1, 2) for x in args]
    with jax.enable_x64(True):
        exact = [x.astype(jnp.float64) for x in args]
    lengths = jnp.asarray([512, 7], jnp.int32)
    options = agrees(f, [*args, lengths], [*exact, lengths])
    assert is_given(options["segments"]) and not is_given(options["mask"])


@pytest.mark.slow
@pytest.mark.parametrize(("f", "beside", "given"), [(jax_bias, NUMBERS, "bias"), (flax_padded, TOKENS, "segments")])
def test_arrays_beside_heads_that_are_shared_and_batches_that_are_mapped(f, beside, given):
    q, k, v = normal((3, *SMALL), (3, 2, 24, 2, 64), (3, 2, 24, 2, 64))

    def mapped(q, k, v, x):
        if f is flax_padded:
            k, v = (jnp.repeat(y, 2, axis=-2) for y in (k, v))
        return jax.vmap(f, (0, 0, 0, None))(q, k, v, x)

    with jax.enable_x64(True):
        exact = [x.astype(jnp.float64) for x in (q, k, v)]
        more = beside.astype(jnp.float64) if given == "bias" else beside
    options = agrees(mapped, [q, k, v, beside], [*exact, more])
    assert is_given(options[given])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flax, padding, a query that sees nothing", "t5"])
def test_arrays_beside_the_scores_in_the_simulator(name):
    """As operations call it, against the stand-in."""
    skip_what_it_lacks()
    real = attention.forward

    def simulated(*args, **options):
        return real(*args, **options, config=ForwardConfig(64, 2), interpret=_mosaic.interpret())

    f, beside, _ = BESIDE[name]
    args = [*normal(*[SMALL] * 3), *beside]
    jaxpr = jax.make_jaxpr(aicf_jax.fuse(f, kernels=[stand_in()], policy=PLAIN))(*args)
    seen = []

    def both(*args, **options):
        found, want = simulated(*args, **options), plain_forward(*args, **options)
        seen.append((found, want))
        return want

    eqns = jaxpr.eqns
    position = next(i for i, e in enumerate(eqns) if e.primitive.name == "fused")
    op = eqns[position].params["op"]
    inputs = jax.core.eval_jaxpr(
        jaxpr.jaxpr.replace(eqns=eqns[:position], outvars=list(eqns[position].invars)), jaxpr.consts, *args
    )
    stand_in(both).save(op, *inputs)
    ((found, want),) = seen
    for got, exact, error in zip(found, want, (2.0**-6, 2.0**-16, 2.0**-16), strict=True):
        got, exact = (np.asarray(x).astype(np.float64) for x in (got, exact))
        assert np.max(np.abs(got - exact)) <= error * np.max(np.abs(exact))
    assert not _mosaic.races_found()


@pytest.mark.slow
def test_in_the_simulator():
    """As operations call it; inside of `fuse` the simulator, which calls back to Python, cannot run."""
    skip_what_it_lacks()
    real = attention.forward

    def simulated(*args, **options):
        return real(*args, **options, config=ForwardConfig(64, 2), interpret=_mosaic.interpret())

    args = normal((1, 40, 2, 64), (1, 72, 2, 64), (1, 72, 2, 64))
    f = masked(lambda s, t: tril(s, t, t - s))
    jaxpr = jax.make_jaxpr(aicf_jax.fuse(f, kernels=[stand_in()], policy=PLAIN))(*args)
    op = next(e for e in jaxpr.eqns if e.primitive.name == "fused").params["op"]
    (found,), (m, total) = stand_in(simulated).save(op, *args)
    # As far as the operation goes: a product whose result the program transposes.
    (want,), (m_want, total_want) = stand_in().save(op, *args)
    pairs = ((found, want, 2.0**-7), (m, m_want, 2.0**-16), (total, total_want, 2.0**-16))
    for got, exact, error in pairs:
        assert got.shape == exact.shape
        got, exact = (np.asarray(x).astype(np.float64) for x in (got, exact))
        assert np.max(np.abs(got - exact)) <= error * np.max(np.abs(exact))
    assert not _mosaic.races_found()


# Products with values in float32, whose result has that type.
WIDE = {"additive_bias"}
LATE = {"normalized_after_pv"}


@pytest.mark.slow
@pytest.mark.parametrize("case", corpus.POSITIVE, ids=[c[0] for c in corpus.POSITIVE])
def test_every_spelling_of_the_corpus_is_read_right_or_left_alone(case):
    name, f, args, _ = case
    args = [x.astype(jnp.bfloat16) for x in args]
    forward = mock.Mock(side_effect=plain_forward)
    # Of any length of heads, which the stand-in does not mind.
    anything = {**KERNEL.capabilities, "variant": Where("any", lambda v: isinstance(v, Variant))}
    kernel = dataclasses.replace(stand_in(forward), capabilities=anything)
    found = np.asarray(aicf_jax.fuse(f, kernels=[kernel], policy=PLAIN)(*args)).astype(np.float64)
    with jax.enable_x64(True):
        want = np.asarray(f(*(x.astype(jnp.float64) for x in args))).astype(np.float64)
    assert forward.called == (name not in WIDE | LATE)
    assert np.max(np.abs(found - want)) <= 8 * 2.0**-8 * np.max(np.abs(want))
