"""What the sweep trains: its configuration and data, the signs of divergence, the bound on differences of gradients."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lr_sweep import data, gradients, model, sweep, train
from experiments.lr_sweep.config import ConfigError, SweepConfig, quick
from experiments.lr_sweep.verdict import judge
from tests.experiments.lr_sweep.sweep_support import SMALL, ReassociatedModel, identity

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(scope="module")
def outcome_of():
    """Train two learning rates on unfused SMALL; one compiled program serves all calls."""
    traces = []
    module = model.build(SMALL, "float32")

    def apply(variables, x):
        traces.append(x.shape)
        return module.apply(variables, x)

    trainer = train.make_trainer(SMALL, "sgd", apply)

    def run(rates, seed=0):
        config = dataclasses.replace(SMALL, learning_rates=rates, seed=seed)
        arguments = model.init(module, seed), data.load("standardized", seed), data.batch_indices(config)
        return train.run_trainer(trainer, config, *arguments)[0]

    run.traces = traces
    return run


# Configuration


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("learning_rates", (-1.0,), "positive finite numbers"),
        ("learning_rates", (math.nan,), "positive finite numbers"),
        ("learning_rates", (), "a non-empty sequence"),
        ("learning_rates", (0.1, 0.1), "distinct values"),
        ("optimizers", ("sgdm",), "one of sgd, momentum, adam"),
        ("optimizers", "sgd", "a non-empty sequence"),
        ("dtypes", ("float16",), "one of float32, bfloat16"),
        ("inputs", ("raw",), "one of standardized, unit, unscaled"),
        ("activation", "silu", "one of relu, gelu"),
        ("loss", "mse", "one of squared_error, cross_entropy"),
        ("steps", 0, "an integer >= 1"),
        ("steps", True, "an integer >= 1"),
        ("batch_size", 33, "an even number"),
        ("batch_size", 5000, "an integer from 2 to 1437"),
        ("seed", -1, "an integer from 0"),
        ("hidden", (0,), "an integer >= 1"),
        ("gradient_steps", 401, "an integer from 1 to 400"),
        ("momentum", 1.0, "a number in [0, 1)"),
        ("init_scale", 0.0, "a positive finite number"),
        ("blow_up", 1.0, "a finite factor above 1"),
    ],
)
def test_config_names_argument_expected_found_and_remedy(argument, value, expected):
    with pytest.raises(ConfigError) as caught:
        SweepConfig(**{argument: value})
    message = str(caught.value)
    assert message.startswith(f"{argument}: expected {expected}")
    assert "found " in message and "; " in message


def test_config_sorts_rates_and_orders_cells_so_that_programs_are_shared():
    config = SweepConfig(learning_rates=(1.0, 0.1))
    assert config.learning_rates == (0.1, 1.0)
    cells = config.cells()
    assert len(cells) == len(set(cells)) == 12
    assert [cell.inputs for cell in cells[:2]] == ["standardized", "unscaled"]
    assert cells[0].optimizer == cells[1].optimizer and cells[0].dtype == cells[1].dtype
    assert quick().cells() == tuple(cell for cell in quick().cells() if cell.inputs == "unscaled")


# Data


def test_split_is_the_same_for_all_scalings_and_differs_with_the_seed():
    unscaled, unit, standardized = (data.load(name, 3) for name in ("unscaled", "unit", "standardized"))
    assert unscaled.train_features.shape == (1437, 64) and unscaled.test_features.shape == (360, 64)
    assert unscaled.train_features.max() == 16.0
    np.testing.assert_array_equal(unscaled.train_features / 16, unit.train_features)
    np.testing.assert_array_equal(unscaled.test_labels, standardized.test_labels)
    # Means of 1437 float32 values of size 1: 1437 * 2^-24 is below 1e-4.
    np.testing.assert_allclose(standardized.train_features.mean(0), 0, atol=1e-4)
    assert not np.array_equal(unscaled.train_labels, data.load("unscaled", 4).train_labels)


def test_batches_are_shuffled_epochs():
    config = dataclasses.replace(SMALL, steps=60)
    indices = data.batch_indices(config)
    assert indices.shape == (60, 32) and indices.dtype == np.int32
    epoch = indices[: 1437 // 32].ravel()
    assert len(np.unique(epoch)) == len(epoch)
    np.testing.assert_array_equal(indices, data.batch_indices(config))


# Divergence


@pytest.mark.parametrize(
    ("loss", "gradient", "expected"),
    [
        (1.0, [0.0, 1.0], [False, False, False]),
        (11.0, [0.0, 1.0], [True, False, False]),
        (1.0, [0.0, -math.inf], [False, True, False]),
        (1.0, [math.nan, 1.0], [False, False, True]),
        (math.nan, [0.0, 1.0], [False, False, True]),
        (math.inf, [0.0, 1.0], [True, True, False]),
    ],
)
def test_signs_of_divergence(loss, gradient, expected):
    tree = {"a": jnp.zeros(2), "b": jnp.asarray(gradient)}
    signs = train.signs_of_divergence(jnp.float32(loss), tree, jnp.float32(1.0), 10.0)
    assert signs.tolist() == expected


def test_divergence_keeps_the_first_step_and_the_worst_kind():
    first = jnp.full(3, train.NEVER, jnp.int32)
    first = train.note_first(first, jnp.asarray([True, False, False]), jnp.int32(4))
    first = train.note_first(first, jnp.asarray([True, False, True]), jnp.int32(6))
    divergence = train.Divergence.from_steps(np.asarray(first))
    assert divergence == train.Divergence(4, "nan", {"blow-up": 4, "nan": 6})
    assert train.Divergence.from_steps(np.full(3, train.NEVER)) is None


def test_a_member_of_nan_does_not_touch_its_neighbours(outcome_of):
    sound, infected = outcome_of((1e-4, 1e-3)), outcome_of((1e-4, 1e30))
    assert infected.diverged[0] is None and infected.diverged[1].kind in ("nan", "inf")
    assert math.isfinite(infected.loss[0]) and infected.loss[0] == sound.loss[0]
    assert infected.accuracy[0] == sound.accuracy[0]


def test_learning_rates_do_not_retrace(outcome_of):
    outcome_of((1e-3, 1e-2))
    count = len(outcome_of.traces)
    outcome_of((1e-4, 1.0))
    assert len(outcome_of.traces) == count


def test_blow_up_without_nan_is_detected():
    # Cross entropy has bounded gradients: 1e3 leaves huge but finite numbers.
    config = dataclasses.replace(SMALL, loss="cross_entropy", learning_rates=(1e-3, 1e3), blow_up=20.0, steps=3)
    module = model.build(config, "float32")
    trainer = train.make_trainer(config, "sgd", module.apply)
    arguments = model.init(module, 0), data.load("unscaled", 0), data.batch_indices(config)
    outcome, visited = train.run_trainer(trainer, config, *arguments)
    assert outcome.diverged[0] is None
    assert outcome.diverged[1].kind == "blow-up" and outcome.diverged[1].step >= 1
    kernel = visited["params"]["Dense_0"]["kernel"]
    assert kernel.shape == (2, 2, 64, 16)
    np.testing.assert_array_equal(kernel[0, 0], arguments[0]["params"]["Dense_0"]["kernel"])


def test_same_seed_is_bitwise_the_same_and_another_seed_is_not(results, outcome_of):
    again = dict(sweep.run(SMALL, identity, {}))
    for cell in SMALL.cells():
        # repr is exact for floats, and unlike == it holds for NaN.
        assert repr(again[cell]) == repr(results[cell])
        assert repr(results[cell].fused) == repr(results[cell].unfused)
    assert outcome_of((1e-3, 1e-2), seed=1).loss != outcome_of((1e-3, 1e-2), seed=0).loss


# Gradients


def test_relative_difference():
    expected = {"a": jnp.asarray([3.0, -4.0]), "b": jnp.asarray([0.0, 0.0])}
    assert gradients.relative_difference(expected, expected) == 0
    assert gradients.relative_difference(expected, expected | {"a": jnp.asarray([3.0, -3.0])}) == pytest.approx(0.2)
    assert gradients.relative_difference(expected, expected | {"b": jnp.asarray([0.0, 1.0])}) > 1
    assert gradients.relative_difference(expected, expected | {"a": jnp.asarray([3.0, math.nan])}) == math.inf
    huge = {"a": jnp.asarray([3e30, -4e30])}
    assert gradients.relative_difference(huge, {"a": jnp.asarray([3e30, -3e30])}) == pytest.approx(0.2)
    # Nothing can be said where the unfused gradient itself is not finite.
    assert gradients.relative_difference({"a": jnp.asarray([math.nan])}, {"a": jnp.asarray([1.0])}) == 0


def test_reassociation_is_within_the_bound():
    config = dataclasses.replace(SMALL, inputs=("unscaled",))
    verdict = judge(config, dict(sweep.run(config, ReassociatedModel, {})))
    ((_, difference, in_roundoffs, bound),) = verdict.worst
    assert verdict.passed and 0 < difference <= bound
    assert in_roundoffs == difference / 2**-24


def test_bound_grows_with_reduction_length_and_with_narrow_dtypes():
    # 2 x 2^-24 x (forward 64 + 16, backward 10, half a batch 16). bfloat16 adds 2 x 2^-8 x 6 roundings x 2 layers, and
    # sqrt(3 x 2^-8) for the kink of its one ReLU.
    assert gradients.bound(SMALL, "float32") == pytest.approx(2 * 2**-24 * (64 + 16 + 10 + 16))
    smooth = dataclasses.replace(SMALL, activation="gelu")
    narrow, narrow_smooth = (gradients.bound(c, "bfloat16") - gradients.bound(c, "float32") for c in (SMALL, smooth))
    assert narrow_smooth == pytest.approx(2 * 2**-8 * 12)
    assert narrow - narrow_smooth == pytest.approx(math.sqrt(3 * 2**-8))
