"""``python -m aicf_jax explain``: reports, files, and errors that say what to do."""

import json
import subprocess
import sys
import textwrap

import pytest

from aicf_jax.cli import main

MODULE = """
import jax, jax.numpy as jnp
from flax import linen as nn

def layer(x, w, b):
    return jax.nn.relu(x @ w + b)

model = nn.Dense(4)

def init():
    x = jnp.ones((8, 16))
    return jax.eval_shape(model.init, jax.random.key(0), x), x

def needs_value(x):
    return x if x.sum() > 0 else -x

def broken():
    raise RuntimeError("no data")

number = 3
class Net(nn.Module):
    pass
"""
ARGS = ("--arg", "f32[8,16]", "--arg", "f32[16,4]", "--arg", "f32[4]")


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "mymodel.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mymodel", raising=False)
    yield tmp_path
    sys.modules.pop("mymodel", None)


def test_a_function_with_shapes(here, capsys):
    assert main(["explain", "mymodel:layer", *ARGS]) == 0
    out = capsys.readouterr().out
    assert "layer: 1 fusion, 0 refusals" in out and "gemm_epilogue" in out and "\x1b" not in out


def test_a_model_with_its_own_arguments(here, capsys):
    assert main(["explain", "mymodel:model", "--init", "mymodel:init"]) == 0
    assert "Dense: 1 fusion" in capsys.readouterr().out


def test_files_are_written_whole(here, capsys):
    files = "--html", "out/report.html", "--json", "out/report.json"
    assert main(["explain", "mymodel:layer", *ARGS, *files]) == 0
    assert (here / "out/report.html").read_text().startswith("<!doctype html>")
    assert json.loads((here / "out/report.json").read_text())["fusions"][0]["op"] == "gemm_epilogue"
    assert sorted(p.name for p in (here / "out").iterdir()) == ["report.html", "report.json"]
    assert "wrote out/report.html" in capsys.readouterr().out


def test_a_policy(here, capsys):
    assert main(["explain", "mymodel:layer", *ARGS, "--policy", "numerics=bitwise", "--policy", "fuel=none"]) == 0
    assert "0 fusions, 1 refusal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["layer"], "TARGET: expected module:name, found 'layer'"),
        (["nosuch:f"], r"TARGET: expected a module nosuch, found none .* Run the command from the folder"),
        (["mymodel:nosuch"], r"TARGET: expected mymodel to have nosuch, found no 'nosuch'. It has: .*layer"),
        (["mymodel:number"], "TARGET: expected a function or a flax module, found a int"),
        (["mymodel:Net"], "TARGET: expected a function or a flax module, found the class Net. Name an instance"),
        (["mymodel:layer", "--arg", "f32(8)"], r"--arg: expected an element type and a shape, found 'f32\(8\)'. For"),
        (["mymodel:layer", "--arg", "f33[8]"], r"--arg: expected an element type and a shape, found 'f33\[8\]'"),
        (["mymodel:layer", "--arg", "f32[8,]"], r"--arg: expected an element type and a shape, found 'f32\[8,\]'"),
        (["mymodel:layer", "--arg", "f64[8]"], r"--arg: expected types of up to 32 bits, .* JAX_ENABLE_X64=1"),
        (["mymodel:layer", "--policy", "speed=1"], "--policy: expected KEY=VALUE with one of numerics, .*'speed=1'"),
        (["mymodel:layer", "--policy", "fuel=-1"], r"--policy: expected values that Policy takes, found Policy\(fuel"),
        (
            ["mymodel:layer", "--init", "mymodel:broken"],
            r"--init: expected mymodel:broken\(\) .*Error: no data",
        ),
        (["mymodel:layer", "--html", "."], r"--html: expected the name of a file, found the folder"),
    ],
)
def test_errors_name_the_argument_and_the_remedy(here, capsys, arguments, message):
    import re

    with pytest.raises(SystemExit) as stopped:
        main(["explain", *arguments])
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_function_that_cannot_be_traced(here, capsys):
    assert main(["explain", "mymodel:needs_value", "--arg", "f32[3]", "--html", "report.html"]) == 1
    err = capsys.readouterr().err
    assert "mymodel:needs_value cannot be traced with float32[3]" in err and "needs_value" in err
    assert not (here / "report.html").exists()


@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("f32[8,128]", (8, 128), "float32"),
        ("float32[8, 128]", (8, 128), "float32"),
        ("bf16[0]", (0,), "bfloat16"),
        ("i32[]", (), "int32"),
        ("s32[1024]", (1024,), "int32"),
        ("bool[2]", (2,), "bool"),
        ("pred[2]", (2,), "bool"),
        ("u8[3]", (3,), "uint8"),
        ("c64[1]", (1,), "complex64"),
    ],
)
def test_types(text, shape, dtype):
    from pallas_kernels.command_line import array_type

    found = array_type("--arg", text)
    assert found.shape == shape and str(found.dtype) == dtype


def test_colours_are_for_terminals(monkeypatch, capsys):
    from aicf_jax import cli

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    cli._show("f: 1 fusion, 0 refusals\n\nfused   gemm[red]\n        at f.py:1 (f)")
    coloured = capsys.readouterr().out
    assert "\x1b[" in coloured and "gemm[red]" in coloured
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    cli._show("fused   gemm")
    assert capsys.readouterr().out == "fused   gemm\n"


def test_the_module_runs(here):
    done = subprocess.run([sys.executable, "-m", "aicf_jax", "--help"], capture_output=True, text=True, check=False)
    if done.returncode and "No module named aicf_jax" in done.stderr:
        import aicf_jax

        root = str(aicf_jax.__path__[0]).rsplit("/", 1)[0]
        done = subprocess.run(
            [sys.executable, "-m", "aicf_jax", "--help"], capture_output=True, text=True, check=False, cwd=root
        )
    assert done.returncode == 0 and "explain" in done.stdout
