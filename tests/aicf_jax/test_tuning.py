"""Measured times: kernels are ranked by them where there are any, and a table that cannot be trusted is not."""

import json
import logging
import os

import jax
import jax.numpy as jnp
import pytest

import aicf_jax
from aicf_jax import Kernel, Policy, tuning
from aicf_jax.hardware import Need
from aicf_jax.kernels import XLA
from aicf_jax.primitives import fused_p
from gpu_probe import Property, PropertyMap
from tests.support import EVERY_GEMM_EPILOGUE

X, W, B = jnp.ones((8, 4)), jnp.ones((4, 6)), jnp.ones(6)


def dense(x, w, b):
    return jax.nn.silu(x @ w + b)


def run(op, x, w, b):
    return (dense(x, w, b),)


MINE = Kernel("mine", "gemm_epilogue", ("cpu",), EVERY_GEMM_EPILOGUE, run)
OTHER = Kernel("other", "gemm_epilogue", ("cpu",), EVERY_GEMM_EPILOGUE, run)
KERNELS = (MINE, OTHER)


def operation():
    (eqn,) = [e for e in jax.make_jaxpr(aicf_jax.fuse(dense, kernels=KERNELS))(X, W, B).eqns if e.primitive is fused_p]
    return eqn.params["op"]


def chosen(path, **policy):
    report = aicf_jax.explain(dense, X, W, B, policy=Policy(tuning=str(path), **policy), kernels=KERNELS)
    return report.fusions[0].kernel, {r.code: r for r in report.refusals}


def table(path, device=None, **seconds):
    tuning.write(path, device or tuning.machine("cpu"), {tuning.key_of(operation()): seconds})
    return path


@pytest.fixture(autouse=True)
def fresh():
    aicf_jax.clear_caches()


def test_the_fastest_measured_kernel_wins(tmp_path):
    kernel, refused = chosen(table(tmp_path / "t.json", xla=3e-3, mine=2e-3, other=1e-3))
    assert kernel == "other" and refused == {}


def test_what_was_measured_to_be_slower_is_refused_with_both_times(tmp_path):
    kernel, refused = chosen(table(tmp_path / "t.json", xla=1e-3, mine=2e-3, other=4e-3))
    assert kernel == XLA
    assert (refused["slower"].expected, refused["slower"].found) == ("less than 1.000 ms, as xla takes", "4.000 ms")


def test_without_a_measurement_bytes_decide(tmp_path):
    assert chosen(tmp_path / "none.json")[0] == "mine"
    assert chosen(table(tmp_path / "t.json", device="another machine", xla=1e-3, mine=2e-3, other=4e-3))[0] == "mine"


def test_another_shape_or_dtype_is_another_entry():
    keys = set()
    for x, w in ((X, W), (jnp.ones((9, 4)), W), (X.astype("bfloat16"), W.astype("bfloat16"))):
        program = jax.make_jaxpr(aicf_jax.fuse(dense, kernels=KERNELS))(x, w, B.astype(x.dtype))
        keys |= {tuning.key_of(e.params["op"]) for e in program.eqns if e.primitive is fused_p}
    assert len(keys) == 3


BAD = {
    "not JSON": "{",
    "another schema": json.dumps({"schema": 99, "devices": {}}),
    "a list": "[1, 2]",
    "times that are text": json.dumps({"schema": 1, "devices": {"cpu": {"op": {"mine": "fast"}}}}),
    "a time of zero": json.dumps({"schema": 1, "devices": {"cpu": {"op": {"mine": 0}}}}),
    "no devices": json.dumps({"schema": 1}),
    "a time that no float holds": json.dumps({"schema": 1, "devices": {"cpu": {"op": {"mine": 10**400}}}}),
    "infinity": json.dumps({"schema": 1, "devices": {"cpu": {"op": {"mine": float("inf")}}}}),
    "a truth value": json.dumps({"schema": 1, "devices": {"cpu": {"op": {"mine": True}}}}),
    "more digits than Python reads": "1" * 5000,
    "too deep": "[" * 100_000,
}


@pytest.mark.parametrize("kind", BAD)
def test_a_table_that_cannot_be_used_is_reported_ignored_and_set_aside(tmp_path, caplog, kind):
    path = tmp_path / "t.json"
    path.write_text(BAD[kind], encoding="utf-8")
    with caplog.at_level(logging.WARNING, logger="aicf_jax"):
        assert chosen(path)[0] == "mine"
    assert f"tuning table {path} is ignored" in caplog.text
    assert path.read_text(encoding="utf-8") == BAD[kind]  # reading changes nothing
    table(path, xla=1e-3, mine=2e-3)
    assert (tmp_path / "t.unusable-1.json").read_text(encoding="utf-8") == BAD[kind]
    aicf_jax.clear_caches()
    assert chosen(path)[1]["slower"].found == "2.000 ms"


@pytest.mark.parametrize("name", ["", "there/t.json", "a\0b", "x" * 5000], ids=["folder", "file", "null", "long"])
def test_a_path_that_is_no_file_is_reported_and_nothing_is_written_or_moved(tmp_path, caplog, name):
    (tmp_path / "there").write_text("mine", encoding="utf-8")
    with caplog.at_level(logging.WARNING, logger="aicf_jax"):
        assert chosen(tmp_path / name)[0] == "mine"
    assert "is ignored: it cannot be read" in caplog.text
    with pytest.raises(ValueError, match=r"tune\(path=...\): expected"):
        aicf_jax.tune(dense, X, W, B, path=tmp_path / name, kernels=KERNELS, budget_s=0.0)
    assert [p.name for p in tmp_path.parent.glob(f"{tmp_path.name}*")] == [tmp_path.name]
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


def test_tables_written_within_one_tick_of_the_clock_are_all_kept(tmp_path):
    path = tmp_path / "t.json"
    for n in range(1, 4):
        tuning.write(path, "device", {f"operation {n}": {"xla": 1.0}})
        os.utime(path, ns=(0, 0))
    assert len(tuning.load(path)["device"]) == 3


def test_a_kernel_that_cannot_be_traced_is_not_measured(tmp_path):
    def fails(op, *inputs):
        raise RuntimeError("not these shapes")

    broken = Kernel("other", "gemm_epilogue", ("cpu",), EVERY_GEMM_EPILOGUE, fails)
    tuned = aicf_jax.tune(dense, X, W, B, path=tmp_path / "t.json", kernels=(MINE, broken), budget_s=0.0)
    assert [set(found) for found in tuned.seconds.values()] == [{"xla", "mine"}]


def test_a_kernel_whose_needs_this_machine_does_not_meet_is_not_measured(tmp_path):
    greedy = Kernel(
        "greedy", "gemm_epilogue", ("cpu",), EVERY_GEMM_EPILOGUE, run, needs=lambda op: [Need("l3.size", 2**40, "B")]
    )
    here = PropertyMap({"kind": "cpu", "name": "here"}, {"l3.size": Property(2**25, "B", "datasheet", "by hand")})
    for found, measured in ((None, {"xla", "mine", "greedy"}), (here, {"xla", "mine"})):
        tuned = aicf_jax.tune(
            *(dense, X, W, B), path=tmp_path / "t.json", kernels=(MINE, greedy), budget_s=0.0,
            policy=Policy(hardware=found),
        )  # fmt: skip
        assert [set(kernels) for kernels in tuned.seconds.values()] == [measured]


def test_a_measurement_does_not_make_a_kernel_legal(tmp_path):
    path = table(tmp_path / "t.json", xla=3e-3, mine=2e-3, other=1e-3)
    kernels = (MINE, Kernel("other", "gemm_epilogue", ("cpu",), EVERY_GEMM_EPILOGUE, run, deterministic=False))
    policy = Policy(tuning=str(path), deterministic=True)
    report = aicf_jax.explain(dense, X, W, B, policy=policy, kernels=kernels)
    assert report.fusions[0].kernel == "mine" and [r.code for r in report.refusals] == ["deterministic"]


def test_tune_measures_every_candidate_forward_and_backward(tmp_path):
    def attention(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    q = jax.ShapeDtypeStruct((1, 256, 2, 16), jnp.float32)
    path = tmp_path / "t.json"
    tuned = aicf_jax.tune(attention, q, q, q, path=path, budget_s=0.01)
    found = {name.split("[")[0]: set(seconds) for name, seconds in tuned.seconds.items()}
    assert found == {
        "attention": {"xla", "streamed_attention"},
        "attention_grad": {"xla", "streamed_attention_grad"},
    }
    assert tuned.policy == Policy(tuning=str(path)) and "*" in str(tuned)
    assert tuning.load(path)[tuning.machine("cpu")] == tuned.seconds
    fusion = aicf_jax.explain(attention, q, q, q, policy=tuned.policy).fusions[0]
    forward = next(s for name, s in tuned.seconds.items() if name.startswith("attention["))
    assert fusion.kernel == min(forward, key=forward.get)


def test_measurements_of_several_programs_share_a_table(tmp_path):
    path = tmp_path / "t.json"
    for rows in (8, 9):
        aicf_jax.tune(dense, jnp.ones((rows, 4)), W, B, path=path, kernels=(MINE,), budget_s=0.0)
    assert len(tuning.load(path)[tuning.machine("cpu")]) == 2


def test_nothing_to_tune_writes_nothing(tmp_path):
    tuned = aicf_jax.tune(jnp.sin, X, path=tmp_path / "t.json")
    assert tuned.seconds == {} and "nothing to tune" in str(tuned) and not (tmp_path / "t.json").exists()


def test_another_machine_cannot_be_tuned_for_here(tmp_path):
    with pytest.raises(ValueError, match=r"tune\(policy=...\): expected a target that is this machine, found 'h200'"):
        aicf_jax.tune(dense, X, W, B, path=tmp_path / "t.json", policy=Policy(target="h200"))


def test_the_path_is_text():
    with pytest.raises(ValueError, match=r"Policy\(tuning=...\): expected None or a path as text, found 3"):
        Policy(tuning=3)
