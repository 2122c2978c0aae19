"""The programs that the kernels are for, through `fuse`, compiled for an H200 that need not be there.

Few and on every run; `aot/test_compile.py` has what XLA alone makes of them. Each kernel's configurations are compiled
in the folder of its family, where tests are slow.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen

import aicf_jax
from experiments.benchmarks.attention import gpt
from pallas_kernels import aot

pytestmark = pytest.mark.aot

H200 = aicf_jax.Policy(target="h200", on_failure="raise")
M, K, N = 8192, 4096, 4096
B, S, H, D = 4, 2048, 16, 64


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def dense(activation):
    return lambda x, w, b: activation(x @ w + b)


def normed_sum(x, r, scale, bias):
    module = linen.LayerNorm(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    return module.apply({"params": {"scale": scale, "bias": bias}}, x + r)


def causal(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def flax_causal(q, k, v):
    """Divides the queries by itself."""
    return linen.dot_product_attention(q, k, v, mask=linen.make_causal_mask(jnp.ones(q.shape[:2])))


def full(q, k, v):
    return jax.nn.dot_product_attention(q, k, v)


ROWS, PER_COLUMN, HEADS = struct(M, N), struct(N), struct(B, S, H, D)
#: No whole number of blocks of keys, and two warpgroups that share a sum: what nothing constrains, Mosaic searches for.
LONG = struct(2, 1000, 8, 192)
#: Function, types, and which arguments it is differentiated by; the gradients of both terms of a sum are one array.
PROGRAMS = {
    "dense, relu": (dense(jax.nn.relu), (struct(M, K), struct(K, N), PER_COLUMN), (0, 1, 2)),
    "dense, gelu": (dense(jax.nn.gelu), (struct(M, K), struct(K, N), PER_COLUMN), (0, 1, 2)),
    "layer norm of a sum": (normed_sum, (ROWS, ROWS, PER_COLUMN, PER_COLUMN), (0, 2, 3)),
    "causal attention": (causal, (HEADS, HEADS, HEADS), (0, 1, 2)),
    "flax's": (flax_causal, (HEADS, HEADS, HEADS), (0, 1, 2)),
    "long heads, ragged": (full, (LONG, LONG, LONG), (0, 1, 2)),
}


def value_and_gradients(f, by):
    def both(args, ct):
        given = list(args)

        def of(*xs):
            for i, x in zip(by, xs, strict=True):
                given[i] = x
            return f(*given)

        y, pull = jax.vjp(of, *(args[i] for i in by))
        return y, pull(ct)

    return both


@pytest.fixture(scope="module")
def reports():
    found = {}
    for name, (f, args, by) in PROGRAMS.items():
        fused = aicf_jax.fuse(f, policy=H200)
        found[name] = (value_and_gradients(fused, by), (args, jax.eval_shape(f, *args)))
    return aot.compile_all("h200", found)


def test_kernels(reports, golden):
    """Launches of our kernels, and of what XLA puts beside them."""
    lines = [f"{'program':<22}{'ours':>6}{'XLA':>5}{'spilled':>9}"]
    for name, report in reports.items():
        ours = report.counts.get("mosaic", 0)
        lines.append(f"{name:<22}{ours:>6}{report.count - ours:>5}{report.spill_bytes:>8}B")
    golden("\n".join(lines))


def test_temporaries_are_at_most_one_array(reports):
    one = M * N * 2 + 4096
    assert reports["dense, relu"].temporaries_bytes <= one
    assert reports["dense, gelu"].temporaries_bytes <= one
    assert reports["causal attention"].temporaries_bytes <= B * S * H * 16  # XLA alone: 2.68 GB


def test_products_run_on_tensor_cores(reports):
    for name in ("dense, relu", "dense, gelu", "causal attention"):
        assert "wgmma" in str(reports[name]), name


@pytest.mark.slow
def test_a_gpt_is_attention_norms_products_and_its_loss():
    """The model of `experiments.text_lm`, value and gradients; weights of attention and logits never exist."""
    model = gpt.GPT(gpt.Stack(layers=2, dtype="bfloat16"))
    tokens = jax.ShapeDtypeStruct((2, 1025), jnp.int32)
    variables = jax.eval_shape(lambda t: model.init(jax.random.key(0), t[:, :-1]), tokens)

    def loss(variables, tokens):
        logits = model.apply(variables, tokens[:, :-1]).astype(jnp.float32)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    fused = aicf_jax.fuse(loss, policy=H200)
    found = aot.compile_all(
        "h200",
        {
            "fused": (jax.value_and_grad(fused), (variables, tokens)),
            "unfused": (jax.value_and_grad(loss), (variables, tokens)),
        },
    )
    text = str(found["fused"])
    for kernel in (
        "attention_dq",
        "attention_dkv",
        "norm_forward",
        "norm_backward",
        "gemm_bias_gelu_tanh",
        "loss_of_logits",
    ):
        assert kernel in text, kernel
    assert found["fused"].count < found["unfused"].count, text
    assert 3 * found["fused"].temporaries_bytes < found["unfused"].temporaries_bytes

    report = aicf_jax.explain(loss, variables, tokens, policy=H200)
    kernels = {f.op: f.kernel for f in report.fusions}
    assert (
        kernels["attention"] == "mosaic_attention" and kernels["linear_cross_entropy"] == "mosaic_linear_cross_entropy"
    )
    assert all(f.bytes_after < f.bytes_before for f in report.fusions if f.op in ("attention", "linear_cross_entropy"))
