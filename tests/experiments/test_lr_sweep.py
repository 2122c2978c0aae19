"""The learning-rate sweep: its configuration, divergence detection, resume, verdict and command line.

`fuse` is injected, so these tests are about the sweep and not about the fuser: the identity stands for a right one.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from experiments.lr_sweep import cli, data, gradients, model, report, sweep, train
from experiments.lr_sweep.config import Cell, ConfigError, SweepConfig, quick
from experiments.lr_sweep.store import Store
from experiments.lr_sweep.verdict import judge

pytestmark = pytest.mark.filterwarnings("error")

# Two cells, two rates: the smallest sweep that has something to resume.
SMALL = SweepConfig(
    learning_rates=(1e-3, 1e-2),
    optimizers=("sgd",),
    dtypes=("float32",),
    inputs=("standardized", "unscaled"),
    steps=20,
    batch_size=32,
    hidden=(16,),
    gradient_steps=2,
)
SMALL_FLAGS = (
    *("--learning-rates", "1e-3", "1e-2", "--optimizers", "sgd", "--dtypes", "float32"),
    *("--inputs", "standardized", "unscaled", "--steps", "20", "--batch-size", "32", "--hidden", "16"),
    *("--gradient-steps", "2"),
)


def identity(module):
    return module


class WrongGradient:
    """A "fused" model with the right values and gradients 1% too large."""

    def __init__(self, module):
        self._module = module

    def apply(self, variables, x):
        y = self._module.apply(variables, x)
        return y + 0.01 * (y - jax.lax.stop_gradient(y))


class ReassociatedModel:
    """A rightly fused model that sums in another order: every product split in two halves of the reduction axis."""

    def __init__(self, module):
        self._module = module

    def apply(self, variables, x):
        layers = list(variables["params"].values())
        for number, layer in enumerate(layers):
            half = layer["kernel"].shape[0] // 2
            x = x[:, half:] @ layer["kernel"][half:] + x[:, :half] @ layer["kernel"][:half] + layer["bias"][None]
            x = x if number == len(layers) - 1 else jax.nn.relu(x)
        return x


def command(folder, *flags, fuse=identity, **options):
    """Run the command in this process; (exit code, what it printed)."""
    out = io.StringIO()
    console = Console(file=out, width=200, soft_wrap=True)
    code = cli.main([*flags, "--output", str(folder)], fuse=fuse, console=console, **options)
    return code, out.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The small sweep, run once: (folder, exit code, output)."""
    folder = tmp_path_factory.mktemp("sweep")
    return folder, *command(folder, *SMALL_FLAGS)


@pytest.fixture(scope="module")
def results(finished):
    """Its results, by cell."""
    return Store(finished[0], SMALL, f"{identity.__module__}.{identity.__qualname__}").load()


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


@pytest.fixture
def training(monkeypatch, results):
    """Replaces the training of a cell by its known result; the list of cells "trained" so far."""
    trained = []

    def run_cell(config, cell, programs, indices):
        trained.append(cell)
        return results[cell]

    monkeypatch.setattr(sweep, "_run_cell", run_cell)
    return trained


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


# Verdict


def test_verdict_names_rates_where_only_one_diverges(results):
    cell = SMALL.cells()[0]
    bad = dataclasses.replace(results[cell].fused, diverged=(None, train.Divergence(3, "nan", {"nan": 3})))
    verdict = judge(SMALL, results | {cell: dataclasses.replace(results[cell], fused=bad)})
    assert not verdict.passed and verdict.disagreements == ((cell, 1e-2, "fused"),)
    text = "\n".join(verdict.lines())
    assert "diverge at the same rates: no" in text and f"{cell} lr 0.01: only fused diverged" in text


def test_verdict_passes_when_both_diverge_alike(results):
    cell = SMALL.cells()[0]
    bad = dataclasses.replace(results[cell].fused, diverged=(None, train.Divergence(3, "nan", {"nan": 3})))
    verdict = judge(SMALL, {cell: dataclasses.replace(results[cell], fused=bad, unfused=bad)})
    assert verdict.passed and "diverge at the same rates: yes" in verdict.lines()[0]


def test_a_fused_gradient_that_is_not_finite_fails(results):
    cell = SMALL.cells()[0]
    gradient = dataclasses.replace(results[cell].gradient, max_difference=math.inf)
    assert not judge(SMALL, {cell: dataclasses.replace(results[cell], gradient=gradient)}).passed


# Store and resume


def test_store_round_trips_values_json_lacks(tmp_path, results):
    cell = SMALL.cells()[1]
    loss = (math.nan, math.inf)
    outcome = dataclasses.replace(
        results[cell].fused, loss=loss, diverged=(None, train.Divergence(0, "nan", {"nan": 0}))
    )
    changed = results | {cell: dataclasses.replace(results[cell], fused=outcome)}
    store = Store(tmp_path, SMALL, "test")
    store.save(changed, {})
    assert repr(store.load()) == repr({c: changed[c] for c in SMALL.cells()})
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_resume_skips_finished_cells_and_gives_the_same_file(tmp_path, monkeypatch, finished, training):
    real_run = sweep.run

    def interrupted_run(*arguments):
        yield next(real_run(*arguments))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sweep, "run", interrupted_run)
        code, output = command(tmp_path, *SMALL_FLAGS)
    assert code == 130 and "interrupted: 1 of 2 cells are kept" in output and "run the same command" in output
    code, output = command(tmp_path, *SMALL_FLAGS)
    assert code == 0 and "1 of 2 cells are finished already" in output
    assert "1/2 " not in output and "2/2 " in output
    assert training == list(SMALL.cells())
    assert (tmp_path / "results.json").read_bytes() == (finished[0] / "results.json").read_bytes()


def test_a_finished_sweep_trains_nothing_unless_fresh(tmp_path, finished, training):
    (tmp_path / "results.json").write_bytes((finished[0] / "results.json").read_bytes())
    assert command(tmp_path, *SMALL_FLAGS, "--resume")[0] == 0 and not training
    assert command(tmp_path, *SMALL_FLAGS, "--fresh")[0] == 0 and training == list(SMALL.cells())


def _truncate(text):
    return text[: len(text) // 2]


def _edit_value(text):
    document = json.loads(text)
    document["cells"][0]["fused"]["accuracy"][0] = 0.999
    return json.dumps(document)


def _other_schema(text):
    document = json.loads(text)
    return json.dumps(document | {"schema_version": 0, "fingerprint": "x"})


def _other_config(text):
    document = json.loads(text)
    document["config"]["steps"] = 21
    return json.dumps(document | {"fingerprint": "x"})


@pytest.mark.parametrize(
    ("damage", "suffix", "reason"),
    [
        (_truncate, "corrupt", "it cannot be read"),
        (_edit_value, "corrupt", "its checksum does not match"),
        (lambda text: "[]", "corrupt", "it holds no JSON object"),
        (_other_schema, "stale", "its schema version is 0"),
        (_other_config, "stale", "other settings (steps)"),
    ],
)
def test_unusable_files_are_reported_kept_aside_and_never_trusted(tmp_path, finished, damage, suffix, reason):
    text = damage((finished[0] / "results.json").read_text())
    path = tmp_path / "results.json"
    for number in (1, 2):
        path.write_text(text)
        store = Store(tmp_path, SMALL, f"{identity.__module__}.{identity.__qualname__}")
        assert store.load() == {} and not path.exists()
        (note,) = store.notes
        assert reason in note and "trained anew" in note
        assert (tmp_path / f"results.{suffix}-{number}.json").read_text() == text


def test_a_corrupt_file_is_rebuilt(tmp_path, finished, training):
    (tmp_path / "results.json").write_text("{")
    code, output = command(tmp_path, *SMALL_FLAGS)
    assert code == 0 and "note: " in output and "results.corrupt-1.json" in output
    assert training == list(SMALL.cells())
    assert (tmp_path / "results.json").read_bytes() == (finished[0] / "results.json").read_bytes()


# Command line


def test_command_writes_json_and_picture_and_prints_the_table(finished):
    folder, code, output = finished
    assert code == 0
    assert "fused and unfused diverge at the same rates: yes" in output
    assert "max gradient difference in the first 2 steps: float32 0" in output
    assert "1/2 standardized sgd float32: best accuracy" in output and "diverged @ step" in output
    document = json.loads((folder / "results.json").read_text())
    assert document["summary"]["verdict"]["passed"] is True and len(document["cells"]) == 2
    picture = imread(folder / "sweep.png")
    assert picture.shape[0] > 400 and picture.shape[1] > 400
    # More than one ink: lines, markers and text on white.
    assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 50


def test_table_shows_both_values_where_they_differ(results):
    cell = SMALL.cells()[0]
    changed = dataclasses.replace(results[cell].fused, accuracy=(0.25, 0.5))
    view = report.table(SMALL, {cell: dataclasses.replace(results[cell], fused=changed)})
    out = io.StringIO()
    Console(file=out, width=120).print(view)
    assert f"0.250 | {results[cell].unfused.accuracy[0]:.3f}" in out.getvalue()


def test_command_fails_on_a_wrong_gradient(tmp_path):
    code, output = command(tmp_path, *SMALL_FLAGS, "--inputs", "unscaled", fuse=WrongGradient)
    assert code == 1 and "exceeds the bound" in output
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["summary"]["verdict"]["passed"] is False
    assert record["cells"][0]["gradient"]["max_difference"] == pytest.approx(0.01, rel=0.01)


def test_quick_reproduces_the_origin(tmp_path):
    flags = ("--quick", "--optimizers", "sgd", "--dtypes", "float32")
    code, output = command(tmp_path, *flags, fuse=ReassociatedModel)
    assert code == 0
    assert "origin's observation (unscaled sgd float32: converges at 1e-3, NaN at 1e-2) reproduced: yes" in output


def test_command_tells_when_nothing_was_fused(tmp_path, finished):
    (tmp_path / "results.json").write_bytes((finished[0] / "results.json").read_bytes())

    class Report:
        def count(self, op):
            assert op == "gemm_epilogue"
            return 0

    code, output = command(tmp_path, *SMALL_FLAGS, explain=lambda target, variables, x: Report())
    assert code == 0 and "float32 0 gemm_epilogue" in output and "comparing its variants says nothing" in output


def test_usage_errors_name_the_flag_and_exit_with_2(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        command(tmp_path, "--learning-rates", "-1")
    assert caught.value.code == 2
    assert "--learning-rates: expected positive finite numbers, found -1.0" in capsys.readouterr().err


def test_help_runs_as_a_module():
    result = subprocess.run(
        [sys.executable, "-m", "experiments.lr_sweep", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    for flag in (
        "--learning-rates",
        "--optimizers",
        "--dtypes",
        "--inputs",
        "--steps",
        "--seed",
        "--output",
        "--quick",
    ):
        assert flag in result.stdout
    assert "exit codes" in result.stdout


def test_cells_print_as_their_parts():
    assert str(Cell("unscaled", "sgd", "float32")) == "unscaled sgd float32"
