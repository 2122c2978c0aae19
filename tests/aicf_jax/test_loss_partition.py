"""Vocabulary losses on several devices: each runs the kernels on its part of the rows and of the vocabulary.

The kernels' equations in plain jax stand in for them.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import linear_cross_entropy
from pallas_kernels.linear_cross_entropy import Numbers
from tests.aicf_jax import test_mosaic_linear_cross_entropy as on_one
from tests.aicf_jax.partition_support import BACKWARD_BITS, FORWARD_BITS, compare, on_mesh, rounded, stand_in
from tests.linear_cross_entropy.spellings import by_optax, smoothed


def forward(*args, **options):
    return Numbers(*(rounded(n, FORWARD_BITS) for n in on_one.plain_forward(*args, **options)))


def backward(*args, **options):
    return tuple(rounded(d, BACKWARD_BITS) for d in on_one.plain_backward(*args, **options))


KERNELS = [stand_in(k, linear_cross_entropy, forward=forward, backward=backward) for k in on_one.KERNELS]


def losses(h, w, labels):
    """One for each row, whose gradients are made of the logits again."""
    return by_optax(h @ w, labels)


def mean(h, w, labels):
    """One number, whose gradients the forward makes."""
    return jnp.mean(smoothed(h @ w, labels))


def small_labels(h, w, labels):
    return by_optax(h @ w, labels.astype(jnp.int8))


#: Mesh; how h and w are split; whether no more is sent than in the plain program.
LAYOUTS = {
    "rows": ({"data": 8}, P("data"), P(), True),
    "positions": ({"data": 4}, P(None, "data"), P(), True),
    "vocabulary": ({"model": 4}, P(), P(None, "model"), True),
    "rows and vocabulary": ({"data": 2, "model": 4}, P("data"), P(None, "model"), True),
    "rows, and the parameters over the same devices": ({"data": 4}, P("data"), P("data"), True),
    "vocabulary over the devices of rows": ({"data": 4}, P("data"), P(None, "data"), True),
    # The kernels sum over the depth: each device has it whole.
    "depth": ({"data": 4}, P(None, None, "data"), P("data"), False),
}
CLASSES = 320


def arguments(classes=CLASSES, **most):
    h, w = 0.5 * on_one.normal(0, 8, 12, 16), 0.5 * on_one.normal(1, 16, classes)
    labels = np.random.default_rng(2).integers(0, most.get("most", classes), (8, 12))
    return h, w, jnp.asarray(labels, jnp.int32).at[0, 0].set(-1).at[1, 1].set(classes)


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        pytest.param(n, f, marks=() if (n, f) == ("rows and vocabulary", losses) else pytest.mark.slow)
        for n in LAYOUTS
        for f in (losses, mean)
    ],
)
def test_each_device_runs_the_kernels_on_its_part(name, loss):
    axes, of_h, of_w, is_lean = LAYOUTS[name]
    h, w, labels = arguments()
    args = h, w, jnp.clip(labels, 0, CLASSES - 1)
    found, plain = compare(loss, KERNELS, args, on_mesh(args, axes, (of_h, of_w, P(*of_h[:2]))))
    assert not is_lean or len(found) <= len(plain)


@pytest.mark.slow
def test_labels_of_few_bits_find_their_part_of_the_vocabulary():
    """Whose positions they cannot count."""
    h, w, labels = arguments(most=127)
    args = h, w, jnp.clip(labels, 0, 127)
    compare(small_labels, KERNELS, args, on_mesh(args, {"model": 4}, (P(), P(None, "model"), P())))


@pytest.mark.slow
def test_labels_that_are_no_class_are_none_in_any_part():
    def f(h, w, labels):
        return jnp.nan_to_num(by_optax(h @ w, labels), nan=7.0)

    args = arguments()
    compare(f, KERNELS, args, on_mesh(args, {"model": 4}, (P(), P(None, "model"), P())))


@pytest.mark.slow
@pytest.mark.parametrize("of_h", [P(None, "data"), P("data")], ids=["positions", "rows"])
def test_rows_that_a_slice_leaves_out_leave_others_that_do_not_divide(of_h):
    def f(h, w, labels):
        return smoothed((h @ w)[:, :-1], labels[:, 1:])

    h, w, labels = arguments()
    args = h, w, jnp.clip(labels, 0, CLASSES - 1)
    compare(f, KERNELS, args, on_mesh(args, {"data": 4}, (of_h, P(), of_h)))
