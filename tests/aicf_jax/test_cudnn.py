"""cuDNN's attention as a candidate: what it takes, when it is picked, and what it is called with.

There is no cuDNN here: XLA's implementation of the same function stands in for it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aicf_jax
from aicf_jax import tuning
from aicf_jax.kernels import _cudnn, cudnn_attention, cudnn_attention_grad, mosaic_attention
from aicf_jax.ops._attention_variant import variant
from pallas_kernels import _compat
from pallas_kernels.attention import cudnn

PLAIN = aicf_jax.Policy(on_failure="raise")


def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def attention(**options):
    return lambda q, k, v, *bias: jax.nn.dot_product_attention(q, k, v, *bias, **options)


def explained(f, *args, target="h200"):
    return aicf_jax.explain(f, *args, policy=aicf_jax.Policy(target=target))


def refusals(report):
    return [r for r in report.refusals if r.detail.startswith("kernel cudnn_attention ")]


X = struct(4, 2048, 16, 64)


def test_without_cudnn_it_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(_compat, "cudnn_version", lambda: (_ for _ in ()).throw(RuntimeError("no such library")))
    cudnn.unavailable.cache_clear()
    try:
        (refusal,) = refusals(explained(attention(), X, X, X))
    finally:
        cudnn.unavailable.cache_clear()
    assert refusal.code == "environment" and "cuDNN" in refusal.expected
    assert refusal.found == "RuntimeError: no such library"


@pytest.fixture
def there(monkeypatch):
    """CuDNN by XLA, and what it was called with."""
    real, calls = jax.nn.dot_product_attention, []

    def public(q, k, v, *bias, implementation=None, **options):
        if implementation == "cudnn":
            calls.append(options)
        return real(q, k, v, *bias, **options)

    def internal(q, k, v, *, scale, is_causal, window):
        calls.append({"saving": True})
        out = real(q, k, v, scale=scale, is_causal=is_causal, local_window_size=window)
        k = jnp.repeat(k, q.shape[2] // k.shape[2], 2)
        x = jnp.einsum("bshd,bthd->bhst", q, k, preferred_element_type=jnp.float32) * scale
        i, j = jnp.arange(x.shape[2])[:, None], jnp.arange(x.shape[3])
        seen = ((j <= i) | (not is_causal)) & (True if window is None else i - j <= window[0])
        return out, jax.nn.logsumexp(jnp.where(seen, x, -jnp.inf), -1)

    monkeypatch.setattr(jax.nn, "dot_product_attention", public)
    monkeypatch.setattr(_compat, "cudnn_attention", internal)
    monkeypatch.setattr(cudnn, "unavailable", lambda: None)
    return calls


def test_it_is_behind_a_kernel_of_ours_and_before_xla(there):
    assert [f.kernel for f in explained(attention(is_causal=True), X, X, X).fusions] == ["mosaic_attention"]
    assert [f.kernel for f in explained(attention(is_causal=True), X, X, X, target="b200").fusions] == [
        "cudnn_attention"
    ]


def test_measured_times_decide(there, tmp_path, monkeypatch):
    """The table of `aicf_jax.tune`, as it would be on a GPU on which cuDNN is faster."""
    q = aicf_jax.Policy(target="h200", tuning=str(tmp_path / "table.json"))
    names = ("xla", "cudnn_attention", "mosaic_attention")
    monkeypatch.setattr(tuning, "times", lambda op, platform: dict(zip(names, (3.0, 1.0, 2.0), strict=True)))
    report = aicf_jax.explain(attention(is_causal=True), X, X, X, policy=q)
    assert [f.kernel for f in report.fusions] == ["cudnn_attention"]


NOT_TAKEN = {
    "long heads": (attention(), (struct(4, 512, 8, 136),) * 3),
    "heads of 68": (attention(), (struct(4, 512, 8, 68),) * 3),
    "causal with other lengths": (attention(is_causal=True), (struct(4, 256, 8, 64), *(struct(4, 512, 8, 64),) * 2)),
    "a bias": (attention(), (*(struct(4, 512, 8, 64),) * 3, struct(4, 8, 512, 512))),
}


@pytest.mark.parametrize(
    "name", [n if n.startswith("causal") else pytest.param(n, marks=pytest.mark.slow) for n in NOT_TAKEN]
)
def test_not_taken(name, there):
    f, args = NOT_TAKEN[name]
    (refusal,) = refusals(explained(f, *args))
    assert refusal.code == "capability" and "up to 128" in refusal.expected


def on_a_cpu():
    here = {"platforms": ("cpu",), "targets": None, "cost_bytes": lambda op: 0}
    return tuple(dataclasses.replace(m.KERNEL, **here) for m in (cudnn_attention, cudnn_attention_grad))


def window(q, k, v):
    """Each query sees itself and the five keys before it."""
    x = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * 0.25
    i, j = jnp.arange(x.shape[2])[:, None], jnp.arange(x.shape[3])
    p = jax.nn.softmax(jnp.where((j <= i) & (i - j < 6), x, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", p.astype(v.dtype), v)


TAKEN = {
    "shared heads, causal": (attention(is_causal=True), 1, {"is_causal": True, "local_window_size": None}),
    "window": (window, 2, {"is_causal": True, "local_window_size": (5, 0)}),
    "full": (attention(), 2, {"is_causal": False, "local_window_size": None}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TAKEN)
def test_values_gradients_and_what_it_is_called_with(name, there):
    f, kv_heads, told = TAKEN[name]
    shapes = [(1, 12, h, 16) for h in (2, kv_heads, kv_heads, 2)]
    keys = jax.random.split(jax.random.key(0), 4)
    *args, dout = (jax.random.normal(k, s).astype(jnp.bfloat16) for k, s in zip(keys, shapes, strict=True))
    found, pull = jax.vjp(aicf_jax.fuse(f, kernels=on_a_cpu(), policy=PLAIN), *args)
    got = (found, *pull(dout))
    assert {"scale": pytest.approx(0.25), **told} in there and {"saving": True} in there
    with jax.enable_x64(True):
        want, pull = jax.vjp(f, *(x.astype(jnp.float64) for x in args))
        wanted = (want, *pull(dout.astype(jnp.float64)))
    # Scores, weights and results are rounded to 8 bits on the way.
    for a, b in zip(got, wanted, strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        assert np.max(np.abs(a - b)) <= 8 * 2.0**-8 * max(1.0, np.max(np.abs(b)))


@pytest.mark.slow
def test_what_it_saves_is_what_any_backward_reads(there):
    """The log-sum-exp as maximum, beside sums of 1: the derived equations take it as they take their own."""
    args = [jax.random.normal(k, (1, 12, 2, 16)).astype(jnp.bfloat16) for k in jax.random.split(jax.random.key(0), 3)]

    def gradients(kernels):
        f = aicf_jax.fuse(attention(is_causal=True), kernels=kernels, policy=PLAIN)
        return jax.grad(lambda *xs: jnp.sum(jnp.sin(f(*xs).astype(jnp.float32))), (0, 1, 2))(*args)

    for a, b in zip(gradients(on_a_cpu()[:1]), gradients(()), strict=True):
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=2.0**-6, atol=2.0**-6 * float(jnp.abs(b).max()))


def test_the_gradient_has_no_order_of_its_sums():
    assert not cudnn_attention_grad.KERNEL.deterministic and cudnn_attention.KERNEL.deterministic
    assert set(_cudnn.TARGETS) > set(mosaic_attention.KERNEL.targets)


def test_a_kind_with_more_to_it_is_not_taken():
    """A kind of attention that a kernel is not told all of: it would compute another one."""
    jaxpr = jax.make_jaxpr(aicf_jax.fuse(attention(), kernels=on_a_cpu()[:1], policy=PLAIN))(X, X, X)
    known = variant(next(e for e in jaxpr.eqns if e.primitive.name == "fused").params["op"])

    @dataclasses.dataclass(frozen=True)
    class More(type(known)):
        more: tuple = ()

    facts = {f.name: getattr(known, f.name) for f in dataclasses.fields(known)}
    taken = cudnn_attention.KERNEL.capabilities["variant"]
    assert known in taken and More(**facts) in taken
    assert More(**{**facts, "more": ("one",)}) not in taken


@pytest.mark.skipif(cudnn.unavailable() is not None, reason=f"{cudnn.unavailable()}")
def test_where_there_is_cudnn_it_is_what_is_lowered():
    kernels = (cudnn_attention.KERNEL, cudnn_attention_grad.KERNEL)
    policy = aicf_jax.Policy(target="h200", on_failure="raise")

    def both(q, k, v, dout):
        y, pull = jax.vjp(aicf_jax.fuse(attention(is_causal=True), kernels=kernels, policy=policy), q, k, v)
        return y, pull(dout)

    text = jax.jit(both).trace(X, X, X, X).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmaxBackward" in text
