"""Rows that are sharded over devices stay where they are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import aicf_jax
from tests.support import normal

COLLECTIVES = ("all-reduce(", "all-gather(", "reduce-scatter(", "all-to-all(", "collective-permute(")
D, CLASSES = 4, 24


def loss(h, w, labels):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(h @ w, labels))


@pytest.mark.parametrize("rows", [(8, 16), (128,)], ids=["batch and positions", "flattened"])
def test_as_many_collectives_as_unfused(rows):
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    over_rows = NamedSharding(mesh, P("data"))
    h = jax.device_put(normal(0, *rows, D), over_rows)
    labels = jax.device_put(jnp.arange(128, dtype=jnp.int32).reshape(rows) % CLASSES, over_rows)
    w = jax.device_put(normal(1, D, CLASSES), NamedSharding(mesh, P()))
    fused = aicf_jax.fuse(loss, policy=aicf_jax.Policy(on_failure="raise"))
    (fusion,) = aicf_jax.explain(fused, h, w, labels).fusions
    assert fusion.kernel == "streamed_linear_cross_entropy"
    found, want = (jax.jit(jax.value_and_grad(f, (0, 1))).lower(h, w, labels).compile() for f in (fused, loss))
    assert [found.as_text().count(f" {c}") for c in COLLECTIVES] == [want.as_text().count(f" {c}") for c in COLLECTIVES]
    for x, y in zip(jax.tree.leaves(found(h, w, labels)), jax.tree.leaves(want(h, w, labels)), strict=True):
        # 128 rows of 24 exponentials, the mean over the rows
        np.testing.assert_allclose(x, y, rtol=2 * (128 + CLASSES) * 2**-24, atol=2 * (128 + CLASSES) * 2**-24)
