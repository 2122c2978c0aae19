"""The attention study: programs, peers, what does not fit into memory, bars, command line; no asserted times."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from experiments.benchmarks import __main__ as cli
from experiments.benchmarks import bars, compare
from experiments.benchmarks.attention import gpt, measuring, memory, peers, spellings
from experiments.benchmarks.attention.cases import FULL, STACK, Case, Sizes, all_cases, baselines
from experiments.benchmarks.fusers import FUSERS, Fuser, Work, aicf, identity
from experiments.benchmarks.measure import Sampling
from experiments.benchmarks.studies import attention as study

TINY_STACK = gpt.Stack(layers=1, width=16, heads=2, length=16, vocabulary=32, batch=1)
TINY = Sizes(lengths=(16, 32), heads=2, head_dim=8, stack=TINY_STACK)
FEW = Sampling(tolerance=1.0, min_pairs=8, max_pairs=8)
PLENTY = 10**12


def lean(q, k, v):
    """Causal attention one query at a time, in another order of operations: (S,) scores are all it stores."""
    scale = q.shape[-1] ** -0.5

    def row(i):
        scores = jnp.einsum("bhd,bshd->bhs", q[:, i] * scale, k)
        scores = jnp.where(jnp.arange(k.shape[1]) <= i, scores, -jnp.inf)
        return jnp.einsum("bhs,bshd->bhd", jax.nn.softmax(scores), v)

    return jnp.swapaxes(jax.lax.map(row, jnp.arange(q.shape[1])), 0, 1)


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Programs here run a few times, and compiling them is what takes the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


LEAN = Fuser("lean", lambda target: lean, lambda: Work(0, 0), lambda: None, lambda target, args: {"attention": 1})


# programs


@pytest.mark.slow
@pytest.mark.parametrize("mode", spellings.MODES)
def test_spellings_agree_with_each_other_and_with_the_formula(mode):
    args = spellings.attention_args(32, 2, 8, 0)
    tolerance = spellings.attention_tolerance(32, 8)
    found = [jax.jit(spellings.attention_step(f, mode))(*args) for f in (*spellings.SPELLINGS.values(), lean)]
    assert all(compare.relative_difference(found[0], other) <= tolerance for other in found[1:])
    if mode == "forward":
        q, k, v = (np.asarray(arg, np.float64)[0] for arg in args[:3])
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(8)
        weights = np.exp(scores) * np.tril(np.ones((32, 32)))
        expected = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
        np.testing.assert_allclose(found[0][0], expected, atol=tolerance * np.abs(expected).max())


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match=r"must be one of .* found 'backward'"):
        spellings.attention_step(lean, "backward")


def test_the_stack_has_a_finite_loss_near_the_logarithm_of_its_vocabulary():
    loss, args = gpt.build(TINY_STACK, 0)
    value, gradients = jax.jit(jax.value_and_grad(loss))(*args)
    assert abs(float(value) - math.log(32)) < 1
    assert all(bool(jnp.any(leaf != 0)) for leaf in jax.tree.leaves(gradients["Embed_0"]))
    with pytest.raises(ValueError, match="heads must divide width"):
        gpt.Stack(heads=3)
    with pytest.raises(ValueError, match="must be at least 1"):
        gpt.Stack(layers=0)


def test_cases_are_every_baseline_length_and_mode():
    keys = [case.key for case in all_cases(FULL)]
    assert len(keys) == len(set(keys)) and keys[-1] == "gpt_stack/s1024/value_and_grad"
    for length in (512, 1024, 2048, 4096, 8192, 16384):
        assert {f"{name}/s{length}/{mode}" for name in ("flax", "jax_nn") for mode in spellings.MODES} <= set(keys)


# peers


def fake_tokamax(monkeypatch):
    def dot_product_attention(q, k, v, *, is_causal, implementation=None):
        assert is_causal
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    module = types.ModuleType("tokamax")
    vars(module)["dot_product_attention"] = dot_product_attention
    monkeypatch.setitem(sys.modules, "tokamax", module)


def install(monkeypatch, *packages):
    """Makes `packages` look installed, and no other peer."""

    def version(package):
        if package in packages:
            return "1.0"
        raise peers.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(peers, "metadata", types.SimpleNamespace(**vars(peers.metadata) | {"version": version}))


def test_absent_peers_are_named_with_the_remedy(monkeypatch):
    install(monkeypatch)
    assert peers.versions() == {"torch": None, "tokamax": None}
    assert [line.split()[0] for line in peers.absent()] == ["torch", "tokamax"]
    assert all("not installed" in line and "'.[peers]'" in line for line in peers.absent())
    assert baselines() == ["flax", "jax_nn", STACK]


def test_an_installed_peer_is_compared(monkeypatch):
    install(monkeypatch, "tokamax")
    fake_tokamax(monkeypatch)
    assert baselines() == ["flax", "jax_nn", "tokamax", "tokamax_chunked", STACK]
    case = Case("tokamax_chunked", 16, "grad")
    entry = measuring.measure_case(case, TINY, identity(), 0, FEW, 0, PLENTY)
    assert entry["agrees"] and entry["identical_program"] and entry["unfused"]["temporaries_bytes"] > 0


@pytest.mark.parametrize("mode", spellings.MODES)
def test_torch_agrees_where_it_is_installed(mode):
    pytest.importorskip("torch", reason="needs the `peers` extra")
    entry = measuring.measure_case(Case("torch", 32, mode), TINY, identity(), 0, FEW, 0, PLENTY)
    assert entry["agrees"] and entry["unfused"]["temporaries_bytes"] is None and entry["ratio"]["pairs"] == 8


# measuring


def test_memory_is_a_quarter_of_the_machine_or_of_its_container(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_LIMIT", tmp_path / "absent")
    physical = memory.machine_bytes()
    monkeypatch.setattr(memory, "_LIMIT", tmp_path / "limit")
    (tmp_path / "limit").write_text("1000\n")
    assert memory.machine_bytes() == 1000 and memory.budget_bytes() == 250
    (tmp_path / "limit").write_text("max\n")
    assert memory.machine_bytes() == physical > 1000


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case("flax", 16, "forward"), Case("jax_nn", 16, "grad")], ids=lambda case: case.key)
def test_a_case_that_fits_has_a_ratio_and_agrees(case):
    entry = measuring.measure_case(case, TINY, aicf(), 0, FEW, 0, PLENTY)
    assert entry["ratio"]["pairs"] == 8 and entry["agrees"] and entry["not_run"] is None and entry["compared"] == "all"


def temporaries(length, mode, heads):
    args = spellings.attention_args(length, heads, 8, 0)
    unfused = spellings.attention_step(spellings.flax_attention, mode)
    return measuring.compile_ahead(unfused, args).temporaries_bytes


@pytest.mark.slow
def test_what_exceeds_the_budget_is_only_compiled_and_compared_by_heads():
    sizes = Sizes(lengths=(128,), heads=4, head_dim=8)
    budget = temporaries(128, "forward", 4) - 1
    case = Case("flax", 128, "forward")
    entry = measuring.measure_case(case, sizes, LEAN, 0, FEW, 0, budget)
    assert entry["ratio"] is None and "baseline only compiled" in entry["not_run"] and "budget" in entry["not_run"]
    assert entry["unfused"]["median_ns"] is None and entry["fused"]["median_ns"] > 0
    assert entry["compared"] == "heads 0 and 3" and entry["agrees"]

    wrong = dataclasses.replace(LEAN, fuse=lambda target: lambda q, k, v: 1.01 * lean(q, k, v))
    entry = measuring.measure_case(case, sizes, wrong, 0, FEW, 0, budget)
    assert entry["agrees"] is False and entry["max_relative_difference"] == pytest.approx(0.01, rel=0.01)

    entry = measuring.measure_case(case, sizes, LEAN, 0, FEW, 0, 0)
    assert "baseline only compiled" in entry["not_run"] and "candidate only compiled" in entry["not_run"]
    assert entry["agrees"] is None and entry["compared"] == "nothing" and entry["fused"]["median_ns"] is None


# bars


def entry(baseline="flax", length=4096, mode="grad", **changes):
    result = {
        "status": "measured",
        "baseline": baseline,
        "length": length,
        "mode": mode,
        "own": baseline in ("flax", "jax_nn", STACK),
        "ratio": {"median": 0.3, "low": 0.29, "high": 0.31, "q1": 0.3, "q3": 0.3, "pairs": 8, "stopped": "time"},
        "identical_program": False,
        "unfused": {"median_ns": 10, "compile_s": 1.0, "temporaries_bytes": 10**10},
        "fused": {"median_ns": 3, "compile_s": 1.0, "temporaries_bytes": 10**8},
        "max_relative_difference": 0.0,
        "tolerance": 1e-3,
        "agrees": True,
        "not_run": None,
        "compared": "all",
        "fusions": {},
    }
    return {**result, **changes}


def ratio(median):
    return {"median": median, "low": median - 0.01, "high": median + 0.01, "q1": median, "q3": median, "pairs": 8}


def bytes_of(count):
    return {"median_ns": 3, "compile_s": 1.0, "temporaries_bytes": count}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (entry(), None),
        (entry(ratio=ratio(0.4)), "0.400x the time of flax"),
        (entry(ratio=ratio(1.0), identical_program=True), "1.000x the time of flax"),
        (entry(fused=bytes_of(10**9)), "1000000000 bytes of temporaries, allowed 400000000"),
        (entry("torch", ratio=ratio(1.14)), None),
        (entry("torch", ratio=ratio(1.2)), "1.200x the time of torch"),
        (entry("tokamax", ratio=ratio(5.0)), None),
        (entry(length=512, ratio=ratio(1.0)), None),
        (entry(length=512, ratio=ratio(1.1)), "allowed 1.030x"),
        (entry(length=512, ratio=ratio(1.1), identical_program=True), None),
        (entry(length=16384, ratio=None, fused=bytes_of(299_999_999)), None),
        (entry(length=16384, ratio=None, fused=bytes_of(300_000_001)), "allowed 300000000"),
        (entry(STACK, 1024, "value_and_grad", ratio=ratio(1.0)), None),
        (entry(STACK, 1024, "value_and_grad", ratio=ratio(1.1)), "allowed 1.030x"),
        (entry("tokamax", agrees=False, max_relative_difference=0.5), "differs by 0.5"),
        (entry(agrees=False, max_relative_difference=None), "structure"),
        (entry(agrees=None), None),
        ({"status": "failed", "error": "E", "own": True}, "failed, E"),
        ({"status": "failed", "error": "E", "own": False}, None),
    ],
)
def test_bars_of_attention(found, words):
    missed = bars.missed_by_attention("key", found)
    assert (not missed) if words is None else (len(missed) == 1 and "key: " in missed[0] and words in missed[0])


def test_what_no_run_can_judge_is_named():
    assert bars.undecided_by_attention("k", entry()) == []
    assert "holds 0.333" in bars.undecided_by_attention("k", entry(ratio=ratio(0.33)))[0]
    assert "too big" in bars.undecided_by_attention("k", entry(ratio=None, not_run="too big"))[0]
    assert bars.undecided_by_attention("k", entry("tokamax", ratio=None, not_run="too big")) == []
    assert "the peer failed" in bars.undecided_by_attention("k", {"status": "failed", "error": "E", "own": False})[0]


def test_goals_are_told_and_never_missed():
    lines = bars.goals_of_stack("k", entry(STACK, 1024, "value_and_grad", ratio=ratio(0.8), fused=bytes_of(5 * 10**9)))
    assert lines == ["k: 1.25 times as fast, goal 1.5", "k: 0.50 of the temporaries, goal 0.25"]
    assert bars.goals_of_stack("k", entry()) == []


# command line


def run(tmp_path, *arguments):
    stream = io.StringIO()
    code = cli.main([*arguments, "--output", str(tmp_path)], Console(file=stream, width=200))
    return code, stream.getvalue()


ONE = ("attention", "--quick", "--lengths", "16", "--budget", "0.1", "--fuse", "identity")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(study, "QUICK", TINY)


def test_a_run_writes_table_chart_and_json_and_is_continued(tmp_path, monkeypatch):
    install(monkeypatch)
    code, text = run(tmp_path, *ONE, "--check")
    assert code == 0 and "goal: gpt_stack/s16/value_and_grad" in text and "95 % interval" in text
    assert text.count("torch is not installed, so it is not compared: pip install '.[peers]'") == 2
    document = json.loads((tmp_path / "attention.json").read_text())
    assert document["config"]["peers"] == {"torch": None, "tokamax": None}
    assert len(document["entries"]) == 5
    for found in document["entries"].values():
        assert set(found) == {*entry(), "finished", "load_average"} and found["agrees"]
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr(study, "measure_case", lambda *args: pytest.fail("measured again"))
    code, text = run(tmp_path, *ONE)
    assert code == 0 and "5 finished entries kept" in text
    # with a peer it is another configuration
    install(monkeypatch, "tokamax")
    monkeypatch.setattr(study, "measure_case", lambda case, *args: entry(case.baseline, case.length, case.mode))
    code, text = run(tmp_path, *ONE)
    assert code == 0 and "attention.stale-1.json" in text


@pytest.mark.slow
def test_a_case_too_large_says_so_in_the_table(tmp_path, monkeypatch):
    install(monkeypatch)
    monkeypatch.setattr(memory, "budget_bytes", lambda: 0)
    code, text = run(tmp_path, *ONE, "--programs", "flax")
    assert code == 0 and "baseline only compiled" in text and "nothing compared" in text and "not run" in text
    found = json.loads((tmp_path / "attention.json").read_text())["entries"]["flax/s16/grad"]
    assert found["ratio"] is None and found["unfused"]["temporaries_bytes"] > 0


def test_a_failing_case_is_named_and_the_others_go_on(tmp_path, monkeypatch):
    install(monkeypatch, "tokamax")
    monkeypatch.setitem(sys.modules, "tokamax", types.ModuleType("tokamax"))
    code, text = run(tmp_path, *ONE, "--programs", "tokamax", "--modes", "forward")
    assert code == 0 and "the peer failed, AttributeError" in text, "a peer's failure is not ours"

    def broken(case, *rest):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(study, "measure_case", broken)
    code, text = run(tmp_path, *ONE, "--programs", "flax", "--modes", "forward")
    assert code == 1 and "bar missed: flax/s16/forward: failed, RuntimeError: no kernel" in text


@pytest.mark.slow
def test_check_names_a_wrong_program(tmp_path, monkeypatch):
    install(monkeypatch)

    def wrong(target):
        return lambda *args: 1.5 * target(*args)

    fuser = Fuser("identity", wrong, lambda: Work(0, 0), lambda: None, lambda target, args: {})
    monkeypatch.setitem(FUSERS, "identity", lambda: fuser)
    code, text = run(tmp_path, *ONE, "--programs", "jax_nn", "--modes", "forward", "--check")
    assert code == 1 and "jax_nn/s16/forward: differs by 0.5" in text


def test_filters_and_list(tmp_path, capsys):
    code, text = run(tmp_path, "attention", "--list", "--lengths", "16384")
    assert code == 0 and "attention flax/s16384/grad" in text and "s4096" not in text and "gpt_stack" not in text
    code, text = run(tmp_path, "--list", "--programs", "mlp")
    assert code == 0 and "suite mlp/forward" in text and "attention" not in text
    assert run(tmp_path, "attention", "--list", "--lengths", "7")[0] == 2
    assert "unknown length 7; there are 512, 1024" in capsys.readouterr().err
    assert run(tmp_path, "attention", "--list", "--programs", "gpt_stack", "--modes", "grad")[0] == 2
    assert "no chosen baseline" in capsys.readouterr().err
