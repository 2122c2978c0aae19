"""Programs by name: one text for all spellings, bytes in closed form, memory on chip."""

import math

import jax
import jax.numpy as jnp
import pytest

import mcir
from tests.mcir.functions import D, E, I, J, scores

SHAPES = (2, I, D), (2, J, D), (2, J, E)
SCALE = 1 / math.sqrt(D)


def manual(q, k, v):
    x = q @ k.transpose(0, 2, 1) * SCALE
    p = jnp.exp(x - x.max(-1, keepdims=True))
    return (p / p.sum(-1, keepdims=True)) @ v


def by_log_sum_exp(q, k, v):
    x = scores(q, k) * SCALE
    return jnp.exp(x - jax.nn.logsumexp(x, axis=-1, keepdims=True)) @ v


def one_head(q, k, v):
    return jax.nn.softmax(q @ k.T * SCALE) @ v


def late(q, k, v):
    x = scores(q, k) * SCALE
    p = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    return (p @ v) / jnp.sum(p, axis=-1, keepdims=True)


def keys_first(q, k, v):
    """Scores as [head, key, query]."""
    x = jnp.einsum("hjd,hid->hji", k, q) * SCALE
    return jnp.einsum("hji,hje->hie", jax.nn.softmax(x, axis=1), v)


SPELLINGS = {
    "einsum": lambda q, k, v: jnp.einsum("hij,hje->hie", jax.nn.softmax(scores(q, k) * SCALE), v),
    "matmul": lambda q, k, v: jax.nn.softmax((q @ k.swapaxes(-1, -2)) * SCALE, axis=-1) @ v,
    "manual": manual,
    "log_softmax": lambda q, k, v: jnp.exp(jax.nn.log_softmax(scores(q, k) * SCALE)) @ v,
    "logsumexp": by_log_sum_exp,
    "vmap": jax.vmap(one_head),
    "normalized late": late,
}


def named(**options):
    return mcir.attention(**{**dict(heads=2, q_len=I, kv_len=J, head_dim=D, value_dim=E), **options})


def derived(function, shapes=SHAPES):
    return mcir.derive(function, *(jax.ShapeDtypeStruct(s, "float32") for s in shapes), name="attention")


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_are_one_program(name):
    assert str(derived(SPELLINGS[name])) == str(named())


@pytest.mark.parametrize(
    "mask",
    [
        lambda i, j: i >= j,
        lambda i, j: j <= i,
        lambda i, j: ~(j > i),
        lambda i, j: jnp.tril(jnp.ones((I, J), bool)),
    ],
    ids=[">=", "<=", "not >", "tril"],
)
@pytest.mark.parametrize("turned", [False, True])
def test_spellings_of_a_causal_mask(mask, turned):
    def f(q, k, v):
        x, seen = scores(q, k) * SCALE, mask(jnp.arange(I)[:, None], jnp.arange(J))
        x = jnp.where(~seen, -jnp.inf, x) if turned else jnp.where(seen, x, -jnp.inf)
        return jax.nn.softmax(x) @ v

    assert body(derived(f)) == body(named(causal=True))


def body(program):
    """The lines, in any order: the order of independent statements is that of the spelling."""
    return sorted(str(program).splitlines())


def test_layouts_are_one_program_up_to_the_order_of_axes():
    """[batch, length, head, dim] instead of [batch, head, length, dim]."""

    def f(q, k, v):
        x = jnp.einsum("bihd,bjhd->bhij", q, k) * SCALE
        return jnp.einsum("bhij,bjhe->bihe", jax.nn.softmax(x), v)

    program = derived(f, [(3, I, 2, D), (3, J, 2, D), (3, J, 2, E)])
    assert body(program) == body(named(batch=3))


def test_scores_of_keys_and_queries():
    expected = str(named()).replace("(q_tile, k_tile)", "(k_tile, q_tile)")
    assert body(derived(keys_first)) == sorted(expected.splitlines())


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(kv_heads=3), "kv_heads that divide 2 heads, found 3"),
        (dict(align="left"), "align to be one of"),
        (dict(window=-1), "a window of 0 or more"),
    ],
)
def test_options_must_fit(options, message):
    with pytest.raises(ValueError, match=message):
        named(**options)
    with pytest.raises(TypeError, match="unexpected keyword"):
        named(head=2)


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, d, b", [(512, 64, 128), (500, 32, 128), (64, 16, 64)])
def test_traffic_of_the_paper(n, d, b):
    """``2 N d + 2 N d ceil(N / B)`` elements a head."""
    program = mcir.attention(heads=3, q_len=n, head_dim=d).with_blocks(h=1, i=b, j=b)
    found = program.traffic()
    assert found.dram.total == 3 * 4 * (2 * n * d + 2 * n * d * math.ceil(n / b))
    assert found.compulsory.total == 3 * 4 * 4 * n * d
    if b == n:
        assert found.dram == found.compulsory


@pytest.mark.parametrize("n, m, b, c", [(512, 512, 128, 128), (500, 300, 128, 64), (300, 500, 64, 128)])
def test_traffic_of_causal_attention(n, m, b, c):
    """The query tile that ends at row r reads the keys of ``ceil(r / block)`` tiles."""
    d = 16
    program = mcir.attention(heads=2, q_len=n, kv_len=m, head_dim=d, causal=True).with_blocks(h=1, i=b, j=c)
    ends = [min(b * (t + 1), n) for t in range(math.ceil(n / b))]
    keys = sum(min(m, c * math.ceil(r / c)) for r in ends)
    found = program.traffic()
    assert found.dram.total == 2 * 4 * d * (2 * n + 2 * keys)
    assert found.steps == 2 * sum(math.ceil(min(m, r) / c) for r in ends)


@pytest.mark.parametrize("n, m, b, c", [(512, 512, 128, 128), (500, 400, 128, 64)])
@pytest.mark.parametrize("causal", [False, True])
def test_traffic_of_the_backward(n, m, b, c, causal):
    """Delta once; then for each tile of keys the visible rows of q, dout, m, l, delta, and dq read and written."""
    d, e = 16, 8
    options = dict(heads=2, q_len=n, kv_len=m, head_dim=d, value_dim=e, causal=causal)
    program = mcir.attention_backward(**options).with_blocks(h=1, i=b, j=c)
    first = [c * t if causal else 0 for t in range(math.ceil(m / c))]
    rows = sum(max(0, n - b * (r // b)) for r in first)
    delta = n * (2 * e + 1)
    main = rows * (d + e + 3) + 2 * rows * d + 2 * m * (d + e)
    assert program.traffic().dram.total == 2 * 4 * (delta + main)


def test_memory_on_chip_is_that_of_blocks():
    for build, arrays in ((mcir.attention, 8), (mcir.attention_backward, 16)):
        peaks = []
        for s in (4096, 65536):
            program = build(heads=8, q_len=s, head_dim=64, causal=True).with_blocks(h=1, i=128, j=128)
            peaks.append(program.peak_bytes())
        assert peaks[0] == peaks[1] <= arrays * 4 * 128 * 128


def test_a_long_sequence_runs_in_the_memory_of_blocks():
    program = mcir.attention(heads=1, q_len=4096, head_dim=8, causal=True).with_blocks(i=256, j=256)
    avals = [jax.ShapeDtypeStruct((4096, 8), "float32")] * 3
    used = jax.jit(mcir.lower_program(program)).lower(*avals).compile().memory_analysis()
    assert used.temp_size_in_bytes < 4 * 4096 * 4096 / 16


def test_printed_programs(golden):
    golden(str(mcir.attention(heads=8, q_len=4096, head_dim=64)), "attention")
    golden(str(mcir.attention_backward(heads=8, q_len=4096, head_dim=64)), "backward")
    golden(str(mcir.logsumexp(1024, 50_000)), "logsumexp")
    golden(str(mcir.moments(1024, 4096)), "moments")


def test_builders_take_types_and_scales():
    program = named(dtype="bfloat16", scale=2.0, save=True)
    assert [(b.name, b.type.dtype) for b in program.role("output")] == [
        ("out", "bfloat16"),
        ("m", "float32"),
        ("l", "float32"),
    ]
    assert "value=2.0" in str(program)
