"""A benchmark run: its results on disk, how it is continued, and its command line."""

from __future__ import annotations

import io
import json
import math
import sys

import jax
import pytest
from rich.console import Console

from experiments import _io
from experiments.benchmarks import __main__ as cli
from experiments.benchmarks import measure, report, rewrite_cost
from experiments.benchmarks.fusers import FUSERS, Fuser, Work, identity
from experiments.benchmarks.results import Results
from experiments.benchmarks.studies import rewrite as rewrite_study
from experiments.benchmarks.studies import suite as suite_study
from experiments.benchmarks.study import Outcome, choose
from tests.experiments.benchmarks.benchmark_support import PROGRAMS, entry

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
