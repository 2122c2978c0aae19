"""A sweep's results on disk: what is kept and skipped when it is run again, what is set aside and never trusted."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from experiments.lr_sweep import sweep, train
from experiments.lr_sweep.store import Store
from tests.experiments.lr_sweep.sweep_support import SMALL, SMALL_FLAGS, command, identity

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def training(monkeypatch, results):
    """Replaces the training of a cell by its known result; the list of cells "trained" so far."""
    trained = []

    def run_cell(config, cell, programs, indices):
        trained.append(cell)
        return results[cell]

    monkeypatch.setattr(sweep, "_run_cell", run_cell)
    return trained


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
