"""What a sweep concludes and shows: its verdict, its table and picture, its command line and exit codes."""

from __future__ import annotations

import dataclasses
import io
import json
import math

import jax
import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from experiments.lr_sweep import report, train
from experiments.lr_sweep.config import Cell
from experiments.lr_sweep.verdict import judge
from tests.experiments.command_support import help_of
from tests.experiments.lr_sweep.sweep_support import SMALL, SMALL_FLAGS, ReassociatedModel, command

pytestmark = pytest.mark.filterwarnings("error")


class WrongGradient:
    """A "fused" model with the right values and gradients 1% too large."""

    def __init__(self, module):
        self._module = module

    def apply(self, variables, x):
        y = self._module.apply(variables, x)
        return y + 0.01 * (y - jax.lax.stop_gradient(y))


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
    text = help_of("experiments.lr_sweep")
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
        assert flag in text
    assert "exit codes" in text


def test_cells_print_as_their_parts():
    assert str(Cell("unscaled", "sgd", "float32")) == "unscaled sgd float32"
