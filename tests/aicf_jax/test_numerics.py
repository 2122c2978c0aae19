"""The numerics contract: classes are declared and documented, bitwise is bitwise, verification names what is wrong."""

import pickle
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aicf_jax
from aicf_jax import Comparison, Kernel, Pattern, Policy, VerificationError
from aicf_jax.attrs import Schema
from aicf_jax.cache import build_plan
from aicf_jax.fronts.function import trace_call
from aicf_jax.fuse import make_context
from aicf_jax.ops import OPS, SemanticOp
from aicf_jax.pattern import GEMM
from aicf_jax.policy import NUMERICS
from aicf_jax.verify import bound, summed
from tests.corpus.attention_spellings import CASES
from tests.support import ACTIVATIONS, EVERY_GEMM_EPILOGUE, dense, normal

ROOT = Path(__file__).resolve().parents[2]
X, W, B = normal(1, 6, 8), normal(2, 8, 4), normal(3, 4)


# -- declared and documented ----------------------------------------------------------------------------------------


def documented():
    """Rewrite -> (class, bound, test) of the table in docs/numerics.md."""
    text = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| rewrite \| class \| bound \| test \|\n\|[-|]+\|\n((?:\|.*\n)+)", text)
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert len({row[0] for row in rows}) == len(rows), "a rewrite has two rows"
    return {row[0]: row[1:] for row in rows}


@pytest.mark.parametrize("name", sorted(OPS))
def test_every_rewrite_has_its_row(name):
    table = documented()
    assert name in table, f"docs/numerics.md: add a row for `{name}`: class, bound, test"
    numerics, limit, test = table[name]
    assert numerics == OPS[name].numerics, f"docs/numerics.md: `{name}` is of class {OPS[name].numerics}"
    assert limit and (numerics != "bitwise" or limit == "0")
    assert (ROOT / test).is_file(), f"docs/numerics.md: {test}, the test of `{name}`, does not exist"


def test_the_table_has_no_row_for_what_does_not_exist():
    assert set(documented()) <= set(OPS)


@pytest.mark.parametrize("kernel", aicf_jax.KERNELS, ids=lambda k: k.name)
def test_no_kernel_is_looser_than_its_operation(kernel):
    """Else a policy would let a rewrite pass that its only kernel then makes worse than it said."""
    assert NUMERICS.index(kernel.numerics) <= NUMERICS.index(OPS[kernel.op].numerics)


def test_classes_are_checked_when_built():
    with pytest.raises(ValueError, match=r"SemanticOp\('fast', numerics=...\): expected one of"):
        SemanticOp("fast", Schema(901, 1, ()), lambda m: {}, lambda op: {}, numerics="quick")


# -- bitwise --------------------------------------------------------------------------------------------------------


def lowered(f, args, policy):
    """StableHLO of the unfused program and of the plan."""
    context = make_context(policy, aicf_jax.FUSION_PATTERNS, aicf_jax.KERNELS)
    traced = trace_call(f, args, {})
    plan = build_plan(traced.jaxpr, context)
    assert plan.failure is None
    return tuple(jax.jit(g).lower(*traced.values).as_text() for g in (plan.reference, plan.function))


DENSE = [(name, dense(name), (X, W, B)) for name in ACTIVATIONS]


@pytest.mark.parametrize(
    ("f", "args"),
    [pytest.param(f, args, id=name) for name, f, args, *_ in (*CASES, *DENSE)],
)
def test_bitwise_programs_are_the_unfused_ones(f, args):
    unfused, plan = lowered(f, args, Policy(numerics="bitwise"))
    # The reference is an inner jit: the same operations in a function of their own.
    assert _operations(plan) == _operations(unfused) != []
    report = aicf_jax.explain(f, *args, policy=Policy(numerics="bitwise"))
    assert report.fusions == ()


def _operations(text):
    """Operations with types and attributes, without the names of values and functions and without calls."""
    lines = (re.sub(r"%[\w#:]+|@\w+|loc\(.*\)", "", line).strip() for line in text.splitlines())
    skipped = ("module", "func.func", "return", "}", "call", "=  call", "= call", "= func.call")
    return [line for line in lines if line and not line.startswith(skipped) and "call " not in line]


@pytest.mark.parametrize("name", ["gelu_tanh", "silu", "relu"])
def test_bitwise_results_have_the_same_bits(name):
    f = dense(name)
    fused = aicf_jax.fuse(f, policy=Policy(numerics="bitwise"))
    np.testing.assert_array_equal(fused(X, W, B), f(X, W, B))
    np.testing.assert_array_equal(jax.jit(fused)(X, W, B), jax.jit(f)(X, W, B))
    got, want = (jax.jit(jax.grad(lambda w, g=g: g(X, w, B).sum()))(W) for g in (fused, f))
    np.testing.assert_array_equal(got, want)


def test_bitwise_refusals_say_why():
    (refusal,) = aicf_jax.explain(dense("relu"), X, W, B, policy=Policy(numerics="bitwise")).refusals
    assert (refusal.stage, refusal.code) == ("legality", "numerics")
    assert (refusal.expected, refusal.found) == ("numerics class bitwise or stricter", "class reassociated")


def exact_gemm(numerics):
    return SemanticOp("exact_gemm", Schema(902, 1, ()), lambda m: {}, lambda op: {}, numerics=numerics)


def test_a_bitwise_rewrite_takes_no_looser_kernel():
    pattern = Pattern("exact_gemm", (GEMM,), exact_gemm("bitwise"))
    run = lambda op, *xs: op.reference(*xs)  # noqa: E731
    kernels = [
        Kernel(name, "exact_gemm", ("cpu",), {}, run, numerics=name, cost_bytes=lambda op, n=n: n)
        for n, name in enumerate(("approximate", "reassociated", "bitwise"))
    ]

    def chosen(numerics):
        report = aicf_jax.explain(
            lambda x, w: x @ w, X, W, patterns=(pattern,), kernels=tuple(kernels), policy=Policy(numerics=numerics)
        )
        return report.fusions[0]

    assert [chosen(n).kernel for n in NUMERICS] == ["bitwise", "reassociated", "approximate"]
    # The report tells the class of what runs.
    assert [chosen(n).numerics for n in NUMERICS] == list(NUMERICS)


# -- verification ---------------------------------------------------------------------------------------------------


def off(factor, **capabilities):
    run = lambda op, *xs: tuple(factor * y for y in op.reference(*xs))  # noqa: E731
    return aicf_jax.KERNELS + (Kernel("off", "gemm_epilogue", ("cpu",), {**EVERY_GEMM_EPILOGUE, **capabilities}, run),)


def two_layers(x, w, b):
    h = jnp.tanh(x @ w + b)
    return jax.nn.relu(h @ w.T)


class TestVerificationError:
    def caught(self):
        f = aicf_jax.fuse(two_layers, kernels=off(1.01, activation={"relu"}), policy=Policy(verify=True))
        with pytest.raises(VerificationError) as caught:
            f(X, W, B)
        return caught.value

    def test_carries_operation_error_bound_and_site(self):
        error = self.caught()
        assert error.op == "gemm_epilogue" and error.error == pytest.approx(0.01, rel=1e-3)
        # one product of four terms, float32 results
        assert error.bound == bound(jnp.float32, 4) < error.error
        assert "test_numerics.py" in error.site and "two_layers" in error.site
        assert error.comparison.what.endswith("by kernel off")

    def test_survives_pickling(self):
        error = self.caught()
        again = pickle.loads(pickle.dumps(error))
        assert str(again) == str(error) and again.comparison == error.comparison


class TestCompare:
    def test_each_fused_operation_has_its_own_error(self):
        report = aicf_jax.compare(two_layers, X, W, B, kernels=off(1.01, activation={"relu"}))
        tanh, relu = report.fusions
        assert tanh.error is None  # it runs as its own equations
        assert relu.error == pytest.approx(0.01, rel=1e-3) and relu.error > relu.bound
        operation, program = report.comparisons
        assert (operation.op, operation.agrees) == ("gemm_epilogue", False)
        assert (program.op, program.agrees) == ("program", False)
        assert "compared gemm_epilogue" in str(report) and "exceeds the bound" in str(report)

    def test_a_right_kernel_is_within_its_bound(self):
        report = aicf_jax.compare(two_layers, X, W, B, kernels=off(1.0))
        assert [f.error for f in report.fusions] == [0.0, 0.0] and all(c.agrees for c in report.comparisons)

    def test_it_is_a_report(self):
        report = aicf_jax.compare(two_layers, X, W, B, kernels=off(1.0))
        plain = aicf_jax.explain(two_layers, X, W, B, kernels=off(1.0))
        assert [f.op for f in report.fusions] == [f.op for f in plain.fusions] and "error 0.0e+00" in report.to_html()

    def test_backwards_are_measured_where_the_function_takes_them(self):
        """The fused function inside carries its backward; the outer one brings no kernel of its own."""
        loss = aicf_jax.fuse(lambda w: two_layers(X, w, B).sum(), kernels=off(1.0), policy=Policy(verify=True))
        report = aicf_jax.compare(jax.grad(loss), W)
        assert any(c.what.startswith("backward of gemm_epilogue") for c in report.comparisons)
        assert all(c.agrees for c in report.comparisons)


class TestBounds:
    def op(self, f, *args):
        context = make_context(Policy(), aicf_jax.FUSION_PATTERNS, aicf_jax.KERNELS)
        (fused,) = build_plan(trace_call(f, args, {}).jaxpr, context).rewritten.fusions
        return fused.op

    def test_the_length_is_that_of_the_sums(self):
        op = self.op(dense("relu"), X, W, B)
        assert summed(op) == 8
        assert summed(op, backward=True) >= 8 + 6 + 4 + 6  # dX over 4, dW and db over 6 rows

    def test_attention_sums_over_features_and_twice_over_keys(self):
        q, k, v = normal(1, 2, 5, 4), normal(2, 2, 7, 4), normal(3, 2, 7, 3)
        op = self.op(lambda q, k, v: jax.nn.softmax(q @ jnp.swapaxes(k, 1, 2)) @ v, q, k, v)
        assert op.semantic.name == "attention" and summed(op) == 4 + 7 + 7

    def test_comparisons_print_both_sides(self):
        c = Comparison("gemm", "gemm() by kernel k", 1, 0.5, 0.25, "f.py:1 (f)")
        assert str(c) == "gemm() by kernel k, result 1: relative error 0.5 exceeds the bound 0.25, at f.py:1 (f)"
        assert not c.agrees and "is within" in str(Comparison("g", "g", 0, 0.1, 0.25, "s"))
