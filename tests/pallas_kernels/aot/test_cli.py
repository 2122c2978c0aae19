"""``python -m pallas_kernels.aot``: a report, its file, and errors that say what to do."""

import importlib.metadata
import json
import sys

import pytest

from pallas_kernels.aot.cli import main

MODULE = """
import jax
import jax.numpy as jnp

def layer(x, w, b):
    return jax.nn.relu(x @ w + b)

def twice(x, w, b):
    return layer(layer(x, w, b), w, b)

def gradient(*args):
    return jax.grad(lambda *a: layer(*a).astype(jnp.float32).sum(), (0, 1, 2))(*args)

def arguments():
    return (jax.ShapeDtypeStruct((64, 64), jnp.bfloat16),) * 2

number = 3
"""
SHAPES = ("--arg", "bf16[64,64]", "--shape", "bf16[64,64]", "--arg", "bf16[64]")


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "mymodel.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mymodel", raising=False)
    yield tmp_path
    sys.modules.pop("mymodel", None)


@pytest.mark.aot
def test_two_functions_side_by_side(here, capsys):
    given = ["--init", "mymodel:arguments", "--arg", "bf16[64]", "--json", "out/report.json"]
    assert main(["h200", "mymodel:layer", *given, "--beside", "mymodel:gradient"]) == 0
    out = capsys.readouterr().out
    assert "mymodel:layer for h200: 1 kernel," in out and "for h200" in out and "wrote out/report.json" in out
    data = json.loads((here / "out/report.json").read_text())
    assert [r["name"] for r in data["reports"]] == ["mymodel:layer", "mymodel:gradient"]
    assert [p.name for p in (here / "out").iterdir()] == ["report.json"]


@pytest.mark.aot
def test_what_cannot_be_traced_or_compiled_in_time(here, capsys):
    assert main(["h200", "mymodel:layer", "--arg", "bf16[64,3]", *SHAPES[2:], "--json", "report.json"]) == 1
    assert "contracting dimensions" in capsys.readouterr().err
    assert main(["h200", "mymodel:layer", *SHAPES, "--timeout", "0.1"]) == 1
    assert "longer than timeout_s=0.1 seconds" in capsys.readouterr().err
    assert not (here / "report.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["v100", "mymodel:layer"], "invalid choice: 'v100'"),
        (["h200", "layer"], "TARGET: expected module:name, found 'layer'"),
        (["h200", "mymodel:number"], "TARGET: expected a function, found a int"),
        (["h200", "mymodel:layer", "--beside", "mymodel:no"], "--beside: expected mymodel to have no, found no 'no'"),
        (["h200", "mymodel:layer", "--arg", "bf16(8)"], "--arg: expected an element type and a shape"),
        (["h200", "mymodel:layer", "--arg", "t32[8]"], "element types are f16, f32, f64, bf16, i8"),
        (
            ["h200", "mymodel:layer", *SHAPES[:4]],
            "--arg: expected a type for each of the 3 arguments of mymodel:layer(x, w, b), found 2 (missing",
        ),
        (["h200", "mymodel:layer", "--init", "mymodel:number"], "--init: expected a function, found a int"),
        (["h200", "mymodel:layer", "--json", "."], "--json: expected the name of a file, found the folder"),
        (["h200", "mymodel:layer", "--timeout", "0"], "must be above 0, found 0"),
        (["h200", "mymodel:layer", "--timeout", "soon"], "must be a number above 0, found 'soon'"),
    ],
)
def test_errors_name_the_argument_and_the_remedy(here, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_missing_packages(here, capsys, monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(SystemExit) as stopped:
        main(["h200", "mymodel:layer", *SHAPES])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "jax-cuda13-plugin, jax-cuda13-pjrt, nvidia-cuda-nvcc" in error and "pip install --no-deps" in error
