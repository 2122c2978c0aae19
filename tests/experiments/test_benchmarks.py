"""The benchmark runner: discovery, programs, pairing, comparison, results on disk, command line; no asserted times."""

from __future__ import annotations

import importlib
import io
import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from experiments import _io
from experiments.benchmarks import __main__ as cli
from experiments.benchmarks import bars, compare, measure, report, rewrite_cost, suite
from experiments.benchmarks.discovery import discover
from experiments.benchmarks.fusers import FUSERS, Fuser, Work, identity
from experiments.benchmarks.program import Program, scaled, step
from experiments.benchmarks.results import Results
from experiments.benchmarks.studies import rewrite as rewrite_study
from experiments.benchmarks.studies import suite as suite_study
from experiments.benchmarks.study import Outcome, choose

PROGRAMS = discover(suite, "PROGRAM", Program)
TINY = 0.05


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


# measuring


class FakeMachine:
    """A clock that moves only while work is done, and a log of who worked."""

    def __init__(self):
        self.time_ns = 0
        self.log = ""

    def clock(self):
        return self.time_ns

    def work(self, name, cost_ns):
        def call():
            self.log += name
            self.time_ns += next(cost_ns) if hasattr(cost_ns, "__next__") else cost_ns

        return call


def test_pairs_take_turns_and_alternate_who_is_first():
    machine = FakeMachine()
    sampling = measure.Sampling(tolerance=0.01, min_pairs=8)
    pairs, stopped = measure.sample_pairs(machine.work("A", 100), machine.work("B", 150), sampling, 1, machine.clock)
    assert machine.log == "AB" * measure.WARM_CALLS + "ABBA" * 4
    assert pairs == [(100, 150)] * 8 and stopped == "tolerance"
    ratio = measure.summarize(pairs, stopped)
    assert (ratio.median, ratio.low, ratio.high, ratio.pairs) == (1.5, 1.5, 1.5, 8)


def noisy(seed):
    generator = np.random.default_rng(seed)
    while True:
        yield int(generator.integers(50, 150))


def test_sampling_goes_on_until_the_interval_is_narrow():
    machine = FakeMachine()
    sampling = measure.Sampling(tolerance=0.2, min_pairs=8, max_pairs=4000)
    calls = machine.work("A", noisy(0)), machine.work("B", noisy(1))
    pairs, stopped = measure.sample_pairs(*calls, sampling, 1e9, machine.clock)
    ratio = measure.summarize(pairs, stopped)
    assert stopped == "tolerance" and 8 < len(pairs) < 4000
    assert ratio.high - ratio.low <= 0.2 and ratio.low <= ratio.median <= ratio.high and ratio.q1 < ratio.q3


@pytest.mark.parametrize(("seconds", "most", "reason", "count"), [(0, 400, "time", 8), (1e9, 20, "pairs", 20)])
def test_sampling_stops_when_time_or_pairs_are_used_up(seconds, most, reason, count):
    machine = FakeMachine()
    sampling = measure.Sampling(tolerance=1e-9, min_pairs=8, max_pairs=most)
    calls = machine.work("A", noisy(0)), machine.work("B", noisy(1))
    pairs, stopped = measure.sample_pairs(*calls, sampling, seconds, machine.clock)
    assert (stopped, len(pairs)) == (reason, count)


def test_median_interval_is_the_textbook_one():
    # n = 20: 2 P(Binomial(20, 1/2) <= 5) = 0.0414, so the 6th and the 15th value
    assert measure.median_interval(range(1, 21)) == (6, 15)
    assert measure.median_interval(range(6)) == (0, 5)
    assert measure.median_interval(range(5)) is None
    assert measure.median_interval([]) is None
    # n/2 -+ 1.96 sqrt(n)/2 of the normal approximation, for more values than 2**n fits into a float
    low, high = measure.median_interval(range(3000))
    assert abs(low - (1500 - 53.7)) <= 2 and abs(high - (1500 + 53.7)) <= 2


def test_median_interval_covers_the_median():
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        low, high = measure.median_interval(generator.exponential(size=25))
        covered += low <= math.log(2) <= high
    assert covered / 400 > 0.93  # 0.95 and more, less three standard errors of 400 trials


def test_too_few_pairs_are_refused():
    with pytest.raises(ValueError, match="too few"):
        measure.summarize([(1, 1)] * 7, "time")
    with pytest.raises(ValueError, match="min_pairs"):
        measure.Sampling(min_pairs=2)


def test_temporaries_come_from_the_memory_analysis():
    x = jnp.ones((64, 64))
    compiled = measure.compile_ahead(lambda x: jnp.tanh(x @ x) @ jnp.sin(x @ x.T), (x,))
    assert compiled.temporaries_bytes >= x.nbytes

    class Silent:
        def memory_analysis(self):
            return None

    with pytest.raises(RuntimeError, match="no memory analysis"):
        measure.temporaries_bytes(Silent())


# comparing


def hlo(function, *args):
    return jax.jit(function).lower(*args).compile().as_text()


def test_programs_are_identical_whatever_their_names_and_places():
    def one(x, w):
        return jnp.tanh(x @ w)

    def another(inputs, weights):
        product = jnp.dot(inputs, weights)
        return jnp.tanh(product)

    x = jnp.ones((8, 8))
    texts = hlo(one, x, x), hlo(another, x, x)
    assert texts[0] != texts[1]
    assert compare.canonical_hlo(texts[0]) == compare.canonical_hlo(texts[1])
    assert "tanh" in compare.canonical_hlo(texts[0]) and "metadata" not in compare.canonical_hlo(texts[0])
    assert compare.canonical_hlo(hlo(lambda x, w: jnp.tanh(w @ x), x, x)) != compare.canonical_hlo(texts[0])


def test_metadata_with_braces_in_a_name_is_removed():
    text = 'HloModule jit_f, is_scheduled=true\n\nENTRY %main.1 (x.1: f32[2]) -> f32[2] {\n' \
           '  ROOT %t = f32[2] tanh(%x.1), metadata={op_name="a{b}\\"c" stack_frame_id=3}, other={1}\n}\n'  # fmt: skip
    expected = "HloModule, is_scheduled=true\nENTRY %0 (f32[2]) -> f32[2] {\n  ROOT %1 = f32[2] tanh(%2), other={1}\n}"
    assert compare.canonical_hlo(text) == expected


def test_relative_difference():
    a = {"w": jnp.array([1.0, -4.0]), "b": jnp.array([2.0])}
    assert compare.relative_difference(a, a) == 0
    assert compare.relative_difference(a, {**a, "w": jnp.array([1.0, -3.0])}) == 0.25
    # a leaf of rounding noise is judged by the size of the tree, not by itself
    zeros = {**a, "b": jnp.array([1e-9])}
    assert compare.relative_difference(zeros, {**zeros, "b": jnp.array([-1e-9])}) < 1e-6
    # a missing value is not noise
    assert compare.relative_difference({**a, "b": jnp.array([0.01])}, {**a, "b": jnp.array([0.0])}) == pytest.approx(1)


@pytest.mark.parametrize("other", [[jnp.ones(3)], jnp.ones(2), jnp.ones(3, jnp.bfloat16), jnp.array([1, 1, jnp.nan])])
def test_differences_of_structure_and_of_non_finite_places_are_infinite(other):
    assert compare.relative_difference(jnp.ones(3), other) == math.inf


def test_equal_non_finite_places_agree():
    values = jnp.array([1.0, jnp.nan, jnp.inf, -jnp.inf])
    assert compare.relative_difference(values, values) == 0
    assert compare.relative_difference(values, values.at[3].set(jnp.inf)) == math.inf


# bars


def entry(**changes):
    result = {
        "status": "measured",
        "ratio": {"median": 1.0, "low": 0.99, "high": 1.01, "q1": 0.98, "q3": 1.02, "pairs": 16, "stopped": "time"},
        "identical_program": False,
        "unfused": {"median_ns": 10, "compile_s": 1.0, "temporaries_bytes": 100},
        "fused": {"median_ns": 10, "compile_s": 1.0, "temporaries_bytes": 100},
        "max_relative_difference": 0.0,
        "tolerance": 1e-3,
        "agrees": True,
        "fusions": {},
    }
    return {**result, **changes}


SLOW = {"median": 1.05, "low": 1.04, "high": 1.06, "q1": 1.0, "q3": 1.1, "pairs": 16, "stopped": "time"}
MORE = {"median_ns": 10, "compile_s": 1.0, "temporaries_bytes": 101}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"ratio": SLOW}, "1.050x"),
        ({"ratio": SLOW, "identical_program": True}, None),
        ({"fused": MORE}, "101 bytes"),
        ({"agrees": False, "max_relative_difference": 0.5}, "differs by 0.5"),
        ({"agrees": False, "max_relative_difference": None}, "structure"),
        ({"status": "failed", "error": "ValueError: no"}, "failed"),
    ],
)
def test_bars_of_a_program(changes, words):
    missed = bars.missed_by_program("mlp/forward", entry(**changes))
    assert (not missed) if words is None else (len(missed) == 1 and "mlp/forward" in missed[0] and words in missed[0])


def test_an_interval_that_holds_the_bar_is_named():
    assert not bars.undecided_by_program("k", entry())
    assert bars.undecided_by_program("k", entry(ratio={**SLOW, "low": 1.0}))


def test_bars_of_rewriting():
    fine = {"status": "measured", "fraction": 0.15, "second_calls": {"eager_step": {"traces": 1, "rewrites": 0}}}
    assert not bars.missed_by_rewriting("k", fine)
    assert "16.0%" in bars.missed_by_rewriting("k", {**fine, "fraction": 0.16})[0]
    assert bars.missed_by_rewriting("k", {**fine, "second_calls": {"eager_step": {"traces": 1, "rewrites": 1}}})
    assert bars.missed_by_rewriting("k", {**fine, "second_calls": {"jitted_step": {"traces": 1, "rewrites": 0}}})


def test_rewriting_is_what_fusing_adds_before_compilation():
    calls = {"eager_step": Work(2, 1) - Work(1, 1)}
    rounds = [
        rewrite_cost.Round(rewrite_cost.Stages(1.0, 1.0, 8.0), rewrite_cost.Stages(trace, 1.0))
        for trace in (1.5, 2.0, 9.0)
    ]
    result = rewrite_cost.summarize(rounds, calls)
    assert (result["jit_s"], result["rewriting_s"], result["fraction"]) == (10.0, 1.0, 0.1)
    assert result["fraction_extremes"] == [0.05, 0.8]
    assert result["second_calls"] == {"eager_step": {"traces": 1, "rewrites": 0}}
    with pytest.raises(ValueError, match="denominator"):
        rewrite_cost.Round(rewrite_cost.Stages(1.0, 1.0), rewrite_cost.Stages(1.0, 1.0))


def test_rewriting_is_counted_for_the_second_call_only():
    seen = []

    def fuse(target):
        def fused(*args):
            seen.append(target)
            return target(*args)

        return fused

    counting = Fuser("counting", fuse, lambda: Work(len(seen), len(seen)), lambda: None, lambda target, args: {})
    program = PROGRAMS["mlp"]
    calls = rewrite_cost.second_calls(program, *program.build(0, TINY), counting)
    one, none = Work(1, 1), Work(0, 0)
    assert calls == {"eager_forward": one, "eager_step": one, "jitted_step": none}
    result = rewrite_cost.measure_round(program, *program.build(0, TINY), counting, fused_first=True)
    assert result.unfused.compile_s is not None and result.fused.compile_s is None


# results on disk


def test_atomic_write_leaves_the_old_file_when_writing_fails(tmp_path):
    path = tmp_path / "deep" / "x.json"
    _io.write_json_atomic(path, {"a": 1})
    with pytest.raises(ValueError):
        _io.write_json_atomic(path, {"a": math.nan})

    def broken(temporary):
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        _io.write_atomic(path, broken)
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


def test_files_set_aside_never_overwrite_each_other(tmp_path):
    names = []
    for _ in range(2):
        (tmp_path / "x.json").write_text("{")
        value, note = _io.load_json(tmp_path / "x.json", lambda value: None)
        assert value is None and "corrupt" in note
        names.append(note)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.corrupt-1.json", "x.corrupt-2.json"]
    assert names[0] != names[1]
    assert _io.load_json(tmp_path / "x.json", lambda value: None) == (None, None)


def test_fingerprint_is_of_content():
    assert _io.fingerprint({"a": (1, 2), "b": None}) == _io.fingerprint({"b": None, "a": [1, 2]})
    assert _io.fingerprint({"a": 1}) != _io.fingerprint({"a": 2})
    assert _io.fingerprint(measure.Sampling()) != _io.fingerprint(measure.Sampling(tolerance=0.5))
    with pytest.raises(TypeError, match="plain data"):
        _io.fingerprint({"a": object()})


def test_source_digest_follows_names_and_contents(tmp_path):
    (tmp_path / "a.py").write_text("1")
    first = _io.source_digest([tmp_path])
    assert first == _io.source_digest([tmp_path])
    (tmp_path / "a.py").write_text("2")
    second = _io.source_digest([tmp_path])
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({first, second, _io.source_digest([tmp_path])}) == 3


def test_results_continue_only_the_same_configuration(tmp_path):
    path = tmp_path / "suite.json"
    results = Results(path, "suite", {"a": 1})
    results.put("x/forward", {"n": 1})
    results.put("y/forward", {"error": "E"}, "failed")
    again = Results(path, "suite", {"a": 1})
    assert list(again.entries) == ["x/forward"] and "1 finished" in again.notes[0]
    assert Results(path, "suite", {"a": 1}, fresh=True).entries == {}
    other = Results(path, "suite", {"a": 2})
    assert other.entries == {} and "stale-1" in other.notes[0] and not path.exists()
    path.write_text("[]")
    assert "not a suite result" in Results(path, "suite", {"a": 2}).notes[0]


# command line


def run(tmp_path, *arguments):
    stream = io.StringIO()
    code = cli.main([*arguments, "--output", str(tmp_path)], Console(file=stream, width=200))
    return code, stream.getvalue()


ONE = ("suite", "--quick", "--programs", "mlp", "--budget", "0.1", "--fuse", "identity")


def test_list_names_everything_and_measures_nothing(tmp_path):
    code, text = run(tmp_path, "--list")
    lines = text.split("\n")
    assert code == 0 and "rewrite transformer_24/value_and_grad" in lines
    assert {f"suite {p.name}/{mode}" for p in PROGRAMS.values() for mode in p.modes} <= set(lines)
    assert list(tmp_path.iterdir()) == []


def test_help_names_the_studies(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("suite", "rewrite", "--budget", "--check"))


def test_a_run_writes_schema_and_chart_and_is_continued(tmp_path, monkeypatch):
    code, text = run(tmp_path, *ONE, "--check")
    assert code == 0 and "mlp/forward: " in text and "every bar is met" in text
    document = json.loads((tmp_path / "suite.json").read_text())
    assert {"schema", "study", "fingerprint", "config", "started", "updated", "entries"} == set(document)
    assert {"python", "packages", "cores", "backend"} <= set(document["config"]["environment"])
    assert set(document["entries"]) == {"mlp/forward", "mlp/value_and_grad"}
    for found in document["entries"].values():
        assert set(found) == {*entry(), "finished", "load_average"}
        assert all(set(found[key]) == set(entry()[key]) for key in ("ratio", "unfused", "fused"))
        assert found["identical_program"] and found["agrees"] and found["max_relative_difference"] == 0
    assert (tmp_path / "ratios.png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr(suite_study, "measure", lambda *args: pytest.fail("measured again"))
    code, text = run(tmp_path, *ONE)
    assert code == 0 and "2 finished entries kept" in text


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path, monkeypatch):
    measured = []

    def interrupted(program, mode, *rest):
        if mode == "value_and_grad" and not measured[1:]:
            measured.append("interrupted")
            raise KeyboardInterrupt
        measured.append(mode)
        return {key: value for key, value in entry().items() if key != "status"}

    monkeypatch.setattr(suite_study, "measure", interrupted)
    assert run(tmp_path, *ONE)[0] == 130
    assert list(json.loads((tmp_path / "suite.json").read_text())["entries"]) == ["mlp/forward"]
    assert run(tmp_path, *ONE)[0] == 0
    assert measured == ["forward", "interrupted", "value_and_grad"]


def test_a_corrupt_file_is_reported_and_set_aside(tmp_path, monkeypatch):
    monkeypatch.setattr(suite_study, "measure", lambda *a: {k: v for k, v in entry().items() if k != "status"})
    (tmp_path / "suite.json").write_text('{"schema": 1, "entr')
    code, text = run(tmp_path, *ONE)
    assert code == 0 and "corrupt" in text
    assert (tmp_path / "suite.corrupt-1.json").read_text() == '{"schema": 1, "entr'


def test_a_failing_program_is_named_and_the_others_go_on(tmp_path, monkeypatch):
    def broken(program, mode, *rest):
        if mode == "forward":
            raise RuntimeError("no kernel")
        return {key: value for key, value in entry().items() if key != "status"}

    monkeypatch.setattr(suite_study, "measure", broken)
    code, text = run(tmp_path, *ONE)
    assert code == 1 and "bar missed: mlp/forward: failed, RuntimeError: no kernel" in text
    entries = json.loads((tmp_path / "suite.json").read_text())["entries"]
    assert [e["status"] for e in entries.values()] == ["failed", "measured"]


def test_the_rewrite_study_writes_its_entry_and_records_failures(tmp_path, monkeypatch):
    monkeypatch.setattr(rewrite_study, "PROGRAM", PROGRAMS["mlp"])
    code, text = run(tmp_path, "rewrite", "--quick", "--fuse", "identity")
    assert code == 0 and "1 rounds" in text and "second jitted_step call" in text
    (found,) = json.loads((tmp_path / "rewrite.json").read_text())["entries"].values()
    assert found["status"] == "measured" and found["jit_s"] > 0
    assert found["second_calls"]["jitted_step"] == {"traces": 0, "rewrites": 0}

    def broken(*args):
        raise RuntimeError("no plan")

    monkeypatch.setattr(rewrite_cost, "second_calls", broken)
    code, text = run(tmp_path, "rewrite", "--quick", "--fuse", "identity", "--fresh")
    assert code == 1 and "failed, RuntimeError: no plan" in text


def test_check_names_a_wrong_program(tmp_path, monkeypatch):
    def wrong(target):
        return lambda *args: jax.tree.map(lambda leaf: leaf * 1.5, target(*args))

    fuser = Fuser("identity", wrong, lambda: Work(0, 0), lambda: None, lambda target, args: {"gemm_epilogue": 3})
    monkeypatch.setitem(FUSERS, "identity", lambda: fuser)
    code, text = run(tmp_path, *ONE, "--modes", "forward", "--check")
    assert code == 1 and "bar missed: mlp/forward: differs by 0.5" in text
    code, text = run(tmp_path, *ONE, "--modes", "forward")
    assert code == 0, "without --check a missed bar is only reported"


def test_verdict():
    console = Console(file=io.StringIO())
    assert cli.verdict([Outcome()], True, console) == 0
    assert cli.verdict([Outcome(missed=("x",))], False, console) == 0
    assert cli.verdict([Outcome(), Outcome(missed=("x",))], True, console) == 1
    assert cli.verdict([Outcome(failed=("x",))], False, console) == 1


def test_wrong_use_is_explained(tmp_path, capsys, monkeypatch):
    assert run(tmp_path, *ONE, "--modes", "sideways")[0] == 2
    assert "unknown mode sideways" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "aicf_jax", type(sys)("aicf_jax"))
    assert run(tmp_path, "suite", "--fuse", "aicf_jax")[0] == 2
    assert "no fuse" in capsys.readouterr().err
    with pytest.raises(ValueError, match="unknown program nothing"):
        choose(PROGRAMS, ("nothing",), "program")


def test_the_identity_fuser_does_nothing():
    fuser = identity()
    assert fuser.fuse(len) is len and fuser.work() == Work(0, 0) and fuser.fusions(len, ()) == {}
    fuser.clear()


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2_680_000_000, "2.7 GB")])
def test_bytes_are_written_in_decimal_units(count, text):
    assert report.bytes_text(count) == text
