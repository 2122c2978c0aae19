"""Vocabulary losses compiled for an H200 that need not be there: kernels, no spills, memory that V does not enter."""

import jax
import jax.numpy as jnp
import optax
import pytest

import aicf_jax
from pallas_kernels import aot
from pallas_kernels.linear_cross_entropy import backward, forward
from pallas_kernels.linear_cross_entropy.cases import COMPILED

pytestmark = [pytest.mark.aot, pytest.mark.slow]

H200 = aicf_jax.Policy(target="h200", on_failure="raise")
R, D, V = 8192, 1024, 128256
X, W, LABELS = (jax.ShapeDtypeStruct(s, d) for s, d in (((R, D), "bfloat16"), ((D, V), "bfloat16"), ((R,), "int32")))


def mean_loss(h, w, labels):
    return optax.softmax_cross_entropy_with_integer_labels((h @ w).astype(jnp.float32), labels).mean()


def losses(h, w, labels):
    return optax.softmax_cross_entropy_with_integer_labels((h @ w).astype(jnp.float32), labels)


def weighted(h, w, labels, ct):
    y, pull = jax.vjp(lambda h, w: fused_losses(h, w, labels), h, w)
    return y, *pull(ct)


fused_losses = aicf_jax.fuse(losses, policy=H200)


def programs():
    found = {}
    for name, case in COMPILED.items():
        types = jax.eval_shape(lambda case=case: case.arrays(jax.random.key(0)))
        rows = (jax.ShapeDtypeStruct((case.rows,), "float32"),) * (4 if case.with_sum else 3)
        found[name] = (
            lambda x, w, t, case=case: forward(x, w, t, **case.equation(), with_sum=case.with_sum),
            types,
        )
        found[f"gradient: {name}"] = (
            lambda x, w, t, *rows, case=case: backward(x, w, t, *rows, **case.equation()),
            (*types, *rows),
        )
    fused = aicf_jax.fuse(mean_loss, policy=H200)
    found["value"] = fused, (X, W, LABELS)
    found["value and gradients"] = jax.value_and_grad(fused, (0, 1)), (X, W, LABELS)
    found["unfused"] = jax.value_and_grad(mean_loss, (0, 1)), (X, W, LABELS)
    found["rows"] = weighted, (X, W, LABELS, jax.ShapeDtypeStruct((R,), "float32"))
    return found


@pytest.fixture(scope="module")
def reports():
    return aot.compile_all("h200", programs())


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("kind", ["", "gradient: "])
def test_kernels_with_wgmma_and_without_a_spill(reports, name, kind):
    report = reports[kind + name]
    assert not isinstance(report, Exception), report
    assert report.counts["mosaic"] >= 1 and report.spill_bytes == 0, report
    assert "wgmma" in str(report)
    if not kind:
        assert report.counts["mosaic"] == 1


def test_the_value_needs_a_few_numbers_a_row(reports):
    report = reports["value"]
    assert report.counts["mosaic"] == 1 and "loss_of_logits" in str(report), report
    assert report.temporaries_bytes <= 16 * 8 * R * 4, report


@pytest.mark.parametrize("name", ["value and gradients", "rows"])
def test_gradients_need_a_block_of_logits(reports, name):
    report, unfused = reports[name], reports["unfused"]
    assert "loss_of_logits" in str(report) and "gradient_of_logits" in str(report), report
    assert report.spill_bytes == 0
    # dX in float32, of which two may be there at a time, a block of the gradient, of W and of dW.
    block = 40 * 2**20 + 2 * 8192 * D * 2
    assert report.temporaries_bytes <= 2 * R * D * 4 + block + 2**20 < R * V * 2 / 4, report
    assert unfused.temporaries_bytes >= R * V * 2, unfused
