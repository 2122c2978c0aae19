"""What is benchmarked: how programs are discovered, and that each has values and gradients on random data."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import pytest

from experiments.benchmarks import compare
from experiments.benchmarks.discovery import discover
from experiments.benchmarks.program import Program, scaled, step
from tests.experiments.benchmarks.benchmark_support import PROGRAMS, TINY

# discovery


def make_package(tmp_path, monkeypatch, **sources):
    name = f"pack_{tmp_path.name.replace('-', '_')}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    for module, source in sources.items():
        (folder / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return importlib.import_module(name)


def exporting(name):
    return (
        f"from experiments.benchmarks.program import Program\nPROGRAM = Program({name!r}, lambda seed, scale: None)\n"
    )


def test_discovery_is_sorted_and_passes_over_helpers(tmp_path, monkeypatch):
    package = make_package(tmp_path, monkeypatch, b=exporting("x"), a=exporting("y"), _helper="raise RuntimeError")
    assert list(discover(package, "PROGRAM", Program)) == ["y", "x"]


def test_discovery_refuses_duplicates(tmp_path, monkeypatch):
    package = make_package(tmp_path, monkeypatch, a=exporting("same"), b=exporting("same"))
    with pytest.raises(ValueError, match=r"'same' in both .*\.a and .*\.b"):
        discover(package, "PROGRAM", Program)


def test_discovery_refuses_a_module_without_the_constant(tmp_path, monkeypatch):
    package = make_package(tmp_path, monkeypatch, a="")
    with pytest.raises(TypeError, match="must export PROGRAM"):
        discover(package, "PROGRAM", Program)


# programs


def test_the_suite_has_its_programs():
    expected = "mlp mlp_gelu mlp_bf16 mixer resnet_train resnet_eval scanned_stack lstm moe dropout_mlp nnx_mlp"
    assert {*expected.split(), "vit", "llama", "t5_encoder", "transformer_24"} <= set(PROGRAMS)
    assert list(PROGRAMS) == sorted(PROGRAMS)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "transformer_24" else n for n in PROGRAMS]
)
def test_program_gives_finite_values_and_gradients_on_random_data(name):
    program = PROGRAMS[name]
    target, args = program.build(0, TINY)
    arrays = [leaf for leaf in jax.tree.leaves(args) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert all(float(jnp.std(leaf.astype(jnp.float32))) > 0 for leaf in arrays), "constant data"

    def both(*args):
        return [step(program, target, mode)(*args) for mode in program.modes]

    # values are wanted, not speed
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    forward, (value, gradients) = jax.jit(both).lower(*args).compile(compiler_options=quick)(*args)
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves((forward, value, gradients)))
    assert jax.tree.structure(gradients) == jax.tree.structure(args[0])
    assert any(float(jnp.max(jnp.abs(leaf))) > 0 for leaf in jax.tree.leaves(gradients))


def test_equal_seeds_build_equal_arguments():
    (_, one), (_, two), (_, other) = (PROGRAMS["mlp"].build(seed, TINY) for seed in (3, 3, 4))
    assert compare.relative_difference(one, two) == 0
    assert compare.relative_difference(one, other) > 0


@pytest.mark.parametrize("bad", [{"name": "A-b"}, {"modes": ()}, {"modes": ("backward",)}, {"sum_length": 0}])
def test_invalid_programs_cannot_be_built(bad):
    with pytest.raises(ValueError):
        Program(**{"name": "x", "build": lambda seed, scale: None, **bad})


def test_scaled_is_a_positive_multiple():
    assert [scaled(512, s) for s in (1.0, 0.25, 0.03, 0.0)] == [512, 128, 8, 8]


def test_step_refuses_a_mode_of_another_program():
    with pytest.raises(ValueError, match="no mode"):
        step(Program("x", lambda seed, scale: None, modes=("forward",)), lambda p: p, "value_and_grad")
